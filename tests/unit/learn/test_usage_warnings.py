"""What a learner's loop does that is hardly meant: what is noticed, what is not, and that it is said once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from syncline import messages as m
from syncline.learn.usage_warnings import LOOK, Untouched, Watch, hooked


class Watched:
    """A learner's watch, over parameters of tables, and what it has said."""

    def __init__(self) -> None:
        self.said: list[m.Warned] = []
        self.owned: set[int] = set()
        self.loaders: list[Any] = []
        self.most_steps = 0
        self.watch = Watch(3, self.said.append, self.owned, self)

    @property
    def causes(self) -> list[str]:
        return [warned.cause for warned in self.said]


@pytest.fixture
def watched() -> Iterator[Watched]:
    found = Watched()
    yield found
    found.watch.shared.append(SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    found.watch.close()


def plain(*parameters: nn.Parameter) -> SGD:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return SGD(parameters, lr=0.1)


# -- plain optimizers ----------------------------------------------------------------------------------------


def test_a_plain_optimizer_beside_a_tables_is_told_of_once(watched: Watched) -> None:
    held, own = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    watched.owned.add(id(held))
    table = plain(held)
    watched.watch.shared.append(table)
    table.step()
    assert not watched.said
    other = plain(own)
    other.step()
    other.step()
    assert watched.causes == ["plain"]
    assert (
        watched.said[0].text.startswith("learner 3: steps a plain SGD beside")
        and "own copy" in watched.said[0].text
    )


def test_of_a_tables_parameters_it_says_that_the_next_read_overwrites_them(watched: Watched) -> None:
    held = nn.Parameter(torch.zeros(2))
    watched.owned.add(id(held))
    watched.watch.shared.append(plain(nn.Parameter(torch.zeros(1))))
    plain(held).step()
    assert "which the next read overwrites" in watched.said[0].text


def test_an_optimizer_around_a_tables_is_no_plain_one(watched: Watched) -> None:
    table = plain(nn.Parameter(torch.zeros(2)))
    watched.watch.shared.append(table)

    class Around(Optimizer):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            table.step()

    Around(table.param_groups[0]["params"], {}).step()
    assert not watched.said


def test_who_opened_no_table_hears_so_at_the_end() -> None:
    for opens, causes in ((False, ["plain"]), (True, [])):
        each = Watched()
        optimizer = plain(nn.Parameter(torch.zeros(2)))
        optimizer.step()
        assert not each.said, "a table may come yet"
        if opens:
            each.watch.shared.append(optimizer)
        each.watch.close()
        assert each.causes == causes
        optimizer.step()
        assert each.causes == causes, "its learner is gone"


def test_hooks_of_others_are_seen_and_the_watchs_own_are_not(watched: Watched) -> None:
    optimizer = plain(nn.Parameter(torch.zeros(2)))
    assert not hooked(optimizer)
    handle = optimizer.register_step_post_hook(lambda *rest: None)
    assert hooked(optimizer)
    handle.remove()
    assert not hooked(optimizer)


# -- losses --------------------------------------------------------------------------------------------------


def test_a_loss_that_is_no_number_is_told_of_once(watched: Watched) -> None:
    watched.watch.not_finite(float("inf"), 7, 2)
    watched.watch.not_finite(float("nan"), 8, None)
    assert len(watched.said) == 1
    assert "the loss of its step 8 in epoch 3 is inf" in watched.said[0].text


def test_losses_on_a_card_are_looked_at_once_an_epoch_or_in_many_steps(watched: Watched) -> None:
    class Loss:
        looks = 0

        def item(self) -> float:
            Loss.looks += 1
            return 1.0

    looks = []
    for step, epoch in [
        (0, 0),
        (1, 0),
        (LOOK - 1, 0),
        (LOOK, 0),
        (LOOK + 1, 0),
        (LOOK + 2, 1),
        (LOOK + 3, 1),
    ]:
        watched.watch.loss_on_card(Loss(), step, epoch)  # type: ignore[arg-type]
        looks.append(Loss.looks)
    assert looks == [1, 1, 1, 2, 2, 3, 3]


# -- weights between two steps -------------------------------------------------------------------------------


def of_two(watched: Watched) -> tuple[nn.Parameter, nn.Parameter, Untouched]:
    first, second = nn.Parameter(torch.tensor([1.0, -3.0])), nn.Parameter(torch.tensor([2.0]))
    return first, second, Untouched([first, second], ["first", "second"], watched.watch)


@pytest.mark.parametrize(
    "write, steps, seen",
    [
        (lambda p: p.add_(1), 3, True),  # counted by torch, at any step
        (lambda p: p.data.add_(1), 4, True),  # seen by norms, which are compared after 1, 2, 4, 8 … steps
        (lambda p: p.data.add_(1), 3, False),
        (lambda p: p.data.clamp_(max=1.5), 4, True),
        (lambda p: p.data.copy_(p.data), 4, False),
        (lambda p: p.grad, 4, False),
    ],
)
def test_writes_between_two_steps_are_noticed(watched: Watched, write: Any, steps: int, seen: bool) -> None:
    _, second, untouched = of_two(watched)
    untouched.note(steps)
    with torch.no_grad():
        write(second)
    untouched.look()
    untouched.look()
    assert watched.causes == ["written"] * seen
    assert not seen or "'second' was changed in place" in watched.said[0].text


def test_weights_that_are_no_numbers_are_not_taken_for_written(watched: Watched) -> None:
    first, _, untouched = of_two(watched)
    first.data.fill_(float("nan"))
    untouched.note(1)
    untouched.look()
    assert not watched.said


def test_what_a_read_has_changed_is_noted(watched: Watched) -> None:
    first, _, untouched = of_two(watched)
    untouched.note(2)
    with torch.no_grad():
        first.zero_()
    untouched.note(3)
    untouched.look()
    assert not watched.said
