"""Follows a run and writes its folder, on a thread of its own: the run never waits for a disk.

What cannot be written is said once, and the run goes on. Not responsible for refusing folders (engines/checkpoint_options.py).
Models are safetensors; each loads into the plain module with one line:

    model.load_state_dict(safetensors.torch.load_file("runs/…/model.safetensors"))
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
import queue
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from syncline.engines.run import (
    Began,
    Engine,
    EpochRecord,
    Event,
    Handle,
    Logged,
    Outcome,
    RunSpec,
    Sampled,
    Snapshot,
)
from syncline.errors import LearnerError, RunError, SynclineWarning
from syncline.learn.train_and_evaluate import Training
from syncline.messages import Clocks, Statistics
from syncline.nn.net import layer_notes
from syncline.report.clock_file import CLOCKS, append_clocks, cut_clocks
from syncline.report.event_lines import EVENTS, LineWriter, number, plain, read_lines, replacing, write_whole
from syncline.report.html_page import page
from syncline.report.run_record import Line, RunRecord, better, judged
from syncline.table.checkpoints import CheckpointError, Folder, write_tensors
from syncline.version import VERSION

OFTEN, SELDOM = 0.25, 1.0  # seconds between two statistics
SOON = 20.0  # seconds of a run with OFTEN
LONGEST = 30.0  # seconds that the end of a run waits for its folder
REPORT = "report.html"
MODEL, BEST = "model.safetensors", "best.safetensors"


class Recording:
    """The record of one run for displays, `record`; with a folder of checkpoints also the run folder, which it writes."""

    def __init__(self, spec: RunSpec, engine: Engine, model: nn.Module | None) -> None:
        restored, checkpoints = spec.storage.restored, spec.storage.folder
        self.folder = folder = Path(checkpoints).parent if checkpoints is not None else None
        self._model = model
        self.record = RunRecord(folder or Path(spec.name))
        self.problem = ""  # why something could not be written
        self.stopped = False  # somebody asked the run to end
        self._now: Callable[[], float] = lambda: 0.0
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._virtual = engine.virtual
        self._lock = spec.storage.lock
        self._best = best_so_far(folder) if restored and folder is not None else None
        self._lines: LineWriter | None = None
        self._board: Any = None  # TensorBoard's writer
        self._gone: dict[int, str] = {}  # rank -> how, in a simulated run
        self._before = restored.counts.examples.get(0, 0) if restored else 0  # examples
        self._first: tuple[int, float] | None = None  # examples and seconds when the first were folded
        if folder is not None:
            if (folder / EVENTS).exists():  # a run that goes on appends
                for line in read_lines(folder / EVENTS):
                    self.record.feed(line)
            with self._writing(CLOCKS):
                cut_clocks(folder, restored.version if restored else 0)
            self._lines = LineWriter(folder / EVENTS)
        options = describe(spec, engine, model)
        process = {"pid": os.getpid(), "host": socket.gethostname()}
        self._kept: Line = {**options, "started": {**process, "time": time.time()}}
        self._began, self._took = time.monotonic(), self.record.took or 0.0  # of the sessions before
        self.keep("run.json", json.dumps(plain(self._kept), indent=2) + "\n")
        resumed = None
        if restored is not None:
            known = {each["epoch"] for each in self.record.epochs}
            early = sorted(each for each in known if each > restored.epoch and restored.has_done(each))
            resumed = {"version": restored.version, "epoch": restored.epoch, "early": early}
        if self._virtual and folder is not None:  # run.json has it: these lines are the same every time
            process = {}
        self._add("start", run=options, resumed=resumed, seconds=0.0, **process)

    # -- what the run says (on its own thread) ------------------------------------------------------------

    def heard(self, record: Any) -> None:
        """A listener of the run."""
        if isinstance(record, Began):
            self._now = record.now
        else:
            self._inbox.put(record)

    def follow(self, handle: Handle) -> None:
        """Write until the run has ended."""
        self._thread = threading.Thread(
            target=self._main, args=(handle,), name="syncline-recording", daemon=True
        )
        self._thread.start()

    def finish(self) -> None:
        """The run has ended: wait until its folder is complete."""
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join(LONGEST)

    # -- the thread --------------------------------------------------------------------------------------

    def _main(self, handle: Handle) -> None:
        try:
            self._board = open_board(self.folder) if self.folder is not None else None
        except Exception as error:  # an installation may be broken in ways that are not ours
            self._failed(f"TensorBoard: {error}")
        outcome: Outcome | None = None
        failure: BaseException | None = None
        sampled = 0.0
        while outcome is None and failure is None:
            now = time.monotonic()
            period = OFTEN if self.record.seconds < SOON else SELDOM
            try:
                self._take(self._inbox.get(timeout=max(0.0, sampled + period - now)))
            except queue.Empty:
                sampled = now
                self._look(handle)
            try:
                outcome = handle.wait(0)
            except TimeoutError:
                pass
            except BaseException as raised:
                failure = raised
        self._end(outcome, failure)

    def _take(self, record: Any) -> None:
        if isinstance(record, EpochRecord):
            known = dataclasses.asdict(record)
            self._add(
                "epoch",
                **{key: value for key, value in known.items() if value or key not in ("notes", "skipped")},
            )
        elif isinstance(record, Clocks) and self.folder is not None:
            with self._writing(CLOCKS):
                append_clocks(self.folder, record.rows)
        elif isinstance(record, Event):
            self._look_who_is_gone(record)
            if record.kind == "recovered" and self.folder is not None:
                with self._writing(CLOCKS):
                    cut_clocks(self.folder, record.details["version"])
            self._add(
                "event",
                seconds=record.seconds,
                event=record.kind,
                what=record.what,
                rank=record.rank,
                details=record.details,
            )
        elif isinstance(record, Logged):
            self._add("log", **dataclasses.asdict(record))
        elif isinstance(record, Snapshot) and self.folder is not None:
            self._keep_best(record)
        elif isinstance(record, Sampled):
            found = of_statistics(record.statistics, self._gone)
            if found and self._first is None and found["examples"] > self._before:
                self._first = found["examples"], record.seconds
            if found:
                self._add("statistics", seconds=record.seconds, **found)

    def _look_who_is_gone(self, event: Event) -> None:
        """Simulated learners are no processes whose state one could ask for."""
        if event.kind == "begun anew":
            self._gone.clear()
        elif event.rank is None:
            return
        elif event.kind in ("lost", "raised"):
            killed = event.kind == "lost" and "killed" in event.what
            self._gone[event.rank] = "killed" if killed else event.kind
        elif event.kind in ("joined", "replaced"):
            self._gone.pop(event.rank, None)

    def _look(self, handle: Handle) -> None:
        if self._virtual:  # it says by itself how it stands, at moments of its own time
            return
        try:
            statistics = handle.statistics()
        except Exception:  # it has not begun
            return
        self._take(Sampled(self._now(), statistics))

    def _keep_best(self, snapshot: Snapshot) -> None:
        record = snapshot.record
        found = judged(record.metrics)
        if found is None:
            return
        metric, value = found
        if not better(metric, value, self._best[1] if self._best and self._best[0] == metric else None):
            return
        notes = {"metric": metric, "value": value, "epoch": record.epoch, "version": record.version}
        if self._save(BEST, snapshot.state, notes):
            self._best = found
            self._add("best", seconds=record.seconds, **notes)

    def _end(self, outcome: Outcome | None, error: BaseException | None) -> None:
        try:
            while not self._inbox.empty():
                self._take(self._inbox.get())
            if outcome is not None:
                self._add("end", **self._ending(outcome))
            else:
                self._add("end", seconds=self._now(), how="failed", error=_short(error))
            if self.folder is None:
                return
            kept = error.outcome if isinstance(error, RunError) else outcome
            for table, (version, state) in kept.tables.items() if kept is not None else ():
                name = MODEL if table == 0 else f"model.{table}.safetensors"
                self._save(name, state, {"version": version}, table)
            if self._virtual:
                self._kept["took"] = self._took + time.monotonic() - self._began
                self.keep("run.json", json.dumps(plain(self._kept), indent=2) + "\n")
            self.keep(REPORT, page(self.record))
        except Exception as raised:  # the run's result must not depend on its report
            self._failed(f"{type(raised).__name__}: {raised}")
        finally:
            if self._board is not None:
                self._board.close()
            if self.folder is not None:
                Folder(self.folder / "checkpoints").forget_adopted()
            if self._lock is not None:
                self._lock.release()

    def _ending(self, outcome: Outcome) -> Line:
        """With the examples a second since the first update: starting processes is no training."""
        found = of_statistics(outcome.statistics, self._gone) or {}
        examples, seconds = found.get("examples", 0), outcome.seconds
        first, since = self._first or (self._before, 0.0)
        if first >= examples:  # all in one look
            first, since = self._before, 0.0
        return {
            "seconds": seconds,
            "how": "stopped" if outcome.interrupted or self.stopped else "finished",
            "throughput": (examples - first) / (seconds - since) if seconds > since else 0.0,
            **found,
        }

    # -- writing: nothing of it may hurt the run -----------------------------------------------------------

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._failed(f"{self.record.path / name}: {error.strerror}")

    def _add(self, kind: str, **content: Any) -> None:
        now = {} if self._virtual else {"time": time.time()}  # a simulated run is the same every time
        line = plain({"kind": kind, **now, **content})
        self.record.feed(line)
        if self._lines is None:
            return
        with self._writing(EVENTS):
            self._lines.write(line)
            if self._board is not None:
                feed_board(self._board, line)

    def keep(self, name: str, text: str) -> None:
        """Write a file of the run folder, in whole or not at all; without a folder nothing."""
        if self.folder is None:
            return
        with self._writing(name):
            write_whole(self.folder / name, text)

    def _save(self, name: str, state: dict[str, torch.Tensor], notes: Line, table: int = 0) -> bool:
        """What `model.load_state_dict` expects, with what is not trained, without what is not kept; beside, then renamed."""
        model, path = self._model if table == 0 else None, self.record.path / name
        if model is not None:
            own = {key: value for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
            state = {key: state.get(key, value) for key, value in own.items()}
        state = {
            key: value for key, value in state.items() if isinstance(value, torch.Tensor)
        }  # no extra state
        texts = {key: str(value) for key, value in {**notes, **layer_notes(model)}.items()}
        try:
            with replacing(path) as beside:
                write_tensors(beside, state, texts)
        except CheckpointError as error:
            self._failed(str(error))
            return False
        except OSError as error:
            self._failed(f"cannot write {path}: {error.strerror}")
            return False
        return True

    def _failed(self, words: str) -> None:
        """Said once; the run goes on."""
        if self.problem:
            return
        self.problem = words
        text = f"the run folder is not complete: {words}. The run goes on; this is said once."
        with suppress(SynclineWarning):  # warnings may be errors here, and this thread has to go on
            warnings.warn(text, SynclineWarning, stacklevel=2)


# -- records to lines ------------------------------------------------------------------------------------------


def of_statistics(statistics: Statistics, gone: Mapping[int, str]) -> Line | None:
    """The first table and the learners."""
    table = statistics.tables.get(0)
    if table is None:
        return None
    staleness = table.staleness
    return {
        "version": table.version,
        "gradients": table.gradients,
        "dropped": table.dropped,
        "examples": table.examples,
        "staleness": {"mean": staleness.mean, "max": staleness.max, "histogram": dict(staleness.histogram)},
        "missing": list(table.missing),
        "learners": _learners(statistics, gone),
    }


def _learners(statistics: Statistics, gone: Mapping[int, str]) -> list[Line]:
    """One for each rank: the last process that had it."""
    known = ("rank", "pid", "state", "steps", "loss")
    learners = [each for each in statistics.processes if each.role == "learner"]
    found: dict[int, Line] = {each.rank: {key: getattr(each, key) for key in known} for each in learners}
    if not found:  # simulated learners are no processes
        for rank, steps in (dict.fromkeys(gone, 0) | statistics.steps).items():
            loss = statistics.losses.get(rank)
            found[rank] = {"rank": rank, "state": gone.get(rank, "simulated"), "steps": steps, "loss": loss}
    return [found[rank] for rank in sorted(found)]


def describe(spec: RunSpec, engine: Engine, model: nn.Module | None) -> Line:
    """The options of a run, for run.json and the start line."""
    plan = next((each for each in spec.task.arguments if isinstance(each, Training)), None)
    data = spec.batch.data if spec.batch is not None else plan.data if plan else None
    return {
        "sync": spec.sync,
        "engine": type(engine).__name__.lower(),
        "cluster": engine.cluster_name,
        "learners": spec.plan.learners,
        "topology": str(spec.plan.topology),
        "shards": spec.plan.topology.shards,
        "batch_size": spec.plan.batch_size,
        "epochs": spec.plan.epochs,
        "steps": spec.plan.limit,
        "seed": spec.plan.seed,
        "threads": spec.threads,
        "devices": sorted(set(spec.devices)),
        "clip_norm": spec.plan.clip_norm,
        "warmstart": spec.plan.warm,
        **dataclasses.asdict(spec.faults),
        "checkpoint_every": spec.plan.saving.every or spec.plan.saving.seconds,
        "clocks": spec.plan.saving.clocks,
        "policy": plan.policy if plan else None,
        "function": getattr(spec.task.function, "__qualname__", str(spec.task.function)),
        "model": type(model).__name__ if model is not None else None,
        "parameters": sum(p.numel() for p in model.parameters()) if model is not None else None,
        "examples": _length(data),
        "method": repr(spec.batch.method) if spec.batch is not None else None,
        "machine": f"{platform.node()}, {os.cpu_count()} cores, {platform.machine()}",
        "versions": {"syncline": VERSION, "torch": torch.__version__, "python": platform.python_version()},
    }


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _short(error: BaseException | None) -> str:
    """What was raised; of a learner's traceback the last line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if len(lines) == 1 or isinstance(error, LearnerError):
        return lines[0] if isinstance(error, RunError) else f"{type(error).__name__}: {lines[0]}"
    return f"{lines[0]} {lines[-1]}"


def best_so_far(folder: Path) -> tuple[str, float] | None:
    """The metric and value that best.safetensors was kept for."""
    try:
        with safe_open(folder / BEST, "pt") as file:
            notes = file.metadata() or {}
        return notes["metric"], float(notes["value"])
    except (OSError, SafetensorError, KeyError, ValueError):
        return None


# -- TensorBoard, where it is installed ---------------------------------------------------------------------


def open_board(folder: Path) -> Any:
    """A writer of its files; None where it is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter  # late: takes a second

    return SummaryWriter(str(folder / "tensorboard"))


def feed_board(board: Any, line: Line) -> None:
    """The curves that are in one line of events.jsonl."""
    curves: Line = {}
    if line["kind"] == "epoch":
        curves = {"train/loss": line["loss"]}
        curves |= {f"test/{name}": value for name, value in line["metrics"].items()}
    elif line["kind"] == "statistics":
        curves = {"staleness/mean": line["staleness"]["mean"], "examples": line["examples"]}
        curves |= {f"loss of learner/{each['rank']}": each["loss"] for each in line["learners"]}
    for tag, value in curves.items():
        if (known := number(value)) is not None:
            board.add_scalar(tag, known, line["version"], walltime=line.get("time"))
    if line["kind"] == "epoch":
        board.flush()
