"""Whose word holds in a parameter group: learners' where they changed something, the optimizer's own where it did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from syncline.table.parameter_groups import Groups


class Counting(Optimizer):
    def __init__(self, **options: Any) -> None:
        super().__init__([torch.zeros(2)], {"lr": 1.0, "betas": (0.5, 0.25), "k": 0, **options})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1


def made(**options: Any) -> tuple[Counting, Groups, dict[str, Any]]:
    """An optimizer, its groups, and the options that a learner sends in the beginning."""
    optimizer = Counting(**options)
    sent = {"lr": 1.0, "betas": [0.5, 0.25], "k": 0, **options}
    return optimizer, Groups(optimizer, [{**sent, "betas": (0.5, 0.25)}]), sent


def test_only_what_a_learner_changed_is_taken_over() -> None:
    optimizer, groups, sent = made()
    for lr in (1.0, 0.5, 0.5, 0.25):
        groups.follow([{**sent, "lr": lr}], 1.0)
        optimizer.step()
    group = optimizer.param_groups[0]
    assert (group["lr"], group["k"], group["betas"]) == (0.25, 4, (0.5, 0.25))
    groups.follow(
        [{**sent, "lr": 0.25, "betas": [0.1, 0.2], "k": 9}], 1.0
    )  # the learner sets the count itself
    optimizer.step()
    assert (group["betas"], group["k"]) == ((0.1, 0.2), 10)


def test_learners_with_different_options_take_turns() -> None:
    optimizer, groups, sent = made()
    rates = []
    for lr in (1.0, 2.0, 1.0, 1.0, 2.0):
        groups.follow([{**sent, "lr": lr}], 1.0)
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 2.0, 1.0, 1.0, 2.0] and optimizer.param_groups[0]["k"] == 5


def test_the_factor_is_in_force_in_steps_and_in_no_state() -> None:
    optimizer, groups, sent = made()
    for factor, rate in ((0.5, 0.5), (0.25, 0.25), (1.0, 1.0), (0.5, 0.5)):
        groups.follow([sent], factor)
        assert optimizer.param_groups[0]["lr"] == rate
        assert groups.values()[0]["lr"] == 1.0 and groups.own() == [{}]
        assert optimizer.param_groups[0]["lr"] == rate


def test_a_rate_that_the_optimizer_changed_under_a_factor_stays_changed() -> None:
    optimizer, groups, sent = made()
    groups.follow([sent], 0.5)
    optimizer.param_groups[0]["lr"] *= 0.1
    groups.follow([sent], 1.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    groups.follow([{**sent, "lr": 3.0}], 1.0)
    assert optimizer.param_groups[0]["lr"] == 3.0


def test_its_own_are_those_that_nobody_said() -> None:
    optimizer, groups, sent = made()
    groups.follow([{**sent, "lr": 0.5, "initial_lr": 1.0}], 1.0)
    optimizer.step()
    optimizer.param_groups[0]["seen"] = 7
    assert groups.own() == [{"k": 1, "seen": 7}]


def test_a_loaded_state_stays_while_learners_say_what_they_said_before() -> None:
    optimizer, groups, sent = made()
    groups.follow([sent], 0.5)
    groups.load([{"lr": 4.0, "k": 30}])
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 2.0
    groups.follow([dict(sent)], 1.0)
    optimizer.step()
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["k"]) == (4.0, 32)
    assert groups.own() == [{"lr": 4.0, "k": 32}]
