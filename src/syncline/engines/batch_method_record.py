"""What every engine does for a batch method (M18): its history, its checkpoints, its account, the memory it needs.

Not responsible for processes, time, nor for anything that the coordinator decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from syncline import messages as m
from syncline.batch import messages as b
from syncline.batch.coordinator import Coordinator, slots_of, window_of
from syncline.batch.portions import Portions
from syncline.engines.checkpoint_writer import commit
from syncline.engines.recorder import Recorder
from syncline.engines.run import EpochRecord, RunSpec
from syncline.errors import RunError, UsageError
from syncline.learn.model_factories import made
from syncline.learn.portion_worker import BatchPlan, trained
from syncline.protocols.epoch_positions import Standing
from syncline.protocols.sequence import Account
from syncline.protocols.staleness import StalenessClock
from syncline.roles.checkpoint_manifest import (
    BatchManifest,
    LoaderState,
    Restored,
    TableState,
    check_sound,
    decoded,
)
from syncline.table.checkpoint_content import table_file
from syncline.table.checkpoints import Checkpoint, CheckpointError, Folder, layout_json
from syncline.table.layout import as_state_dict

MEMINFO = Path("/proc/meminfo")


def method_name(method: Any) -> str:
    return str(getattr(method, "name", type(method).__name__))


def coordinator_of(spec: RunSpec) -> Coordinator:
    """That begins, or goes on from a checkpoint."""
    plan = spec.batch
    assert plan is not None
    stands = spec.storage.restored.batch if spec.storage.restored is not None else None
    window = window_of(spec.plan.learners) if plan.deterministic else None
    return Coordinator(
        plan.method,
        plan.samples,
        shards=plan.layout.shards,
        slots=slots_of(spec.plan.learners, deterministic=plan.deterministic),
        portions=Portions(deterministic=plan.deterministic, window=window),
        limit=spec.plan.limit,
        state=stands.state if stands else None,
        iteration=stands.iteration if stands else 0,
    )


# -- memory ----------------------------------------------------------------------------------------------------


def available_memory() -> int | None:
    """Bytes, where the system says so."""
    try:
        lines = MEMINFO.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None


def check_memory(plan: BatchPlan, learners: int) -> None:
    """Of all shards and learners together; activations are not in it."""
    size, shards = plan.layout.parameters.nbytes, plan.layout.shards
    vectors, sums = len(plan.method.vectors), slots_of(learners, deterministic=plan.deterministic)
    needed, there = size * (vectors + sums + learners), available_memory()
    if there is not None and needed > there:
        raise UsageError(
            f"{type(plan.method).__name__} needs {vectors} vectors of {readable(size)} on {shards} shards "
            f"({readable(size * vectors // shards)} each), {sums} sums of gradients and a copy of the weights in each of {learners} "
            f"learners: {readable(needed)}, and {readable(there)} are available here; use a smaller history, fewer learners, or a "
            "method with fewer vectors"
        )


def readable(number: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"


# -- weights ---------------------------------------------------------------------------------------------------


def write_first(plan: BatchPlan, x: list[Tensor]) -> None:
    """The model's own values, to where the method begins."""
    views = plan.layout.parameters.views(x)
    for view, parameter in zip(views, trained(made(plan.model)), strict=True):
        view.copy_(parameter.detach())


def state_of(plan: BatchPlan, x: list[Tensor]) -> dict[str, Any]:
    """Return the model's state_dict, with a copy of the weights."""
    layout, flat = plan.layout, plan.layout.parameters
    fixed = [
        (each, [plan.fixed[entry.name] for entry in each.entries]) for each in (layout.buffers, layout.others)
    ]
    return as_state_dict(layout, (flat, [view.clone() for view in flat.views(x)]), *fixed)


# -- checkpoints -----------------------------------------------------------------------------------------------


def read_batch(checkpoint: Checkpoint) -> Restored:
    """Where a run goes on; vectors are read by the shards."""
    name = str(checkpoint.name)
    if "batch" not in checkpoint.manifest:
        raise UsageError(
            f"{name} was not written by a batch method but under {checkpoint.manifest.get('sync')}: resume it so, or "
            "begin from its weights (model.load_state_dict)"
        )
    found = decoded(name, BatchManifest, checkpoint.manifest)
    stands, layout = found.batch, check_sound(name, found.layout)
    account = Account(
        version=stands.iteration,
        gradients=stands.sums,
        dropped=stands.discarded,
        histogram={0: stands.sums},
    )
    done = Standing.before(stands.iteration)
    return Restored(
        name=name,
        seed=found.seed,
        path=str(checkpoint.path),
        seal=checkpoint.seal,
        tables={0: TableState(layout=layout, optimizer=stands.method, account=account)},
        loaders={0: LoaderState(size=stands.size, policy="batch", parts=1, standing=done)},
        counts=m.Counts(examples={0: stands.examples}),
        history=found.history,
        sync=found.sync,
        virtual=found.virtual,
        batch=stands,
    )


def check_restored(plan: BatchPlan, found: Restored | None) -> None:
    """A method goes on only with what it began with."""
    if found is None:
        return
    assert found.batch is not None
    found.check_layout(0, plan.layout)
    found.check_optimizer(0, method_name(plan.method))
    try:
        plan.method(found.batch.state).close()  # it refuses what it cannot go on from
    except UsageError as error:
        raise UsageError(f"{found.name}: {error}") from error
    except Exception as error:  # of the method's, which may be the user's
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{method_name(plan.method)} cannot go on from the state in {found.name}: {what}"
        ) from error
    if found.batch.size != plan.samples.size:
        raise UsageError(
            f"{found.name} was made with {found.batch.size} examples, this run has {plan.samples.size}; resume with "
            "the data it was made with"
        )


class BatchRecord:
    """The record of one run; `now` is its clock."""

    def __init__(
        self, spec: RunSpec, recorder: Recorder, coordinator: Coordinator, now: Callable[[], float]
    ) -> None:
        assert spec.batch is not None
        self.spec, self._plan, self.recorder, self._now = spec, spec.batch, recorder, now
        self.coordinator = coordinator
        self.folder = Folder(Path(spec.storage.folder)) if spec.storage.folder else None
        before = spec.storage.restored
        self._before = before.tables[0].account if before else Account()
        self._examples = before.counts.examples.get(0, 0) if before else 0
        self.reached: b.Reached | None = None  # the last
        self._cut_at = before.version if before else 0
        self._cut_time = now()
        self._saved: dict[str, m.Saved] | None = None  # of the checkpoint that is being written
        self._cut: dict[str, Any] = {}  # its manifest

    # -- iterations --------------------------------------------------------------------------------------

    def iteration(self, reached: b.Reached, state: dict[str, Tensor] | None) -> None:
        self.reached = reached
        found = reached.iteration.record
        evaluations = float(found.evaluations)
        notes = {"step": found.step, "evaluations": evaluations, "gradient": found.gradient_norm}
        if found.restarted:
            notes["restarted"] = 1.0
        self.recorder.iteration(
            EpochRecord(
                epoch=found.iteration - 1,
                version=found.iteration,
                seconds=self._now(),
                examples=reached.batch.examples,
                loss=found.loss,
                losses={},
                notes=notes,
            ),
            state,
        )

    def ended(self, over: b.Over) -> None:
        """Why, for the user; what never began is an error."""
        end = over.end
        if end is None:
            return
        converged = end.why in ("gradient", "decrease")
        self.recorder.event(end.message, kind="converged" if converged else "ended")
        if end.why == "not finite" and end.iterations == 0:
            raise RunError(
                f"the objective is not finite where the run begins: {end.message}; look at the data and the first weights"
            )
        if end.why == "not finite" or (end.why == "line search" and end.iterations == 0):
            self.recorder.warn(f"the method has ended: {end.message}; the best weights are kept", "ended")

    # -- checkpoints -------------------------------------------------------------------------------------

    @property
    def cutting(self) -> bool:
        return self._saved is not None

    def due(self, *, last: bool = False) -> bool:
        """A checkpoint is to be cut at this iteration."""
        if self.folder is None or self.cutting or self.reached is None:
            return False
        count = self.reached.iteration.record.iteration
        if last:
            return count > self._cut_at
        every, seconds = self.spec.plan.saving.every, self.spec.plan.saving.seconds
        by_count = every is not None and count % every == 0
        return by_count or (seconds is not None and self._now() - self._cut_time >= seconds)

    def cut(self) -> b.Save:
        """All shards write their vectors as they are now."""
        assert self.reached is not None
        self._saved, self._cut = {}, self._manifest(self.reached)
        self._cut_at, self._cut_time = self.reached.iteration.record.iteration, self._now()
        return b.Save(self._cut_at)

    def saved(self, message: m.Saved) -> m.Checkpointed | None:
        """One shard's file is there; the checkpoint, when all are."""
        if self._saved is None or message.number != self._cut_at:
            return None
        self._saved[message.name] = message
        if len(self._saved) < self._plan.layout.shards:
            return None
        assert self.folder is not None
        saved, self._saved = self._saved.values(), None
        if problem := next((each.problem for each in saved if each.problem), ""):
            self.folder.abandon(message.number)
            done = m.Checkpointed(message.number, "", problem)
        else:
            files = [each.written for each in saved if each.written is not None]
            done = commit(self.folder, message.number, self._cut, files, self.spec.storage.keep)
        self.recorder.emit(done)
        return done

    def go_back(self, restored: Restored | None) -> None:
        """What was being written is gone, and what came after the checkpoint."""
        self._saved, self.reached = None, None
        self._cut_at = restored.version if restored else 0
        self.recorder.go_back(restored)

    def _manifest(self, reached: b.Reached) -> dict[str, Any]:
        found, table = reached.iteration.record, self.table()
        return {
            "seed": self.spec.plan.seed,
            "sync": self.spec.sync,
            "layout": layout_json(self._plan.layout),
            "history": [each for each in self.recorder.history() if each["version"] <= found.iteration],
            "virtual": self._now(),
            "batch": {
                "method": method_name(self._plan.method),
                "iteration": found.iteration,
                "state": reached.iteration.state,
                "size": self._plan.samples.size,
                "portion": self._plan.samples.portion,
                "examples": table.examples,
                "sums": table.gradients,
                "discarded": table.dropped,
                "files": [table_file(0, shard) for shard in range(self._plan.layout.shards)],
            },
        }

    # -- the account -------------------------------------------------------------------------------------

    def table(self) -> m.TableStatistics:
        """Gradients are sums of portions; their staleness is 0, always."""
        found, clock = self.coordinator.statistics(), StalenessClock()
        sums = self._before.gradients + found.taken
        if sums:
            clock.histogram[0] = sums
        examples = self._examples + self.coordinator.examples
        dropped = self._before.dropped + found.discarded
        counts = self.coordinator.iteration, sums, dropped, examples
        return m.TableStatistics(*counts, clock.account(), {}, [], 0)

    def statistics(self, number: int, steps: Mapping[int, int], losses: Mapping[int, float]) -> m.Statistics:
        return m.Statistics(number, {0: self.table()}, dict(steps), dict(losses))
