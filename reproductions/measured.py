"""Points of SINGA's Fig. 7, DistBelief's Fig. 3 and COTS-HPC's Fig. 6 with real processes on this machine, beside what the plan says of it.

    python -m reproductions.measured [--figures fig7,fig3,fig6] [--processes 1,2,4] [--repeats 3] [--steps 3] [--csv FILE]

Processes of one thread, pinned to cores in turn and joined by the loopback interface; where they are more than cores they share them.
Smaller than the papers': AlexNet with 16 images, the speech net with 32 examples, stacks of local filters with 32 images of
100 x 100. Predictions are made as in `benchmarks.bench_parallel`, from parts measured just before. Leave the machine alone meanwhile.
"""

import csv
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks import bench_parallel, machine
from benchmarks.bench_overlap import Network
from benchmarks.bench_parallel import Model, Task, predicted, run
from reproductions.distbelief.fig3 import local, speech
from reproductions.singa.fig7 import WAYS
from reproductions.splits import options_of
from syncline import Cluster, plan


def _flat(depth: int) -> nn.Module:
    """With values, and as many results as there are places in the last maps."""
    return nn.Sequential(local(depth, 2, "cpu")(), nn.Flatten())


bench_parallel.MODELS |= {
    "speech": Model(lambda: speech("cpu"), (440,), 8192),
    "stacks, depth 2": Model(lambda: _flat(2), (3, 100, 100), 64),
    "stacks, depth 4": Model(lambda: _flat(4), (3, 100, 100), 64),
}
SPATIAL = {"0.*filter": "spatial"}
FIGURES: dict[str, list[tuple[str, str, int, Mapping[str, str] | None]]] = {  # what, model, batch, choices
    "fig7": [(name, "alexnet", 16, choices) for name, choices in WAYS.items()],
    "fig3": [("speech", "speech", 32, {"*": "model"}), ("local", "stacks, depth 4", 32, SPATIAL)],
    "fig6": [(name, name, 32, SPATIAL) for name in ("stacks, depth 2", "stacks, depth 4")],
}


@dataclass
class Point:
    figure: str
    what: str
    processes: int
    predicted: float
    measured: float  # the median
    least: float
    most: float


def point(
    figure: str, case: tuple[str, str, int, Mapping[str, str] | None], count: int, repeats: int, steps: int
) -> Point:
    what, name, batch, given = case
    with torch.device("meta"):
        model = bench_parallel.MODELS[name].make()
    example = torch.empty(batch, *bench_parallel.MODELS[name].shape, device="meta")
    choices = plan(
        model, example, Cluster.named("ethernet-1g"), count, given=given if count > 1 else None
    ).choices
    task, network = Task(name, batch, "ours", steps, count, choices), Network(None)
    expected = predicted(network, task)
    times = [max(run(network, task)) for _ in range(repeats)]
    return Point(figure, what, count, expected, statistics.median(times), min(times), max(times))


def main() -> None:
    options = options_of(__doc__, figures=",".join(FIGURES), processes="1,2,4", repeats="3", steps="3")
    print(machine.describe())
    print(f"{'':<28}{'processes':>10}{'predicted':>11}{'measured s':>12}{'':>18}{'x one':>8}")
    points: list[Point] = []
    for figure in options.figures.split(","):
        for case in FIGURES[figure]:
            own = [
                point(figure, case, int(n), int(options.repeats), int(options.steps))
                for n in options.processes.split(",")
            ]
            for each in own:
                spread, speed = f"{each.least:.3f}..{each.most:.3f}", own[0].measured / each.measured
                head = f"{figure} {each.what:<23}{each.processes:>10}{each.predicted:>11.3f}{each.measured:>12.3f}"
                print(f"{head}{spread:>18}{speed:>8.2f}", flush=True)
            points += own
    if options.csv:
        with options.csv.open("w", newline="") as stream:
            stream.write(f"# {json.dumps(machine.describe())}\n")
            writer = csv.DictWriter(stream, list(vars(points[0])))
            writer.writeheader()
            writer.writerows(vars(each) for each in points)


if __name__ == "__main__":
    main()
