"""Public helpers for tests: faults as a script, and processes that die at a given operation.

run = sl.train(..., wait=False)
faults = Faults("kill learner 2 at version 30; add 1 at version 50; pause shard 1 for 2 s at 5 s")
faults.play(run)
result = run.wait()
"""

from syncline.engines.local.engine import Local
from syncline.testing.faults import Fault, Faults
from syncline.testing.leftovers import end_leftovers
from syncline.testing.small_cluster import Nodes

__all__ = ["Fault", "Faults", "Local", "Nodes", "end_leftovers"]
