"""How long an iteration of Sandblaster L-BFGS would take: no gradients, just sizes, for any number of learners and parameters.

    python -m reproductions.distbelief.batch_times

The coordinator, the portions and the network are those of simulated runs. Not responsible for how many iterations a problem needs:
that is a run with gradients (figures45.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from syncline.batch import commands as c
from syncline.batch import messages as b
from syncline.batch.coordinator import Coordinator, slots_of, window_of
from syncline.batch.portions import Portions, Samples, Statistics
from syncline.cluster import Cluster
from syncline.engines.simulated_times import LearnerTimes
from syncline.errors import RunError
from syncline.learn.server_session import check_whole
from syncline.sim.batch_method_parties import Numbers, Play
from syncline.sim.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTiming:
    """Virtual seconds, and what they went to."""

    seconds: float
    iteration: float  # seconds of one, the first apart: learners begin with nothing read
    moved: int  # bytes between machines
    sums: Statistics
    learners: LearnerTimes  # of all together


class _Typical:
    """The commands of L-BFGS with a full history, where each line search takes so many evaluations."""

    name = "typical"

    def __init__(self, history: int, evaluations: int) -> None:
        self._evaluations = evaluations
        self._pairs = [f"{kind}{slot}" for kind in "sy" for slot in range(history)]
        self.vectors = ("x", "g", "d", "old x", *self._pairs)

    def __call__(self, state: c.State | None = None) -> c.Steps:
        dots = tuple(
            c.Dot(f"{name}.{other}", name, other) for name in self._pairs for other in ("g", "s0", "y0")
        )
        make = (
            c.Combine("d", tuple((1.0, name) for name in ("g", *self._pairs))),
            c.Copy("old x", "x"),
            c.Swap("y0", "g"),
        )
        trial = (c.Combine("x", ((1.0, "old x"), (1.0, "d"))), c.Evaluate(), c.Dot("slope", "d", "g"))
        pair = (c.Combine("s0", ((1.0, "x"), (-1.0, "old x"))), c.Combine("y0", ((1.0, "g"), (-1.0, "y0"))))
        count = 0
        while True:
            yield (*make, *trial)
            for _ in range(self._evaluations - 1):
                yield trial
            yield (*pair, *dots)
            count += 1
            yield c.Iteration({}, c.Record(count, 0.0, 1.0, 1.0, count * self._evaluations))


class _Sizes(Numbers):
    def __init__(self, portion: int) -> None:
        self._portion = portion

    def run(self, shard: int, commands: c.Program) -> tuple[float, ...]:
        return (0.0,) * len(c.results(commands))

    def add(self, shard: int, message: b.Add) -> None:
        pass

    def sum(self, task: b.Give) -> tuple[float, int]:
        return 0.0, sum(self.examples(task, portion) for portion in range(task.start, task.stop))

    def examples(self, task: b.Give, portion: int) -> int:
        return min((portion + 1) * self._portion, task.batch.examples) - portion * self._portion


def time_batch(
    cluster: Cluster,
    *,
    parameters: int,
    examples: int,
    learners: int,
    portion: int,
    shards: int = 1,
    history: int = 10,
    iterations: int = 3,
    evaluations: int = 1,
    copies: int = 3,
    every: int = 4,
    deterministic: bool = False,
    itemsize: int = 4,
    seed: int = 0,
) -> BatchTiming:
    """A batch of `examples` in portions; `evaluations` in each iteration. `copies=1`: nothing is computed twice."""
    given = {"parameters": parameters, "examples": examples, "learners": learners, "portion": portion}
    for name, value in {
        **given,
        "shards": shards,
        "iterations": iterations,
        "evaluations": evaluations,
    }.items():
        check_whole(name, value)
    window = window_of(learners) if deterministic else None
    coordinator = Coordinator(
        _Typical(history, evaluations),
        Samples(examples, portion),
        shards=shards,
        slots=slots_of(learners, deterministic=deterministic),
        portions=Portions(every=every, copies=copies, deterministic=deterministic, window=window),
        limit=iterations,
    )
    clock, moments, ended = Clock(), [0.0], []

    def done(said: b.Reached | b.Over) -> None:
        if isinstance(said, b.Over):
            ended.append(said)
        else:
            moments.append(clock.now)
            play.do(coordinator.proceed())

    part = -(-parameters // shards) * itemsize
    play = Play(
        clock, cluster, coordinator, _Sizes(portion), [part] * shards, seed=seed, learners=learners, done=done
    )
    play.do(coordinator.begin())
    for rank in range(learners):
        play.join(rank + 1, rank)
    while not ended:
        if not clock.step():
            raise RunError(f"the simulated run stands still at {clock.now:g} s")
    last = (moments[-1] - moments[1]) / (iterations - 1) if iterations > 1 else moments[-1]
    times = sum((learner.times for learner in play.learners.values()), start=LearnerTimes())
    return BatchTiming(
        seconds=clock.now,
        iteration=last,
        moved=play.network.moved,
        sums=coordinator.statistics(),
        learners=times,
    )


def main() -> None:
    """The speech net of 42 M parameters, a batch of a million examples in portions of 100, on 64 shards."""
    cluster = Cluster.named("ethernet-1g")
    for learners in (20, 200, 2000):
        timing = time_batch(
            cluster, parameters=42_000_000, examples=10**6, learners=learners, portion=100, shards=64
        )
        print(
            f"{learners:5} learners: {timing.iteration:10,.1f} s an iteration, {timing.moved / 1e9:,.0f} GB moved"
        )


if __name__ == "__main__":
    main()
