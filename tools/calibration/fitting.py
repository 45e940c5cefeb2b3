"""From what one learner was seen to do to a cluster that does the same, and what that cluster says of several.

The run that was measured (one learner, plain loops beside it) is simulated; what it took longer than the simulator knows becomes
latency. What several do to each other through the memory is measured where each has a core (`crowd`); elsewhere what the plain loops lost
becomes a cost of others' gradients. Not responsible for measuring (`calibrate`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from syncline.cluster import Cluster, Compute, Cost, Jitter, Link
from syncline.dial import Course
from syncline.engines.run import RunSpec, Task
from syncline.learn.session import Session
from syncline.roles.run_plan import RunPlan
from syncline.sim.simulation import Simulation
from syncline.topologies import Servers
from tools.calibration.shard_benchmark import Work

LEAST = 1e-6  # seconds of latency
STAND_IN = (
    64  # rows and columns of the table that stands for the model's; only its share of the costs matters
)
STEPS = 200  # of each learner
CLOSER, CLOSE = 10, 0.002  # times that the latency is corrected at most, and when a step is long enough


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds on this machine: one learner under one dial, with so many plain loops beside it, and a shard's work."""

    sync: str
    shards: int  # of the table
    beside: int  # plain loops
    cores: int
    slice: float | None  # of a core, where two want it
    spin: float  # for which a learner yields before it sleeps
    nbytes: int  # of the table
    step: float  # all of it
    spread: float  # of single computations: the jitter's
    lost: float  # by all plain loops together, for each of its gradients
    one: Work  # what its parts take
    all: (
        Work | None
    )  # where all learners do the same and each process has a core; None: the same, but for shared cores
    note: float  # the leading shard's handling of a gradient's note, without the table's work
    reply: float  # and for each learner that a fold releases

    @property
    def lockstep(self) -> bool:
        return Course.of(self.sync).first.lockstep

    def bare(self) -> Cluster:
        """All that was measured directly; the rest takes no time."""
        return self._with(
            self.one,
            Cluster(
                name="this-machine",
                learners_per_machine=None,
                shards_per_machine=None,
                beside=True,
                cores=self.cores,
                slice=self.slice,
                spin=self.spin,
                message=self.note,
                reply=self.reply,
            ),
        )

    def _with(self, work: Work, cluster: Cluster) -> Cluster:
        costs: dict[str, Cost] = {
            name: Cost(per_byte=getattr(work, name) / self.nbytes)
            for name in ("copy", "take", "fold", "serve")
        }
        return replace(cluster, compute=Compute(base=work.compute), **costs)  # type: ignore[arg-type]

    def cluster(self) -> Cluster:
        """With one learner and the plain loops it takes the time that was measured; what several do to each other is added."""
        found = self._with_latency()
        if self.all is not None:
            found = self._with(self.all, found)
        else:
            known = simulate(found, self, learners=1, loops=self.beside).lost
            found = replace(found, compute=Compute(base=self.one.compute + self._intrusion(known)))
        return replace(found, jitter=Jitter(kind="lognormal", spread=self.spread))

    def _with_latency(self) -> Cluster:
        """What is missing of the step is on its way, in as many messages as the number of shards makes it."""
        found = _delayed(self.bare(), LEAST)
        least = simulate(found, self, learners=1, loops=self.beside).step
        low, high, latency = LEAST, self.step, (self.step - least) / 2
        for _ in range(CLOSER):
            if latency <= LEAST:
                return found
            found = _delayed(found, latency)
            step = simulate(found, self, learners=1, loops=self.beside).step
            if abs(step / self.step - 1) < CLOSE:
                break
            low, high = (latency, high) if step < self.step else (low, latency)
            latency *= (self.step - least) / max(LEAST, step - least)
            latency = latency if low < latency < high else (low + high) / 2
        return found

    def _intrusion(self, known: float) -> float:
        """What others' gradients take from each computation, beyond what sharing cores explains.

        Where all compute, each loses what its own gradients take from the others, while it computes; in lockstep nobody computes
        while the shards fold.
        """
        if self.lockstep or not self.beside:
            return 0.0
        return max(0.0, self.lost - known) * self.one.compute / self.step


@dataclass(frozen=True, slots=True)
class Simulated:
    """Seconds of each learner's step, and what each plain loop lost meanwhile, all together."""

    step: float
    lost: float


def simulate(cluster: Cluster, of: Measured, *, learners: int, loops: int = 0) -> Simulated:
    """A run of the measured model, with plain loops beside it; a small table stands for the model's."""
    spec = RunSpec(
        task=Task(_steps, (STEPS,)),
        plan=RunPlan(
            course=Course.of(of.sync),
            learners=learners,
            topology=Servers(of.shards, True),
            batch_size=1,  # for dials whose rate depends on it
        ),
    )
    world = Simulation(spec, _scaled(cluster, of.nbytes))
    machine = cluster.machine_of_learner(0)
    for loop in range(loops):
        world.machines.run(machine, float("inf"), _nothing, loop)
    outcome = world.run()
    served = sum(world.machines.served(machine, loop) for loop in range(loops))
    return Simulated(outcome.seconds / STEPS, (loops * outcome.seconds - served) / STEPS)


def _delayed(cluster: Cluster, latency: float) -> Cluster:
    link = Link(latency=latency)
    return replace(cluster, card=link, memory=link)


def _nothing() -> None:
    raise AssertionError("a plain loop has no end")


def _scaled(cluster: Cluster, nbytes: int) -> Cluster:
    factor = nbytes / (STAND_IN * STAND_IN * 4)

    def scale(cost: Cost) -> Cost:
        return replace(cost, per_byte=cost.per_byte * factor)

    costs: dict[str, Cost] = {
        name: scale(getattr(cluster, name)) for name in ("copy", "take", "fold", "serve")
    }
    return replace(cluster, **costs)  # type: ignore[arg-type]


def _steps(session: Session, count: int) -> None:
    model = nn.Linear(STAND_IN, STAND_IN, bias=False)
    optimizer = session.optimizer(model, _sgd)
    model.weight.grad = torch.zeros_like(model.weight)
    for _ in range(count):
        optimizer.step()


_sgd: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
