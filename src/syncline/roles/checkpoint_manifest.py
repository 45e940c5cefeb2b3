"""What a checkpoint holds of a run, and back: the manifest, and the state that a run goes on from.

Tensors lie in one file per table and shard and one for the learners; of an all-reduce run those on their way under delayed:k (A3), each
as large as the model, in another. Everything else is in the manifest. Not responsible for how files are written or found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from syncline import messages as m
from syncline.dial import Sync
from syncline.errors import LayoutError, UsageError
from syncline.protocols.epoch_positions import Standing
from syncline.protocols.sequence import Account
from syncline.table.checkpoints import (
    Checkpoint,
    CheckpointError,
    Content,
    Source,
    layout_json,
    layout_of,
    read_content,
)
from syncline.table.layout import Layout

FLIGHTS = "flights.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanInFlight:
    """One iteration's gradients, summed over all learners and not applied yet."""

    iteration: int
    stamp: int
    epochs: list[int]  # that end with it
    options: list[dict[str, Any]]  # of the groups, as they were with the gradient
    header: list[float]  # what all said with it
    factor: float  # from the sum to the mean
    losses: dict[int, tuple[float, int]] = field(
        default_factory=dict
    )  # rank -> (sum over examples, examples)
    gradients: dict[int, Tensor] = field(default_factory=dict)  # by entry


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineState:
    """How far the steps of one table are."""

    started: int  # iterations
    void: int = 0  # of them, without examples
    depth: int = 0
    groups: list[dict[str, Any]] = field(default_factory=list)  # what the optimizer keeps in its groups
    flights: list[MeanInFlight] = field(default_factory=list)

    def without_tensors(self) -> PipelineState:
        """For the manifest."""
        return replace(self, flights=[replace(flight, gradients={}) for flight in self.flights])


def flight_tensors(pipelines: Mapping[int, PipelineState]) -> dict[str, Tensor]:
    """By name."""
    return {
        f"{table}/{flight.iteration}/{entry}": gradient
        for table, pipeline in pipelines.items()
        for flight in pipeline.flights
        for entry, gradient in flight.gradients.items()
    }


def pipelines_json(
    pipelines: Mapping[int, PipelineState], losses: Mapping[int, Mapping[int, Sequence[tuple[float, int]]]]
) -> list[dict[str, Any]]:
    """For the manifest, with every rank's losses of the flights, by rank and table."""
    found = []
    for table, pipeline in pipelines.items():
        flights = [
            {
                **{key: value for key, value in asdict(flight).items() if key != "gradients"},
                "losses": {rank: list(each[table][number]) for rank, each in losses.items()},
            }
            for number, flight in enumerate(pipeline.flights)
        ]
        found.append({**asdict(pipeline), "table": table, "flights": flights})
    return found


LEARNERS = "learners.safetensors"


def learner_tensors(
    random: Mapping[int, bytes], buffers: Mapping[tuple[int, int], Sequence[Tensor]]
) -> dict[str, Tensor]:
    """Random states by rank, buffers by (table, rank), as named tensors."""
    tensors = {
        f"random/{rank}": torch.frombuffer(bytearray(state), dtype=torch.uint8)
        for rank, state in random.items()
    }
    for (table, rank), values in buffers.items():
        tensors.update({f"buffer/{table}/{rank}/{index}": value for index, value in enumerate(values)})
    return tensors


@dataclass(frozen=True, kw_only=True)
class TableState:
    """One table to go on from."""

    layout: Layout
    optimizer: str
    account: Account
    source: Source | None = None  # where its values are; a batch method's are elsewhere

    @cached_property
    def content(self) -> Content:
        """Read when it is asked for: a coordinator never does."""
        assert self.source is not None and self.source.folder is not None
        return read_content(self.source, Path(self.source.folder), self.layout)


@dataclass(frozen=True, kw_only=True)
class LoaderState:
    """One loader to go on from."""

    size: int
    policy: str
    parts: int
    standing: Standing


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A run to go on from."""

    name: str  # of the checkpoint, for messages
    seed: int
    path: str = ""  # of its files
    seal: int = 0  # of its content
    tables: dict[int, TableState] = field(default_factory=dict)
    loaders: dict[int, LoaderState] = field(default_factory=dict)
    learners: dict[int, m.Personal] = field(default_factory=dict)
    counts: m.Counts = field(default_factory=m.Counts)
    history: list[dict[str, Any]] = field(default_factory=list)
    sync: str = ""  # the dials of the run that wrote it
    chosen: list[tuple[Sync, int]] = field(default_factory=list)  # changed to on the way, with the epoch
    pipelines: dict[int, PipelineState] = field(default_factory=dict)  # of an all-reduce run, by table
    simulated: dict[str, Any] | None = None  # where a simulated run stood; the simulator's own
    virtual: float = 0.0  # seconds of a simulated all-reduce run, or one of a batch method
    batch: dict[str, Any] | None = None  # where a batch method stood (M18)

    def check_layout(self, table: int, layout: Layout) -> None:
        """A table goes on only with the model that it was made with."""
        kept = self.tables.get(table)
        if kept is not None and (difference := kept.layout.difference(layout)):
            raise LayoutError(
                f"{self.name} was made by another model: table {table} there and here, {difference}. "
                "Resume with the model and parameter groups it was made with."
            )

    def check_optimizer(self, table: int, optimizer: str) -> None:
        kept = self.tables.get(table)
        if kept is not None and kept.optimizer != optimizer:
            raise UsageError(
                f"{self.name} holds the state of {kept.optimizer}, this run has {optimizer} "
                "for that table; resume with the optimizer it was made with"
            )

    def check_loader(self, loader: int, size: int, policy: str) -> None:
        kept = self.loaders.get(loader)
        if kept is not None and (kept.size, kept.policy) != (size, policy):
            raise UsageError(
                f"{self.name} was made with {kept.size} examples in loader {loader} ({kept.policy}), "
                f"this run has {size} ({policy}); resume with the data it was made with"
            )

    @property
    def version(self) -> int:
        return self.tables[0].account.version if self.tables else 0

    @property
    def epoch(self) -> int:
        """Epochs of the first loader that are done."""
        return self.loaders[0].standing.done if 0 in self.loaders else 0

    def has_done(self, epoch: int) -> bool:
        """That epoch of the first loader: one may be done before an earlier one."""
        return 0 in self.loaders and self.loaders[0].standing.has_done(epoch)


def manifest(
    cut: m.Cut,
    *,
    seed: int,
    sync: str,
    chosen: Sequence[tuple[Sync, int]],
    learners: int,
    tables: Mapping[int, tuple[Layout, str]],
    loaders: Mapping[int, tuple[m.OpenLoader, int]],
    history: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Everything of a checkpoint that is no tensor, for JSON."""
    return {
        "seed": seed,
        "sync": sync,
        "chosen": [[asdict(dial), epoch] for dial, epoch in chosen],
        "learners": learners,
        "tables": [
            {
                "table": table,
                "layout": layout_json(layout),
                "optimizer": optimizer,
                "account": asdict(cut.accounts[table]),
            }
            for table, (layout, optimizer) in tables.items()
        ],
        "loaders": [
            {
                "loader": loader,
                "size": opened.size,
                "policy": opened.policy,
                "parts": parts,
                "standing": asdict(cut.standings[loader]),
            }
            for loader, (opened, parts) in loaders.items()
        ],
        "counts": asdict(cut.counts),
        "history": upto(cut.number, history),
    }


def upto(version: int, history: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Records of epochs that were done by then."""
    return [record for record in history if record["version"] <= version]


def restored(checkpoint: Checkpoint) -> Restored:
    """Read a checkpoint, but for the tables' values."""
    found = checkpoint.manifest
    if "batch" in found:
        raise UsageError(
            f"{checkpoint.name} is a batch method's ({found['batch']['method']}): resume it with sync='sandblaster'"
        )
    try:
        counts = {key: _by_number(value) for key, value in found["counts"].items()}
        counts["losses"] = {epoch: _by_number(ranks) for epoch, ranks in counts["losses"].items()}
        return Restored(
            name=str(checkpoint.name),
            seed=found["seed"],
            path=str(checkpoint.path),
            seal=checkpoint.seal,
            tables={record["table"]: _table(checkpoint, record) for record in found["tables"]},
            loaders={record["loader"]: _loader(record) for record in found["loaders"]},
            learners=_learners(checkpoint.tensors(LEARNERS), counts["steps"]),
            counts=m.Counts(**counts),
            history=found["history"],
            sync=found["sync"],
            chosen=[(Sync(**record), epoch) for record, epoch in found.get("chosen", [])],
            pipelines=_pipelines(checkpoint, found.get("pipelines", [])),
            simulated=found.get("simulated"),
            virtual=found.get("virtual", 0.0),
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint {checkpoint.name} lacks {error}: it was written by another version of Syncline"
        ) from error


def _pipelines(checkpoint: Checkpoint, records: Sequence[Mapping[str, Any]]) -> dict[int, PipelineState]:
    gradients: dict[tuple[int, int], dict[int, Tensor]] = {}
    tensors = checkpoint.tensors(FLIGHTS) if any(record["flights"] for record in records) else {}
    for name, tensor in tensors.items():
        table, iteration, entry = map(int, name.split("/"))
        gradients.setdefault((table, iteration), {})[entry] = tensor
    found = {}
    for record in records:
        state = dict(record)
        table = state.pop("table")
        state["flights"] = [
            MeanInFlight(
                **{
                    **flight,
                    "losses": {int(rank): (loss, count) for rank, (loss, count) in flight["losses"].items()},
                    "gradients": gradients.get((table, flight["iteration"]), {}),
                }
            )
            for flight in record["flights"]
        ]
        found[table] = PipelineState(**state)
    return found


def _table(checkpoint: Checkpoint, record: Mapping[str, Any]) -> TableState:
    layout, account = layout_of(record["layout"]), record["account"]
    return TableState(
        layout=layout,
        optimizer=record["optimizer"],
        source=Source(str(checkpoint.path), record["table"], layout.shards),
        account=Account(**{**account, "histogram": _by_number(account["histogram"] or {})}),
    )


def _loader(record: Mapping[str, Any]) -> LoaderState:
    standing = record["standing"]
    fresh = {
        epoch: {owner: (low, high) for owner, (low, high) in _by_number(owners).items()}
        for epoch, owners in _by_number(standing["fresh"]).items()
    }
    spans = [(epoch, start, stop) for epoch, start, stop in standing["returned"]]
    skipped = _by_number(standing["skipped"])
    return LoaderState(
        size=record["size"],
        policy=record["policy"],
        parts=record["parts"],
        standing=Standing(**{**standing, "fresh": fresh, "returned": spans, "skipped": skipped}),
    )


def _learners(tensors: Mapping[str, Tensor], steps: Mapping[int, int]) -> dict[int, m.Personal]:
    random: dict[int, bytes] = {}
    buffers: dict[int, dict[int, dict[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        kind, *numbers = name.split("/")
        if kind == "random":
            random[int(numbers[0])] = bytes(tensor.numpy())
        else:
            table, rank, index = map(int, numbers)
            buffers.setdefault(rank, {}).setdefault(table, {})[index] = tensor
    return {
        rank: m.Personal(
            steps.get(rank, 0),
            random.get(rank, b""),
            {table: [found[i] for i in sorted(found)] for table, found in buffers.get(rank, {}).items()},
        )
        for rank in sorted({*steps, *random, *buffers})
    }


def _by_number(mapping: Mapping[Any, Any]) -> dict[int, Any]:
    """JSON has only strings for keys."""
    return {int(key): value for key, value in mapping.items()}
