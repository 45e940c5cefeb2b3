"""The coordinator: sees learners come and go, has tables and loaders opened, dials turned and checkpoints made.

A handler beside the learners' fast path: it never sees a gradient. Runs in the supervisor of the local engine and inside the simulator;
effects go out through its port.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from syncline import messages as m
from syncline.dial import Sync
from syncline.errors import UsageError
from syncline.ports import CoordinatorPort
from syncline.roles.checkpoint_manifest import Restored, manifest
from syncline.roles.run_plan import RunPlan
from syncline.roles.table_registry import TableRegistry
from syncline.roles.waiting_at_coordinator import WaitingLearners
from syncline.table.checkpoints import FIRST
from syncline.table.layout import Layout

PAST = -1  # the epoch of a dial that does not begin by itself


class Coordinator:
    """Learners, tables and loaders of one run."""

    def __init__(
        self,
        port: CoordinatorPort,
        plan: RunPlan,
        learners: dict[int, int],
        restored: Restored | None = None,
    ) -> None:
        self._port, self._plan = port, plan
        self._restored = restored or Restored(name="the start", seed=plan.seed)
        self._dials: list[tuple[Sync, int | None]] = []  # with the epoch it begins with; None: at once
        self._chosen: dict[int, int] = {}  # dials that the user chose, by number, with the epoch in which
        self._epoch = self._restored.epoch  # of the first loader
        self.live = dict(learners)  # learner -> rank
        self._room = WaitingLearners(port, self.live)
        self._openings = TableRegistry(port, plan, self.live, self._room, lambda: self._dial)
        self._openings.expect(learners, self._restored)
        # states of optimizers under way, by table, number, learner: what shards have said, and how many are to say it
        self._answers: dict[tuple[int, int, int], dict[int, m.StatePart | m.Loaded]] = {}
        self._awaited: dict[tuple[int, int, int], int] = {}
        self.stale: set[int] = set()  # learners that have not noticed that the servers are new ones
        self._closed: set[int] = set()  # learners whose function has come to its end by itself
        self._open_cut: m.Cut | None = None
        self._saved: dict[str, m.Saved] = {}  # files of it, which may come before the leading shard's word
        self._finishing = self._finish_later = self._end_saved = False
        self._stopping = self._exact = False  # waits for a last checkpoint; has it
        self._saving_failed = False  # the run has failed, and its last checkpoint is asked for
        self.reached = False

    def layout(self, table: int) -> Layout:
        return self._openings.tables[table].layout

    @property
    def tables(self) -> list[int]:
        return [number for number, table in sorted(self._openings.tables.items()) if table.made]

    @property
    def cutting(self) -> bool:
        """A checkpoint is being written."""
        return self._open_cut is not None or bool(self._saved)

    def meeting(self) -> set[int]:
        """Learners that wait for others outside the sequence."""
        return set(self._room.asked)

    # -- the run -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The shards are there: they learn the dials first, and where the run stands."""
        for epoch, sync in self._plan.course.dials:
            self._add_dial(sync, epoch)
        if self._restored.sync == str(self._plan.course):  # else this run has another dial on purpose
            for sync, epoch in self._restored.chosen:
                self._chosen[len(self._dials)] = epoch
                self._add_dial(sync, PAST)
        self._tell_standing()

    def change(self, sync: Sync) -> None:
        """Another dial, at the next version."""
        self._chosen[len(self._dials)] = self._epoch
        self._add_dial(sync, None)

    def _add_dial(self, sync: Sync, epoch: int | None) -> None:
        number = len(self._dials)
        self._dials.append((sync, epoch))
        self._port.tell_shards(m.Dial(number, sync, epoch))

    def _tell_standing(self) -> None:
        self._port.tell_shards(
            m.Resume(
                self._plan.saving.every,
                self._plan.saving.cuts,
                self._restored.counts,
                tuple(self._openings.initial),
                bool(self.stale),
                self._plan.saving.clocks,
            )
        )

    @property
    def _dial(self) -> int:
        """The dial to begin with: the one of the epoch, or the last that the user chose since its turn."""
        turned = self._plan.course.at(self._restored.epoch)
        begin = self._plan.course.dials[turned][0]
        chosen = [number for number, epoch in self._chosen.items() if epoch >= begin]
        return chosen[-1] if chosen else turned

    def stop(self) -> None:
        """End soon. In lockstep first a checkpoint of a whole round: what learners that leave still fold is less than one."""
        self._room.ending = True
        lockstep = any(sync.lockstep for sync, _ in self._dials)
        if self._plan.saving.cuts and lockstep and self.tables and not self._stopping:
            self._stopping = True
            self.ask_cut()
        elif not self._stopping:
            self._port.announce(m.Stop())

    def finish(self) -> None:
        """All learners have left."""
        self._finishing = True
        if self.cutting:
            self._finish_later = True
        else:
            self._end_saved = self._exact
            self._port.tell_shards(m.Finish(cut=not self._exact))

    def save_failed(self) -> None:
        """Ask for a last checkpoint of a run that has failed while its shards live."""
        if self._plan.saving.cuts and self.tables and not self.stale:
            self._saving_failed = not self._end_saved
            if not self._finishing:  # else the shards have been asked for the checkpoint of the end
                self._port.tell_shards(m.AskCut(now=True))

    @property
    def saving_failed(self) -> bool:
        """Return whether the last checkpoint of a failed run is asked for, or is being written."""
        return self._saving_failed or self.cutting

    # -- learners ----------------------------------------------------------------------------------------

    def join(self, learner: int, rank: int) -> None:
        """A new one starts; it will open tables and loaders when it is there."""
        self.live[learner] = rank

    def begin_anew(self, learners: Mapping[int, int]) -> None:
        """Nobody is left: these open tables and loaders together, as in the beginning."""
        self.live.update(learners)
        self._openings.expect(learners, self._restored)

    def from_learner(self, learner: int, message: Any) -> None:
        """A learner's request, in words of `messages`."""
        if isinstance(message, m.Log):
            self._port.tell((self.live.get(learner), message))
            return
        if isinstance(message, m.Warned):
            self._port.tell(message)
            return
        if learner not in self.live:  # its last words came late
            return
        if isinstance(message, m.Closed):
            self._closed.add(learner)
            return
        if isinstance(message, m.AskDial):
            self._port.reply(learner, self._dials[message.number][0])
            return
        self._room.asked[learner] = message
        if learner in self.stale and not isinstance(message, m.Rejoin):
            self._room.reply(learner, m.Stale())
            return
        handlers: dict[type, Callable[[int, Any], None]] = {
            m.Open: self._openings.open,
            m.Initialised: self._openings.initialised,
            m.OpenLoader: self._openings.open_loader,
            m.MeanOf: lambda *_: self._room.try_met(),
            m.LoadState: self._load_state,
            m.AwaitState: self._await_state,
            m.Rejoin: lambda *_: self._try_rejoin(),
            m.Called: lambda learner, _: self._room.answer_call(learner),
        }
        try:
            handlers[type(message)](learner, message)
        except UsageError as error:
            self._room.reply(learner, m.Refused(error))
        self._room.look(learner)

    def leave(self, learner: int, *, lost: bool) -> None:
        """It returned, raised or died."""
        rank = self.live.pop(learner, None)
        if rank is None:
            return
        self._room.leave(learner)
        self.stale.discard(learner)
        self._port.tell_shards(m.Leave(learner, rank, lost, learner in self._closed))
        self._openings.leave(learner)
        self._room.try_met()
        self._openings.hand_over(learner)
        self._try_rejoin()
        self._room.tell()

    # -- servers that were started anew --------------------------------------------------------------------

    def recover(self, restored: Restored | None, learners: Mapping[int, int]) -> None:
        """The shards were lost and are new: all goes back to the checkpoint, or to the start.

        Live learners rejoin; `learners` are those that start anew, where none is left.
        """
        if restored is not None:
            self._restored = restored
        self._epoch = self._restored.epoch
        self.live.update(learners)
        self.stale = set(self.live) - set(learners)
        self._answers.clear()
        self._awaited.clear()
        self._room.reset()
        self._open_cut, self._saved = None, {}
        self._finishing = self._finish_later = self._end_saved = False
        self._stopping = self._exact = self.reached = False
        for number, (sync, epoch) in enumerate(self._dials):
            self._port.tell_shards(m.Dial(number, sync, PAST if epoch is None else epoch))
        self._openings.expect(self.live, self._restored)
        self._tell_standing()
        self._openings.make_again()
        self._port.announce(m.Renewed())
        for learner, message in list(self._room.asked.items()):
            if learner in self.stale and not isinstance(message, m.Rejoin):
                self._room.reply(learner, m.Stale())
        self._try_rejoin()

    def _try_rejoin(self) -> None:
        """All at once: the first fold and the first joint round are for all of them."""
        back = {each: asked for each, asked in self._room.asked.items() if isinstance(asked, m.Rejoin)}
        if not self.stale or self.stale - back.keys():
            return
        self.stale = set()
        ordered = self._room.by_rank(back)
        opened = self._openings.join_again({learner: back[learner] for learner in ordered})
        for learner in ordered:
            self._openings.leave(learner)
            self._room.reply(learner, m.Rejoined(opened[learner]))

    # -- states of optimizers ----------------------------------------------------------------------------

    def _load_state(self, learner: int, message: m.LoadState) -> None:
        self._awaited[message.table, message.number, learner] = self._port.shards
        self._port.tell_shards((learner, message))

    def _await_state(self, learner: int, message: m.AwaitState) -> None:
        """It has asked the shards, and waits for their parts."""
        key = (message.table, message.number, learner)
        self._awaited[key] = self.layout(message.table).shards
        self._try_state(key)

    def _try_state(self, key: tuple[int, int, int]) -> None:
        answers = self._answers.get(key, {})
        if len(answers) == self._awaited.get(key):
            del self._answers[key], self._awaited[key]
            self._room.reply(key[2], [answers[shard] for shard in sorted(answers)])

    # -- shards ------------------------------------------------------------------------------------------

    def from_shard(self, message: Any) -> None:
        kind = type(message)
        if kind in (m.StatePart, m.Loaded):
            key = (message.table, message.number, message.learner)
            self._answers.setdefault(key, {})[message.shard] = message
            self._try_state(key)
        elif kind is m.Saved and message.number == FIRST:
            self._openings.first(message)
            if message.problem:
                self._port.tell(m.Checkpointed(0, "", message.problem))
        elif kind in (m.Cut, m.Saved):
            self._cut(message)
        elif kind is m.Met:
            self._room.met(message)
            self._room.tell()
        elif kind is m.Standstill:
            self._room.standstill(message)
        elif kind is m.Reached:
            self.reached = self._room.ending = True
            self._port.announce(m.Stop())
        else:
            if kind is m.EpochEnd and message.loader == 0:
                self._epoch = message.done
            self._port.tell(message)

    # -- checkpoints -------------------------------------------------------------------------------------

    def ask_cut(self) -> None:
        self._port.tell_shards(m.AskCut())

    def _cut(self, message: m.Cut | m.Saved) -> None:
        if self._stopping and not self._exact and isinstance(message, m.Cut):
            self._exact = True
            self._port.announce(m.Stop())
        if isinstance(message, m.Cut):
            self._open_cut = message
        else:
            self._saved[message.name] = message
        cut, saved = self._open_cut, self._saved
        if cut is None or set(cut.files) - saved.keys():
            return
        self._open_cut, self._saved = None, {}
        problem = next((saved[name].problem for name in cut.files if saved[name].problem), "")
        self._end_saved |= self._finishing and not self._finish_later
        self._saving_failed &= not (cut.failed or self._end_saved)
        if cut.failed and not any(cut.counts.examples.values()):
            self._port.commit(cut.number, None, ())  # nothing was trained, and the folder can be used again
        elif problem:
            self._port.commit(cut.number, None, ())
            self._port.tell(m.Checkpointed(cut.number, "", problem))
        elif self._port.commit(
            cut.number,
            self._manifest(cut),
            [written for name in cut.files if (written := saved[name].written) is not None],
            prune=not self._openings.waits_for_checkpoint,
        ):
            self._openings.in_checkpoint(cut.accounts)
        self._port.tell_shards(m.CutDone())
        if self._finish_later:
            self._finish_later = False
            self.finish()

    def _manifest(self, cut: m.Cut) -> dict[str, Any]:
        tables, loaders = self._openings.tables, self._openings.loaders
        return manifest(
            cut,
            seed=self._plan.seed,
            sync=str(self._plan.course),
            chosen=[(self._dials[number][0], epoch) for number, epoch in self._chosen.items()],
            learners=self._plan.learners,
            tables={number: (tables[number].layout, tables[number].optimizer) for number in cut.accounts},
            loaders={number: (loaders[number], self._openings.parts_of(number)) for number in cut.standings},
        )
