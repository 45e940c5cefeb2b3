"""What the leading shard counts: losses belong to the epochs of their gradients' batches."""

from __future__ import annotations

import dataclasses
import json
import math

from syncline.roles.checkpoint_manifest import _by_number
from syncline.roles.counters import Counters


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
    kept = json.loads(json.dumps(dataclasses.asdict(tally.counts())))["losses"]
    losses = {epoch: _by_number(ranks) for epoch, ranks in _by_number(kept).items()}
    again.resume(dataclasses.replace(tally.counts(), losses=losses))
    again.folded(0, 0, 4, 2.0, {0: 4})
    assert (again.epoch(0), again.epoch(2)) == ((1.5, {0: 1.5}), (3.0, {1: 3.0}))
