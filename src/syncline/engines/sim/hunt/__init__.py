"""The fault hunt: small random jobs on random clusters with random faults, checked after every event."""

from syncline.engines.sim.hunt.case import DIALS, Case, random_case
from syncline.engines.sim.hunt.hunting import Found, hunt
from syncline.engines.sim.hunt.playing import Failure, play
from syncline.engines.sim.hunt.shortening import shorten

__all__ = ["DIALS", "Case", "Failure", "Found", "hunt", "play", "random_case", "shorten"]
