"""Find how each layer of a job's model is best cut over its processes; print it as a table, save it as a file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, IterableDataset

from syncline.cli.options import Wish, load
from syncline.cluster import Cluster as Machines
from syncline.errors import UsageError
from syncline.learn.gradient_ways import Backprop, way_of
from syncline.learn.loader import reader
from syncline.plan import plan as cheapest
from syncline.terminal import visible
from syncline.train.groups import model_inputs


def print_plan(
    wish: Wish, *, group: int | None, cluster: str | None, memory: float | None, out: Path | None
) -> None:
    """Print the cheapest plan for a job; save it to `out` if given."""
    loaded = load(wish)
    made = loaded.build()
    data, examples = made["data"], loaded.learners * loaded.batch_size
    if not isinstance(data, Dataset) or isinstance(data, IterableDataset):
        raise UsageError("plan: a stream has no first batch to look at; use sl.plan(model, example, …)")
    batch = reader(data, made["collate"])(torch.arange(min(2, len(data))))  # type: ignore[arg-type]
    model: Any = made["model"] if isinstance(made["model"], nn.Module) else made["model"]()
    way = way_of(made["gradient"], model, made["loss"], made["objective"])
    inputs: Any = batch[0] if isinstance(batch, list | tuple) else batch
    if isinstance(way, Backprop):  # what a run with group= would cut
        model = way.to_cut(model)
        inputs = model_inputs(model, way, batch)

    def joint(tensor: Tensor) -> Tensor:
        """Return what the model reads of a joint batch, as a shape."""
        return torch.empty((examples, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")

    example = pytree.tree_map_only(Tensor, joint, inputs)
    machines = Machines.parse(cluster) if cluster is not None else None
    limit = math.inf if memory is None else memory
    seats = group if loaded.group == 1 else loaded.group
    workers = loaded.learners * loaded.group
    found = cheapest(model, example, machines, seats, workers=workers, memory=limit)
    print(visible(str(found), lines=True))
    if out is not None:
        found.save(out)
