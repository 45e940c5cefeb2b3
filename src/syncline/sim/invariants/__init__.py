"""What always holds, checked on a simulated run after every event: accounts of its own beside the protocols'."""

from syncline.sim.invariants.watch import Watch

__all__ = ["Watch"]
