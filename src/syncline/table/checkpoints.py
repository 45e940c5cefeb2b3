"""The files of a checkpoint: safetensors and JSON, complete or not there at all (M5, M6).

A checkpoint is a folder `checkpoints/000000120` of safetensors files and a `checkpoint.json` that lists them
with size and crc32. It is built under a hidden name and renamed when all of it is on the disk:

    .N.tmp   being written          .N.old   being replaced: it counts as N while there is no N
    N        committed              .N.gone  being removed
    .first   first values of tables that are in no checkpoint yet

Pieces of a table are named by entry and first element, so any number of shards can read them.
Not responsible for when a checkpoint is taken, nor for what its manifest says.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from syncline.errors import RunError
from syncline.table.layout import DTYPES, Entry, Layout, Part
from syncline.table.nested_optimizers import PREFIX, Kept, keep
from syncline.table.optimizer_template import OptimizerTemplate, PieceState, join_states

FORMAT, MANIFEST = 1, "checkpoint.json"
FIRST = -1  # in place of a checkpoint's number: the first values of a table
CHUNK = 4 << 20  # bytes per write and read
TRIES = 100  # to read the newest checkpoint of a run that removes old ones meanwhile
COMPLEX128 = "syncline.complex128"  # metadata: names of tensors stored as pairs of float64
# safetensors' names: F32, BF16, C64, I8, U8, BOOL
_CODES = {dtype: re.sub("loat|omplex|(?<=u)int|nt", "", name).upper() for name, dtype in DTYPES.items()}
GROUPS, WHOLE = "groups", "whole"  # among the notes
NOTES = "notes"  # state values that are no tensors, as JSON in a file's metadata
_NAME = re.compile(r"(?P<dot>\.)?(?P<number>\d{9,})(?(dot)\.(?P<kind>tmp|old|gone))")
_SEALED = re.compile(rb'\{"crc32": "(?P<crc>[0-9a-f]{8})",\n"content": (?P<body>.*)\}\n', re.DOTALL)
_PIECE = re.compile(r"p/(?P<p>\d+/\d+)|s/(?P<s>\d+/\d+)/(?P<key>[^/]*)")
Pieces = tuple[Mapping[str, Tensor], Mapping[str, Mapping[str, Any]]]  # what `piece_tensors` returns
_Found = tuple[int, Tensor, dict[str, Any]]  # a piece as read: first element, values, optimizer state


class CheckpointError(RunError):
    """A checkpoint cannot be written, found or read."""


@dataclass(frozen=True, slots=True)
class Written:
    """One finished file of a checkpoint."""

    name: str
    nbytes: int
    crc: int  # crc32 of the whole file


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Written:
    """A safetensors file, forced to the disk; what is contiguous and on the host is not copied."""
    pairs = [name for name, tensor in tensors.items() if tensor.dtype == torch.complex128]
    notes = {"format": "pt", **(metadata or {}), **({COMPLEX128: json.dumps(pairs)} if pairs else {})}
    stored = [(name, _storable(path, name, tensor)) for name, tensor in tensors.items()]
    stored.sort(key=lambda item: -item[1].dtype.itemsize)  # wide ones first: all are aligned
    header: dict[str, Any] = {"__metadata__": notes}
    end = 0
    for name, tensor in stored:
        start, end = end, end + tensor.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def blocks() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little") + text
        for _, tensor in stored:
            flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
            yield memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]

    return _write(path, blocks(), 8 + len(text) + end)


def _storable(path: Path, name: str, tensor: Tensor) -> Tensor:
    """As it goes to the file: complex128 as pairs of float64."""
    dense = tensor.layout == torch.strided and not tensor.is_meta
    if dense and tensor.dtype == torch.complex128:
        tensor = torch.view_as_real(tensor.resolve_conj())
    if name == "__metadata__" or not dense or tensor.dtype not in _CODES:
        kind = f"{tensor.dtype}, {tensor.layout}, {tensor.device}"
        raise CheckpointError(f"{path} takes no tensor {name!r} ({kind}), only dense {', '.join(DTYPES)}")
    return tensor


def _write(path: Path, blocks: Iterable[bytes | memoryview], nbytes: int) -> Written:
    """All blocks in a file and on the disk, or no file."""
    crc, free = 0, "unknown"
    try:
        free = str(shutil.disk_usage(path.parent).free)
        with open(path, "wb", buffering=0) as file:
            for block in blocks:
                rest = memoryview(block)
                while rest:
                    written = os.write(file.fileno(), rest[:CHUNK])
                    crc = zlib.crc32(rest[:written], crc)
                    rest = rest[written:]
            os.fsync(file.fileno())
    except OSError as error:
        with suppress(OSError):
            os.unlink(path)
        room = f"{nbytes} bytes needed, {free} free; make room or give the run another folder"
        raise CheckpointError(f"cannot write {path}: {error.strerror} ({room})") from error
    return Written(path.name, nbytes, crc)


def _sync(folder: Path) -> None:
    """Force the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot do this for folders
            raise
    finally:
        os.close(descriptor)


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Errors of the system as ours, saying what was tried."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what}: {error.strerror} ({error.filename}); use a writable one") from error


def _parse(path: Path) -> tuple[int, str]:
    """Number and kind (committed, tmp, old, gone) by name; (-1, "") for what is none of ours."""
    match = _NAME.fullmatch(path.name)
    return (int(match["number"]), match["kind"] or "committed") if match else (-1, "")


class Folder:
    """`<run folder>/checkpoints`; one process at a time commits to it."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def prepare(self) -> None:
        """Create it, prove that it is writable, remove what a crash left unfinished."""
        with _named(f"cannot use {self.root} for checkpoints"):
            self.root.mkdir(parents=True, exist_ok=True)
            _sync(self.root.parent)
            _write(self.root / ".probe", [b"writable"], 8)
            os.unlink(self.root / ".probe")
            self.remove_unfinished()
            _sync(self.root)

    def remove_unfinished(self) -> None:
        """Remove partly written checkpoints, and restore one that was being replaced; raises OSError."""
        for path in sorted(self.root.iterdir()):
            number, kind = _parse(path)
            if kind == "old" and not self._at(number).exists():
                os.rename(path, self._at(number))
            elif kind in ("tmp", "old", "gone"):
                self._discard(path)

    @property
    def first(self) -> Path:
        return self.root / ".first"

    def write_first(self, name: str, tensors: Mapping[str, Tensor]) -> Written:
        """Values that a table begins with."""
        with _named(f"cannot write first values to {self.root}"):
            self.first.mkdir(exist_ok=True)
        return write_tensors(self.first / name, tensors)

    def forget_first(self, names: Iterable[str] | None = None) -> None:
        """These files of first values, or all of them."""
        with suppress(OSError):
            for name in os.listdir(self.first) if names is None else names:
                (self.first / name).unlink(missing_ok=True)
            self.first.rmdir()

    def adopt(self, where: str | Path) -> Checkpoint:
        """Link the newest checkpoint at `where`, in another folder, into this one, and verify the links.

        A live run may remove its checkpoints at any moment, but not the links: what is linked completely stays whole.
        """

        def linked(source: Path) -> Checkpoint:
            self.forget_adopted()
            path = self.root / ".resumed" / source.name
            path.mkdir(parents=True)
            with suppress(FileNotFoundError):
                _link_files(source, path)
            return _verified(path, source)

        with _named(f"cannot link {where} in {self.root}"):
            return _newest(where, linked)

    def forget_adopted(self) -> None:
        shutil.rmtree(self.root / ".resumed", ignore_errors=True)

    def begin(self, number: int) -> Path:
        """An empty temporary folder for the files of this checkpoint."""
        with _named(f"cannot begin checkpoint {number} in {self.root}"):
            self._discard(self._at(number, "tmp"))
        return self.join(number)

    def join(self, number: int) -> Path:
        """The same, made by whoever of several writers comes first."""
        path = self._at(number, "tmp")
        with _named(f"cannot begin checkpoint {number} in {self.root}"):
            path.mkdir(exist_ok=True)
        return path

    def commit(self, number: int, manifest: Mapping[str, Any], files: Sequence[Written]) -> Path:
        """Make the files that were written to `begin(number)` the checkpoint of that number."""
        source, target, old = self._at(number, "tmp"), self._at(number), self._at(number, "old")
        content = {
            "format": FORMAT,
            "number": number,
            "files": [*map(asdict, files)],
            "manifest": {**manifest},
        }
        try:
            body = json.dumps(content, separators=(",", ":")).encode()
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the manifest of checkpoint {number} is no JSON: {error}") from error
        text = b'{"crc32": "%08x",\n"content": %b}\n' % (zlib.crc32(body), body)  # of the lines that follow
        with _named(f"cannot commit checkpoint {number} in {self.root}"):
            for file in files:
                if (found := (source / file.name).stat().st_size) != file.nbytes:
                    raise CheckpointError(f"{source / file.name} has {found} bytes, not {file.nbytes}")
            _write(source / MANIFEST, [text], len(text))
            _sync(source)
            if target.exists():
                self._discard(old)
                os.rename(target, old)
            os.rename(source, target)
            _sync(self.root)
        with suppress(OSError):  # the checkpoint is there; `prepare` removes the rest
            self._discard(old)
        return target

    def abandon(self, number: int) -> None:
        """Remove the files of a checkpoint that is not committed; `prepare` removes what stays."""
        shutil.rmtree(self._at(number, "tmp"), ignore_errors=True)

    def prune(self, keep: int) -> list[Path]:
        """Remove the oldest beyond `keep`, never the newest."""
        surplus = self.all()[: -max(keep, 1)]
        with _named(f"cannot remove old checkpoints in {self.root}"):
            for path in surplus:
                self._discard(path)
        return surplus

    def forget_after(self, number: int) -> None:
        """Remove those of a run that was left for an earlier checkpoint of its own."""
        with _named(f"cannot remove later checkpoints in {self.root}"):
            for path in self.all():
                if _parse(path)[0] > number:
                    self._discard(path)

    def all(self) -> list[Path]:
        """Committed ones, oldest first."""
        with _named(f"cannot list the checkpoints in {self.root}"):
            paths = sorted(self.root.iterdir(), key=_parse, reverse=True) if self.root.is_dir() else []
            ours = [path for path in paths if _parse(path)[1] in ("old", "committed") and path.is_dir()]
        return list({_parse(path)[0]: path for path in ours}.values())[::-1]  # N comes after .N.old and wins

    def _at(self, number: int, kind: str = "") -> Path:
        return self.root / (f".{number:09d}.{kind}" if kind else f"{number:09d}")

    def _discard(self, path: Path) -> None:
        """Remove a folder of ours, if it is there; it loses its name before its first file."""
        gone = self._at(_parse(path)[0], "gone")
        if gone.exists():
            shutil.rmtree(gone)
        if path.exists():
            os.rename(path, gone)
            _sync(self.root)
            shutil.rmtree(gone)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found complete."""

    path: Path
    number: int
    manifest: dict[str, Any]
    seal: int = field(default=0, compare=False)  # of its manifest, and so of all its files
    source: Path | None = field(default=None, compare=False)  # what was linked to `path`

    @property
    def name(self) -> Path:
        """The path for messages."""
        return self.source or self.path

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of one file, by name."""
        try:
            with safe_open(self.path / name, framework="pt") as file:
                tensors = {key: file.get_tensor(key) for key in list(file.keys())}
                pairs = json.loads((file.metadata() or {}).get(COMPLEX128, "[]"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.name / name} cannot be read: {error}") from error
        return tensors | {key: torch.view_as_complex(tensors[key]) for key in pairs}

    def notes(self, name: str) -> dict[str, dict[str, Any]]:
        """The state values of one file that are no tensors."""
        with safe_open(self.path / name, framework="pt") as file:
            return json.loads((file.metadata() or {}).get(NOTES, "{}"))


def find(where: str | Path) -> Checkpoint:
    """The newest checkpoint of a run folder or `checkpoints` folder, or the one at `where`; all verified."""
    return _newest(where, lambda path: _verified(path))


def _newest(where: str | Path, read: Callable[[Path], Checkpoint]) -> Checkpoint:
    """Read the checkpoint that `where` means; where a live run removes it first, read the newest that remains."""
    path = Path(os.path.abspath(where))
    for _ in range(TRIES):
        # a listing that a live run's renames disturb may miss both the old and the new one: look twice
        if not (paths := _candidates(path) or _candidates(path)):
            looked = f"looked for checkpoints/000000000, 000000000 (any number) and {MANIFEST} in it"
            there = "" if path.exists() else " (no such folder)"
            raise CheckpointError(f"no checkpoint at {path}{there}: {looked}")
        try:
            return read(paths[0])
        except CheckpointError as error:
            if paths[0].exists():
                raise _advised(error, paths[1:]) from error
    raise CheckpointError(
        f"the newest checkpoint at {path} was removed {TRIES} times while it was being read"
    )


def _advised(damage: CheckpointError, older: Iterable[Path]) -> CheckpointError:
    """Say of a damaged checkpoint which older one is good."""
    for path in older:
        with suppress(CheckpointError):
            _verified(path)
            advice = f'the newest older good one is {path.name}: use resume="{path}"'
            return CheckpointError(f"{damage}; {advice}")
    return CheckpointError(f"{damage}; no older one there is good: start without resume")


def _link_files(source: Path, target: Path) -> None:
    """Link the files of a folder that a live run may remove at any moment; copy them where the disk is another."""
    folder = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with ExitStack() as stack:
            opened = {}
            for name in os.listdir(folder):
                try:
                    os.link(name, target / name, src_dir_fd=folder)
                except FileNotFoundError:
                    raise
                except (
                    OSError
                ):  # another disk, or one without links; an open file stays whole when it is removed
                    file = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
                    opened[name] = stack.enter_context(open(file, "rb"))
            for name, stream in opened.items():
                with open(target / name, "wb") as copy:
                    shutil.copyfileobj(stream, copy, CHUNK)
    finally:
        os.close(folder)


@_named("cannot look for a checkpoint")
def _candidates(path: Path) -> list[Path]:
    """The checkpoint that `path` means, then those older than it, newest first."""
    number, kind = _parse(path)
    if not (path / MANIFEST).is_file():
        for folder in (Folder(path / "checkpoints"), Folder(path)):
            if paths := folder.all():
                return paths[::-1]
        if kind != "committed":
            return []
    siblings = {_parse(sibling)[0]: sibling for sibling in Folder(path.parent).all()}
    chosen = path if path.is_dir() else siblings.get(number)
    older = [siblings[n] for n in sorted(siblings, reverse=True) if n < number]
    return [chosen, *older] if chosen else []


def read(path: Path, source: Path | None = None) -> Checkpoint:
    """The one that another process has just verified, whose files are not verified again; errors name `source`."""
    named = source or path
    try:
        content, seal = _content(path, named)
    except OSError as error:
        raise CheckpointError(f"checkpoint {named} is gone: {error.strerror}") from error
    return Checkpoint(path, content.number, content.manifest, seal, source)


class _Format(msgspec.Struct):
    format: int


class _Content(_Format):
    number: int
    files: list[Written]
    manifest: dict[str, Any]


def _content(path: Path, named: Path) -> tuple[_Content, int]:
    """Of a manifest that is whole, and its crc32; errors name the checkpoint `named`."""
    sealed = _SEALED.fullmatch((path / MANIFEST).read_bytes())
    if sealed is None or zlib.crc32(sealed["body"]) != int(sealed["crc"], 16):
        raise CheckpointError(f"checkpoint {named} is damaged: {MANIFEST} is truncated or has changed")
    try:
        content = json.loads(sealed["body"])  # msgspec's reader knows no infinity, and losses may be infinite
        if (version := msgspec.convert(content, _Format).format) != FORMAT:
            raise CheckpointError(f"checkpoint {named} has format {version}, this reads {FORMAT}")
        return msgspec.convert(content, _Content), int(sealed["crc"], 16)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"checkpoint {named} is damaged: {MANIFEST} has unexpected content: {error}"
        ) from error


def _verified(path: Path, source: Path | None = None) -> Checkpoint:
    """The checkpoint, if nothing of it is damaged; of links, errors name their `source`."""
    name, named = MANIFEST, source or path
    try:
        content, seal = _content(path, named)
        for file in content.files:
            name, expected, found = file.name, (file.nbytes, file.crc), (0, 0)
            with open(path / name, "rb", buffering=0) as stream:
                while chunk := stream.read(CHUNK):
                    found = found[0] + len(chunk), zlib.crc32(chunk, found[1])
            if found != expected:
                changed = f"has (bytes, crc32) {found} instead of {expected}"
                raise CheckpointError(f"checkpoint {named} is damaged: {name} {changed}")
    except (OSError, ValueError) as error:  # a name may be none that a file can have
        what = getattr(error, "strerror", None) or error
        raise CheckpointError(f"checkpoint {named} is damaged: {name}: {what}") from error
    return Checkpoint(path, content.number, content.manifest, seal, source)


def piece_tensors(
    part: Part, views: Sequence[Tensor], states: PieceState
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """A shard's pieces and tensor-valued state by name, and the other state values; nothing is copied."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = defaultdict(dict)
    for piece, view in zip(part.pieces, views, strict=True):
        place = f"{piece.entry}/{piece.start}"
        tensors[f"p/{place}"] = view
        for key, value in states.get((piece.entry, piece.start, piece.stop), {}).items():
            if isinstance(key, str) and isinstance(value, Tensor):
                tensors[f"s/{place}/{quote(key, safe='')}"] = value
            elif isinstance(key, str) and _is_plain(value):
                values[place][key] = value
            else:
                what = f"optimizer state {key!r} of parameter {piece.entry} is a {type(value).__name__}"
                raise CheckpointError(f"{what}: only tensors, numbers, strings, None and lists can be kept")
    return tensors, dict(values)


def group_notes(own: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Options of parameter groups that the optimizer itself has changed, beside the other state values."""
    for group in own:
        for key, value in group.items():
            if not _is_plain(value):
                what = f"option {key!r} of a parameter group is a {type(value).__name__}"
                raise CheckpointError(f"{what}: only numbers, strings, None and lists can be kept")
    return {GROUPS: {str(number): dict(group) for number, group in enumerate(own)}} if any(own) else {}


def wrapped_tensors(
    part: Part,
    views: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Tensor],
    groups: dict[str, dict[str, Any]],
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """The same of an optimizer that holds others: all of it, as it is."""
    tensors, _ = piece_tensors(part, views, {})
    try:
        node, kept = keep(optimizer, parameters)
    except RunError as error:
        raise CheckpointError(f"{error}: only tensors, plain values and containers can be kept") from error
    return tensors | kept, {**groups, WHOLE: {"optimizer": node}}


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def whole(
    layout: Layout, parts: Sequence[Pieces], wanted: Sequence[int] | None = None
) -> tuple[dict[int, Tensor], dict[int, dict[str, Any]]]:
    """Values and optimizer state by entry from all shards' pieces, of all entries or some; only `layout`'s entries matter."""
    found: dict[int, list[_Found]] = defaultdict(list)
    for tensors, notes in parts:
        states = {place: dict(state) for place, state in notes.items()}
        for name in sorted(tensors, reverse=True):  # "s/…" before "p/…"
            if (match := _PIECE.fullmatch(name)) is None:
                raise CheckpointError(f"tensor {name!r} of the checkpoint is no piece of a table")
            if match["s"]:
                states.setdefault(match["s"], {})[unquote(match["key"])] = tensors[name]
            else:
                entry, start = map(int, match["p"].split("/"))
                found[entry].append((start, tensors[name], states.pop(match["p"], {})))
        if states:
            raise CheckpointError(f"the checkpoint has optimizer state without values, for {sorted(states)}")
    entries = layout.parameters.entries
    if (most := max(found, default=-1)) >= len(entries):
        raise CheckpointError(f"the checkpoint has a parameter {most}, the model only {len(entries)}")
    joined = {
        i: _joined(entries[i], sorted(found[i], key=lambda piece: piece[0]))
        for i in (range(len(entries)) if wanted is None else sorted(set(wanted)))
    }
    values = {i: value for i, (value, _) in joined.items()}
    return values, {i: state for i, (_, state) in joined.items() if state}


def _joined(entry: Entry, pieces: Sequence[_Found]) -> tuple[Tensor, dict[str, Any]]:
    """An entry from its pieces; state of the pieces' lengths is joined too, other state is the first's."""
    spans = [(start, start + value.numel()) for start, value, _ in pieces]
    fit = [start for start, _ in spans] + [entry.numel] == [0] + [stop for _, stop in spans]
    kinds = {(value.dtype, *sorted(state)) for _, value, state in pieces}
    if not fit or len(kinds) != 1 or pieces[0][1].dtype != DTYPES[entry.dtype]:
        raise CheckpointError(f"pieces of {entry} are missing, overlap or differ: {spans} with {kinds}")

    values, states = [value.reshape(-1) for _, value, _ in pieces], [state for *_, state in pieces]
    return torch.cat(values).view(entry.shape), join_states(entry.shape, list(map(len, values)), states)


def layout_json(layout: Layout) -> dict[str, Any]:
    """Return a layout for the manifest: without the keys of a state_dict, and without where shards were cut."""
    return {key: value for key, value in asdict(layout).items() if key not in ("cuts", "keys", "extra")}


# -- for whoever goes on with a table: a shard reads its part, a learner among equals all of it --------------


def table_file(table: int, shard: int) -> str:
    return f"table{table}-shard{shard}.safetensors"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a table's files are: in a checkpoint, or (None) among the first values that shards have written."""

    folder: str | None
    table: int
    shards: int  # that wrote them


@dataclass(frozen=True, slots=True)
class Content:
    """Values and optimizer state by entry; first values have no state but the template's."""

    values: dict[int, Tensor]
    state: dict[int, dict[str, Any]] | None
    own: list[dict[str, Any]]  # options that the optimizer itself has changed
    kept: Kept | None  # all of an optimizer that holds others

    def of(self, template: OptimizerTemplate) -> OptimizerTemplate:
        """The optimizer with this state."""
        if self.state is None:
            return template
        return replace(template, state=self.state, own=self.own, kept=self.kept)


def read_content(
    source: Source, folder: Path, layout: Layout, entries: Sequence[int] | None = None
) -> Content:
    """Of these entries, or all; files are mapped, and what is not asked for is not read."""
    checkpoint = Checkpoint(folder, 0, {})
    names = [table_file(source.table, shard) for shard in range(source.shards)]
    parts = [(checkpoint.tensors(name), checkpoint.notes(name)) for name in names]
    groups = [notes.pop(GROUPS, {}) for _, notes in parts]  # the same on all shards
    own = [groups[0][str(number)] for number in range(len(groups[0]))]
    kept: Kept | None = None
    for tensors, notes in parts:
        if (found := notes.pop(WHOLE, None)) is not None:  # of an optimizer that is in one shard
            theirs = [name for name in tensors if name.startswith(PREFIX)]
            kept = kept or (found["optimizer"], {name: tensors.pop(name) for name in theirs})
    values, state = whole(layout, parts, entries)
    return Content(values, state if source.folder else None, own, kept)
