"""The public front doors `train` and `launch`, and what they give back.

Both check everything that can be checked before a process starts, build a `RunSpec`, and hand it to an engine.
"""

from syncline.train.api import launch, train
from syncline.train.run import Result, Run
from syncline.train.spec import ENGINES

__all__ = ["ENGINES", "Result", "Run", "launch", "train"]
