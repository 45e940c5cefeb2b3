"""Syncline trains PyTorch models on many workers, with synchrony as a dial."""

from syncline.batch.methods import LBFGS, ConjugateGradient, GradientDescent
from syncline.cluster import Cluster
from syncline.dial import Sync
from syncline.engines.local.engine import Local
from syncline.engines.ray.engine import Ray
from syncline.engines.run import EpochRecord
from syncline.errors import LearnerError, RunError, SynclineError, UsageError
from syncline.learn.loader import epoch_order
from syncline.learn.session import Session
from syncline.parallel import layer, partition
from syncline.plan import plan
from syncline.sim.engine import Sim
from syncline.train import Result, Run, launch, train

__all__ = [
    "LBFGS",
    "Cluster",
    "ConjugateGradient",
    "EpochRecord",
    "GradientDescent",
    "LearnerError",
    "Local",
    "Ray",
    "Result",
    "Run",
    "RunError",
    "Session",
    "Sim",
    "Sync",
    "SynclineError",
    "UsageError",
    "epoch_order",
    "launch",
    "layer",
    "partition",
    "plan",
    "train",
]
__version__ = "0.1.0"
