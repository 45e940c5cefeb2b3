"""Find how each layer of a job's model is best cut over its processes; print it as a table, save it as a file."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, IterableDataset

from syncline.cli.options import Wish, load
from syncline.cluster import Cluster as Machines
from syncline.errors import UsageError
from syncline.learn.loader import reader
from syncline.plan import plan as cheapest


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
    inputs = batch[0] if isinstance(batch, list | tuple) else batch

    def joint(tensor: Tensor) -> Tensor:
        """Return what the model reads of a joint batch, as a shape."""
        return torch.empty((examples, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")

    example = pytree.tree_map_only(Tensor, joint, inputs)
    machines = Machines.parse(cluster) if cluster is not None else None
    limit = math.inf if memory is None else memory
    seats = group if loaded.group == 1 else loaded.group
    workers = loaded.learners * loaded.group
    found = cheapest(made["model"], example, machines, seats, workers=workers, memory=limit)
    print(found)
    if out is not None:
        found.save(out)
