"""`syncline plan JOB`: how each layer of a job's model is best cut over its processes, as a table and as a file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, IterableDataset

from syncline.cli.error_output import told
from syncline.cli.options import BatchSize, Cluster, Debug, JobFile, Learners, Sets, Wish, load
from syncline.cluster import Cluster as Machines
from syncline.errors import UsageError
from syncline.learn.gradient_ways import Backprop, way_of
from syncline.learn.loader import reader
from syncline.plan import plan as cheapest
from syncline.terminal import visible
from syncline.train.groups import model_inputs

Group = Annotated[
    int | None, typer.Option(metavar="M", help="Processes that hold one model; the best number if not given.")
]
Memory = Annotated[float | None, typer.Option(metavar="BYTES", help="The most that a process may hold.")]
Out = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="Save the plan, to be edited and used again.")
]


def plan(
    job: JobFile = None,
    learners: Learners = None,
    batch_size: BatchSize = None,
    group: Group = None,
    cluster: Cluster = None,
    memory: Memory = None,
    out: Out = None,
    set_: Sets = None,
    debug: Debug = False,
) -> None:
    """Find the cheapest way to cut a job's model over groups of processes, layer by layer.

    λ is the number of processes here, each with its batch of μ examples; they make groups of M that hold one model together. Without a
    cluster the floats are counted that move in one step; with one, seconds of computation and communication are added up.

    [bold]syncline plan job.toml --learners 8[/]                                 the best group and its plan
    [bold]syncline plan job.toml --learners 8 --group 4 --cluster ethernet-1g[/]   in seconds, on a cluster
    """
    with told(debug):
        flags = {"learners": learners, "batch_size": batch_size}
        loaded = load(Wish(job=job, flags=flags, sets=set_ or []))
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
            """What the model reads of a joint batch, as shapes."""
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
