"""The fault hunt: small random jobs on random clusters with random faults, checked after every event."""

from syncline.testing.hunt.case import DIALS, Case, random_case
from syncline.testing.hunt.case_player import Failure, play
from syncline.testing.hunt.search import Found, hunt, shorten

__all__ = ["DIALS", "Case", "Failure", "Found", "hunt", "play", "random_case", "shorten"]
