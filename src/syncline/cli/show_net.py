"""`syncline show` of a net: that of a job file or a saved one, as a table and as a graph. Nothing is trained."""

from __future__ import annotations

from pathlib import Path

from syncline.errors import UsageError
from syncline.jobs import Job
from syncline.nn.net import Net, load_net
from syncline.report.net_graph import net_graph

SAVED = ".safetensors"
KINDS = (".toml", SAVED)


def show_net(file: Path, *, graph: bool) -> None:
    """Print the model; the graph goes beside where one is, under the file's name."""
    model = load_net(file) if file.suffix == SAVED else Job.load(file).build()["model"]
    net = isinstance(model, Net)
    if graph and not net:
        raise UsageError(f"{file} names its model; --graph draws nets that are written as layers")
    count = sum(parameter.numel() for parameter in model.parameters())
    print(model if net else f"{model}\n{count:,} parameters")
    if graph:
        picture = Path(f"{file.stem}.svg")
        picture.write_text(net_graph(model.table()), encoding="utf-8")
        print(f"graph: {picture}")
