"""What a checkpoint holds of a run, and back: the manifest, and the state that a run goes on from.

Tensors lie in one file per table and shard and one for the learners; of an all-reduce run those on their way under delayed:k (A3), each
as large as the model, in another. Everything else is in the manifest. Not responsible for how files are written or found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from syncline import messages as m
from syncline.dial import Sync
from syncline.errors import LayoutError, UsageError
from syncline.protocols.epoch_positions import Standing
from syncline.protocols.sequence import Account
from syncline.table.checkpoint_content import Content, Source, read_content
from syncline.table.checkpoints import Checkpoint, CheckpointError, layout_json
from syncline.table.layout import DTYPES, Layout

FLIGHTS = "flights.safetensors"
Count = Annotated[int, Meta(ge=0, le=2**62)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class EpochRecord:
    """One epoch, at the version that folded its last example (M10)."""

    epoch: int  # or iteration, counted from 0; what is printed counts from 1
    version: int
    seconds: float
    examples: int
    loss: float
    losses: dict[int, float]
    metrics: dict[str, float] = field(default_factory=dict)
    notes: dict[str, float] = field(default_factory=dict)  # of a batch iteration: step, evaluations …
    skipped: bool = False  # its evaluation was given up: there are no metrics

    def __getitem__(self, key: str) -> Any:
        known = {**self.notes, **self.metrics}
        return known[key] if key in known else getattr(self, key)


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
    history: list[EpochRecord] = field(default_factory=list)
    sync: str = ""  # the dials of the run that wrote it
    chosen: list[tuple[Sync, int]] = field(default_factory=list)  # changed to on the way, with the epoch
    pipelines: dict[int, PipelineState] = field(default_factory=dict)  # of an all-reduce run, by table
    simulated: dict[str, Any] | None = None  # where a simulated run stood; the simulator's own
    virtual: float = 0.0  # seconds of a simulated all-reduce run, or one of a batch method
    batch: BatchState | None = None  # where a batch method stood (M18)

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


# -- reading: nothing of a manifest is trusted, though its checksum is right -----------------------------------


class TableRecord(msgspec.Struct, kw_only=True):
    """One table in a manifest."""

    table: Count
    layout: Layout
    optimizer: str
    account: Account


class LoaderRecord(msgspec.Struct, kw_only=True):
    """One loader in a manifest."""

    loader: Count
    size: Annotated[int, Meta(ge=-1, le=2**62)]  # -1: a stream
    policy: str
    parts: Annotated[int, Meta(ge=1)]
    standing: Standing


class Numbered(msgspec.Struct):
    """The table that a pipeline in a manifest is of."""

    table: Count


class Manifest(msgspec.Struct, kw_only=True):
    """Record that `manifest` and engines write of a run over servers, or over all-reduce."""

    seed: int
    sync: str
    chosen: list[tuple[Sync, int]] = []
    tables: list[TableRecord]
    loaders: list[LoaderRecord]
    counts: m.Counts
    history: list[EpochRecord]
    pipelines: list[dict[str, Any]] = []
    simulated: dict[str, Any] | None = None
    virtual: Seconds = 0.0


class BatchState(msgspec.Struct, kw_only=True):
    """Position of a batch method (M18)."""

    method: str
    iteration: Count
    state: dict[str, Any]
    size: Count
    portion: Count
    examples: Count
    sums: Count
    discarded: Count
    files: list[str]


class BatchManifest(msgspec.Struct, kw_only=True):
    """Record of a batch method's run."""

    seed: int
    sync: str
    layout: Layout
    history: list[EpochRecord]
    virtual: Seconds = 0.0
    batch: BatchState


def decoded(checkpoint: str, kind: type[T], content: Any) -> T:
    """Convert a part of a manifest; raise CheckpointError where it is not what this version writes."""
    try:
        return msgspec.convert(content, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _unexpected(checkpoint, error) from error


def _unexpected(checkpoint: str, problem: object) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {checkpoint} cannot be used, its content is not what this version of Syncline writes: {problem}; "
        "resume from another one, or start without resume"
    )


def check_sound(checkpoint: str, layout: Layout) -> Layout:
    """Return the layout, if it describes tensors that there can be."""
    entries = [*layout.parameters.entries, *layout.buffers.entries, *layout.others.entries]
    odd = [entry for entry in entries if entry.dtype not in DTYPES or min(entry.shape, default=0) < 0]
    members = sorted(index for group in layout.groups for index in group)
    if odd:
        raise _unexpected(checkpoint, f"there is no tensor {odd[0]}")
    if layout.shards < 1 or members != list(range(len(layout.parameters.entries))):
        raise _unexpected(checkpoint, f"{layout.shards} shards and groups {members} of parameters")
    return layout


def restored(checkpoint: Checkpoint) -> Restored:
    """Read a checkpoint, but for the tables' values."""
    name = str(checkpoint.name)
    if "batch" in checkpoint.manifest:
        raise UsageError(f"{name} is a batch method's: resume it with sync='sandblaster'")
    found = decoded(name, Manifest, checkpoint.manifest)
    for table in found.tables:
        check_sound(name, table.layout)
        decoded(name, list[Count], [table.account.version, table.account.gradients, table.account.dropped])
    for loader in found.loaders:
        if problem := loader.standing.contradiction(loader.size):
            raise _unexpected(name, f"of loader {loader.loader}, {problem}")
    if odd := [pair for ranks in found.counts.losses.values() for pair in ranks.values() if len(pair) != 2]:
        raise _unexpected(name, f"losses {odd[0]} in place of a sum and a count")
    return Restored(
        name=name,
        seed=found.seed,
        path=str(checkpoint.path),
        seal=checkpoint.seal,
        tables={
            each.table: TableState(
                layout=each.layout,
                optimizer=each.optimizer,
                source=Source(str(checkpoint.path), each.table, each.layout.shards),
                account=each.account,
            )
            for each in found.tables
        },
        loaders={
            each.loader: LoaderState(
                size=each.size, policy=each.policy, parts=each.parts, standing=each.standing
            )
            for each in found.loaders
        },
        learners=_learners(name, checkpoint.tensors(LEARNERS), found.counts.steps),
        counts=found.counts,
        history=found.history,
        sync=found.sync,
        chosen=found.chosen,
        pipelines=_pipelines(checkpoint, found.pipelines),
        simulated=found.simulated,
        virtual=found.virtual,
    )


def _pipelines(checkpoint: Checkpoint, records: Sequence[Mapping[str, Any]]) -> dict[int, PipelineState]:
    name = str(checkpoint.name)
    found = {decoded(name, Numbered, each).table: decoded(name, PipelineState, each) for each in records}
    gradients: dict[tuple[int, int], dict[int, Tensor]] = {}
    tensors = checkpoint.tensors(FLIGHTS) if any(state.flights for state in found.values()) else {}
    for key, tensor in tensors.items():
        table, iteration, entry = _numbers(name, key, 3)
        gradients.setdefault((table, iteration), {})[entry] = tensor
    return {
        table: replace(
            state,
            flights=[
                replace(flight, gradients=gradients.get((table, flight.iteration), {}))
                for flight in state.flights
            ],
        )
        for table, state in found.items()
    }


def _numbers(checkpoint: str, name: str, count: int) -> list[int]:
    """Return the numbers of which a tensor's name consists, after a kind."""
    parts = name.split("/")[-count:]
    if len(parts) != count or not all(map(str.isdecimal, parts)):
        raise _unexpected(checkpoint, f"a tensor {name!r}")
    return [int(part) for part in parts]


def _learners(
    checkpoint: str, tensors: Mapping[str, Tensor], steps: Mapping[int, int]
) -> dict[int, m.Personal]:
    random: dict[int, bytes] = {}
    buffers: dict[int, dict[int, dict[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        if name.startswith("random/"):
            (rank,) = _numbers(checkpoint, name, 1)
            random[rank] = bytes(tensor.numpy())
        else:
            table, rank, index = _numbers(checkpoint, name, 3)
            buffers.setdefault(rank, {}).setdefault(table, {})[index] = tensor
    return {
        rank: m.Personal(
            steps.get(rank, 0),
            random.get(rank, b""),
            {table: [found[i] for i in sorted(found)] for table, found in buffers.get(rank, {}).items()},
        )
        for rank in sorted({*steps, *random, *buffers})
    }
