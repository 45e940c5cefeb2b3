"""What the leading shard counts and keeps: losses by the epochs of their batches, learners' buffers (M6), vector clocks (R6)."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import torch

from syncline import messages as m
from syncline.protocols.folding import Ticket
from syncline.roles.checkpoint_manifest import decoded
from syncline.roles.counters import ROWS, Counters, LearnerStates, VectorClocks


def test_losses_belong_to_the_epoch_of_their_batches_whenever_it_is_done() -> None:
    tally = Counters()
    tally.folded(0, 0, 4, 1.0, {0: 4})
    tally.folded(0, 1, 4, 3.0, {1: 4})
    tally.folded(0, 0, 4, 5.0, {1: 4})
    assert tally.epoch(1) == (4.0, {0: 5.0, 1: 3.0})
    tally.folded(0, 1, 2, 2.5, {0: 2})
    assert tally.epoch(0) == (1.5, {0: 1.0, 1: 2.5})
    assert math.isnan(tally.epoch(0)[0]) and tally.examples == {0: 14}


def test_a_gradient_of_batches_of_two_epochs_counts_in_both_by_its_examples() -> None:
    tally = Counters()
    tally.folded(0, 0, 8, 2.0, {0: 2, 1: 6})
    tally.folded(0, 0, 2, 6.0, {0: 2})
    tally.folded(0, 0, 4, float("nan"), {0: 4})
    assert tally.epoch(0)[0] == 4.0 and tally.epoch(1)[0] == 2.0


def test_losses_of_open_epochs_go_on_from_a_checkpoint() -> None:
    tally, again = Counters(), Counters()
    tally.folded(0, 0, 4, 1.0, {0: 4})
    tally.folded(0, 1, 4, 3.0, {2: 4})
    kept = json.loads(json.dumps(dataclasses.asdict(tally.counts())))
    again.resume(decoded("/run/12", m.Counts, kept))
    again.folded(0, 0, 4, 2.0, {0: 4})
    assert (again.epoch(0), again.epoch(2)) == ((1.5, {0: 1.5}), (3.0, {1: 3.0}))


def test_a_loss_that_is_read_late_counts_where_its_gradient_did() -> None:
    class Later:
        read = 0

        def __float__(self) -> float:
            self.read += 1
            return 7.0

    tally, loss = Counters(), Later()
    tally.folded(0, 1, 2, loss, {0: 2})
    tally.folded(0, 1, 2, 3.0, {0: 2})
    assert loss.read == 0 and tally.last == {1: 3.0}
    assert tally.epoch(0) == (5.0, {1: 5.0})
    tally.read()
    assert loss.read == 1


# -- learners' buffers and random states -----------------------------------------------------------------------


def test_a_lost_learners_statistics_stay_where_its_table_has_no_others() -> None:
    states = LearnerStates()
    for table, learner, value in ((0, 1, 2.0), (0, 2, 4.0), (1, 1, 8.0)):
        states.buffers[table, learner] = [torch.tensor([value])]
    states.lose(1)
    assert states.joint(0) == [torch.tensor([4.0])]
    assert states.joint(1) == [torch.tensor([8.0])]
    states.lose(2)
    assert states.joint(0) == [torch.tensor([4.0])]


def test_buffers_of_all_learners_become_their_mean_and_whole_numbers_the_largest() -> None:
    states = LearnerStates()
    for learner, value in ((1, 1.0), (2, 4.0)):
        states.keep(0, learner, [torch.tensor([value]), torch.tensor([int(value)])])
    mean, largest = states.joint(0) or []
    assert mean.tolist() == [2.5] and largest.tolist() == [4] and largest.dtype == torch.int64
    assert states.joint(1) is None


def test_what_is_kept_of_a_learner_is_a_copy_of_its_last_buffers() -> None:
    states, draft = LearnerStates(), [torch.tensor([1.0])]
    states.keep(0, 1, draft)
    draft[0].fill_(2.0)
    assert states.buffers[0, 1] == [torch.tensor([1.0])]
    states.keep(0, 1, draft)
    draft[0].fill_(3.0)
    assert states.buffers[0, 1] == [torch.tensor([2.0])]


def test_a_checkpoint_names_states_by_rank() -> None:
    states = LearnerStates()
    states.random[3] = b"ab"
    states.keep(1, 70, [torch.tensor([5.0]), torch.tensor([6.0])])
    found = states.tensors({70: 3})
    assert {name: value.tolist() for name, value in found.items()} == {
        "random/3": [97, 98],
        "buffer/1/3/0": [5.0],
        "buffer/1/3/1": [6.0],
    }


# -- vector clocks ---------------------------------------------------------------------------------------------


def test_rows_of_vector_clocks_are_reported_many_at_a_time_each_once() -> None:
    reports: list[m.Clocks] = []
    clocks = VectorClocks(reports.append)
    for version in range(1, ROWS + 2):
        clocks.fold(version, [Ticket(9, 4, 1, version - 1, 0, 1)])
    assert len(reports) == 1
    clocks.tell(), clocks.tell()
    rows = np.frombuffer(b"".join(each.rows for each in reports), "<u4").reshape(-1, 3)
    assert rows.tolist() == [[version, 4, version - 1] for version in range(1, ROWS + 2)]
    assert len(reports) == 2
