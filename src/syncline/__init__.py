"""Syncline trains PyTorch models on many workers, with synchrony as a dial."""

from syncline.batch.conjugate_gradient import ConjugateGradient
from syncline.batch.gradient_descent import GradientDescent
from syncline.batch.lbfgs import LBFGS
from syncline.dial import Sync
from syncline.engines.local.engine import Local
from syncline.engines.ray.engine import Ray
from syncline.engines.run import EpochRecord
from syncline.engines.sim.cluster import Cluster
from syncline.engines.sim.engine import Sim
from syncline.errors import LearnerError, RunError, SynclineError, UsageError
from syncline.learn.feed import epoch_order
from syncline.learn.surface import Session
from syncline.parallel import layer, partition
from syncline.plan import plan
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
