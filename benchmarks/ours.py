"""Syncline on the benchmark's workload: the same loop as the peers', through `sl.launch`."""

import time
from collections.abc import Callable
from functools import partial

import syncline as sl
from benchmarks.workload import make_batch, make_model, make_optimizer, rate, stepping

WARM_UP_STEPS = 5


def run(
    dims: tuple[int, ...],
    batch_size: int,
    workers: int,
    seconds: float,
    *,
    sync: str,
    topology: str = "servers",
) -> float:
    """Gradients per second, summed over workers."""
    measure = lockstep_rate if sync == "hardsync" or sync.startswith("delayed") else free_rate
    result = sl.launch(
        partial(work, measure=measure),
        dims,
        batch_size,
        seconds,
        learners=workers,
        sync=sync,
        topology=topology,
        threads=1,
    )
    return sum(result.returned)


def work(
    session: sl.Session,
    dims: tuple[int, ...],
    batch_size: int,
    seconds: float,
    measure: Callable[[sl.Session, Callable[[], None], float], float],
) -> float:
    model = make_model(dims)
    batch = make_batch(dims, batch_size, seed=session.rank)
    optimizer = session.optimizer(model, make_optimizer)
    return measure(session, stepping(model, batch, optimizer), seconds)


def lockstep_rate(session: sl.Session, step: Callable[[], None], seconds: float) -> float:
    """All learners time the same number of steps."""
    taken = timed(step, WARM_UP_STEPS)
    steps = max(5, int(WARM_UP_STEPS * min(0.5, seconds / 4) / session.mean(taken)))
    taken = timed(step, steps)
    steps = max(5, int(steps * seconds / session.mean(taken)))
    return steps / timed(step, steps)


def free_rate(session: sl.Session, step: Callable[[], None], seconds: float) -> float:
    """Each learner counts its steps in a window that all begin together."""
    timed(step, WARM_UP_STEPS)
    session.mean(0.0)
    return rate(step, seconds)


def timed(step: Callable[[], None], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        step()
    return time.perf_counter() - start
