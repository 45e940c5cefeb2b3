"""What a shard's optimizer step takes on a model of many small tensors: parameter by parameter, and joined.

    python -m benchmarks.bench_step [--repeats 7] [--json FILE]

The model is a ResNet of 20 layers for CIFAR-10 (convolutions, batch norm, one linear layer); one thread; the best of several repeats.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import machine
from syncline.table.joined_parameters_step import JoinedStep
from syncline.table.layout import lay_out
from syncline.table.optimizer_template import OptimizerTemplate, bare_step

STEPS = 50
CASES: list[tuple[type, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    (torch.optim.Adam, {"lr": 0.001}),
    (torch.optim.AdamW, {"lr": 0.001}),
]


def resnet20() -> nn.Sequential:
    """Only its parameters matter here."""
    widths = [(3, 16), *[(16, 16)] * 6, (16, 32), *[(32, 32)] * 5, (32, 64), *[(64, 64)] * 5]
    layers: list[nn.Module] = []
    for i, o in widths:
        layers += [nn.Conv2d(i, o, 3, bias=False), nn.BatchNorm2d(o)]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def best(step: Callable[[], Any], repeats: int) -> float:
    """Microseconds of one step."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        times.append((time.perf_counter() - start) / STEPS)
    return 1e6 * min(times)


def measure(kind: type, options: dict[str, Any], repeats: int) -> dict[str, Any]:
    model = resnet20()
    inner = kind(model.parameters(), **options)
    layout, tensors = lay_out(model, [g["params"] for g in inner.param_groups], cuttable=True, shards=1)
    part = layout.parts[0]
    segments = [torch.zeros(length) for length in layout.parameters.lengths]
    for view, value in zip(layout.parameters.views(segments), tensors.parameters, strict=True):
        view.copy_(value.detach())
    entries = layout.parameters.entries
    optimizer, parameters = OptimizerTemplate.of(inner).build(part, layout, part.views(segments, entries))
    gradient = [torch.randn_like(segment) for segment in segments]
    for parameter, view in zip(parameters, part.views(gradient, entries), strict=True):
        parameter.grad = view
    plain = best(bare_step(optimizer), repeats)
    optimizer.state.clear()
    joined = JoinedStep(optimizer, part, parameters, segments)
    together = best(lambda: joined.step(gradient), repeats)
    return {
        "optimizer": kind.__name__,
        "parameters": len(parameters),
        "plain_us": plain,
        "joined_us": together,
        "ratio": plain / together,
    }


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    head = machine.announce()
    rows = [measure(kind, options, given.repeats) for kind, options in CASES]
    for row in rows:
        print(
            f"{row['optimizer']:<6} {row['parameters']} parameters: plain {row['plain_us']:.0f} µs, "
            f"joined {row['joined_us']:.0f} µs, {row['ratio']:.1f}x"
        )
    machine.keep(given.json, {"machine": head, "rows": rows})


if __name__ == "__main__":
    main()
