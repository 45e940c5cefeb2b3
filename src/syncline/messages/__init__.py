"""What the parties of a run say to each other: small classes, one meaning each. Engines carry them.

Outside the fast path, and named here: `to_coordinator`, `from_coordinator`. On every step's: what learners tell the leading shard
(`to_leader`), its decisions (`log`), and its answers to the nodes of a tree (`to_tree_nodes`).
"""

from syncline.messages.from_coordinator import *  # noqa: F403
from syncline.messages.to_coordinator import *  # noqa: F403
