"""The coordinator by itself: what one learner was refused, nobody else is told that it is there."""

from __future__ import annotations

from unittest.mock import MagicMock

from syncline import messages as m
from syncline.dial import Course
from syncline.ports import CoordinatorPort
from syncline.protocols.epoch_positions import Standing
from syncline.roles.checkpoint_manifest import LoaderState, Restored
from syncline.roles.coordinator import Coordinator
from syncline.roles.run_plan import RunPlan


def test_a_loader_that_was_refused_is_refused_again() -> None:
    """Its data is not that of the checkpoint; the second learner must not join what nobody has made."""
    standing = Standing(done=0, newest=-1, fresh={}, returned=[], skipped={}, broken=[])
    kept = LoaderState(size=100, policy="ledger", parts=2, standing=standing)
    restored = Restored(name="the checkpoint", seed=0, loaders={0: kept})
    port = MagicMock(spec=CoordinatorPort, shards=1)
    coordinator = Coordinator(port, RunPlan(course=Course.of("async"), learners=2), {0: 0, 1: 1}, restored)
    for learner in (0, 1):
        coordinator.from_learner(learner, m.OpenLoader(0, 8, 2, "ledger", None))
        answer = port.reply.call_args.args
        assert answer[0] == learner and "made with 100 examples in loader 0" in str(answer[1].error)
        coordinator.leave(learner, lost=True)
    told = [call.args[0] for call in port.tell_shards.call_args_list]
    assert not any(isinstance(event, m.MakeLoader | m.JoinLoader) for event in told)
