"""Parameters that are cut over seats and updated where they are: the first of two seats, whose twin does and says the same."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from syncline.dial import Course
from syncline.errors import LayoutError, UsageError
from syncline.learn.local_update import as_partitioned, whole_layout, whole_states, without_gradients
from syncline.learn.seats import SeatPort, SeatSession
from syncline.messages import to_leader as say
from syncline.parallel import Box, Part
from syncline.parallel.module import Partitioned
from syncline.parallel.move import Group
from syncline.ports import RunStopped
from syncline.roles.run_plan import RunPlan, Seat
from syncline.table.layout import lay_out
from tests.unit.learn.servers_of_one import ServersOfOne, Table

CUT = Part((4, 3), ((Box(((0, 2), (0, 3))),), (Box(((2, 4), (0, 3))),)))
EVERYWHERE = Part((5,), ((Box(((0, 5),)),),) * 2)
RATE = partial(SGD, lr=0.5, momentum=0.9)


class Twins(Group):
    """Two seats that hold the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.size = 0, 2

    def add(self, tensor: Tensor) -> Tensor:
        return 2 * tensor


class Port(SeatPort):
    def gather(self, own: bytes) -> list[bytes]:
        return [own, own]


class Silent:
    """The line to a seat that needs to hear nothing."""

    seat, seats = 0, 2

    def tell(self, answer: Any) -> None: ...


class Shared(Table):
    """The engine's end of a table: its seats read windows of it."""

    def narrow_to(self, own: Any, reads: Any) -> None:
        self._own = own

    def draft(self, *, block: bool = True) -> Any:
        self._draft = super().draft()
        self._draft.place = len(self._servers.said)
        return self._draft

    def at(self, place: int) -> Any:
        return self._draft

    def publish(self, draft: Any, message: Any, options: bytes = b"", present: Any = ()) -> None:
        self.present = list(present)
        self.written = [set(gradient.unique().tolist()) for gradient in draft.gradients]
        if isinstance(message, say.Gradient):  # the other half of what both hold is the twin's to write
            for number, gradient in enumerate(draft.gradients[1:], 2):
                gradient.fill_(2.0 * number)
        super().publish(draft, message, options, present)

    def copy(self, reading: Any, into: list[Tensor]) -> int:
        with torch.no_grad():
            for target, value in zip(into, self._own(self.values), strict=True):
                target.copy_(value)
        return self.version

    def has_read(self) -> None: ...


class Servers(ServersOfOne):
    def open(self, opened: Any) -> Any:
        if not self.tables:
            self.tables.append(Shared(self, opened))
        return self.tables[0]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2))


def seat(*, local: bool) -> tuple[Partitioned, Any, Servers, SeatSession]:
    servers = Servers()
    plan = RunPlan(course=Course.of("hardsync"), learners=1, local=local)
    session = SeatSession(Port(servers, Silent()), Seat(plan=plan, rank=0, seats=2), 0)  # type: ignore[arg-type]
    model = Partitioned(net(), {"0": "model", "1": "data"}, torch.ones(2, 3), Twins())
    return model, session.optimizer(model, RATE), servers, session


def fill(model: nn.Module) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)


def test_slices_are_stepped_here_and_what_all_hold_by_the_servers() -> None:
    model, optimizer, servers, _ = seat(local=True)
    cut = [model.parts[name].replicated for name, _ in model.named_parameters()]
    assert cut == [False, True, True]
    plain = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    own = RATE(plain)
    for _ in range(2):
        fill(model)
        for number, parameter in enumerate(plain):
            parameter.grad = torch.full_like(parameter, (number + 1.0) * (2 if cut[number] else 1))
        optimizer.step()
        own.step()
        table = servers.tables[0]
        assert table.present == cut, "only what all seats hold is published"
        assert table.written == [{0.0}, {0.0, 4.0}, {0.0}], "half of that by each seat"
        for parameter, wanted in zip(model.parameters(), plain, strict=True):
            assert torch.allclose(parameter, wanted) and parameter.grad is not None
    slices = net().state_dict()["0.weight"][:2]
    assert torch.equal(table.values[0][:2], slices), "the table's are as they were"


def test_without_local_updates_the_servers_step_all() -> None:
    model, optimizer, servers, _ = seat(local=False)
    before = model.get_parameter("0.weight").detach().clone()
    fill(model)
    optimizer.step()
    assert not servers.tables[0].present and torch.allclose(model.get_parameter("0.weight"), before - 0.5)


def test_a_seat_ends_before_a_step_and_never_in_the_middle_of_one() -> None:
    model, optimizer, servers, session = seat(local=True)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    fill(model)
    servers.stops = True
    with pytest.raises(RunStopped):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    session.committed = True
    assert not session.ending


def test_the_loss_of_a_closure_is_made_before_gradients_are_added_up() -> None:
    model, optimizer, servers, _ = seat(local=True)
    calls = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        fill(model)
        return 0.25

    with torch.no_grad():
        assert optimizer.step(closure) == 0.25 and calls == [True]
    assert float(servers.of(say.Gradient)[0].loss) == 0.25


# -- of whole models -----------------------------------------------------------------------------------------


def test_parameters_have_no_gradients_meanwhile() -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    parameters[0].grad = gradient = torch.ones(2)
    with without_gradients(parameters):
        assert [parameter.grad for parameter in parameters] == [None, None]
    assert parameters[0].grad is gradient and parameters[1].grad is None


def test_a_whole_layout_has_whole_shapes_and_no_strange_parameters() -> None:
    layer = nn.Linear(3, 2)  # a seat's half
    layout, _ = lay_out(layer, [layer.parameters()], cuttable=True, shards=1)
    whole = whole_layout(layout, {"weight": CUT, "bias": EVERYWHERE})
    assert [entry.shape for entry in whole.parameters.entries] == [(4, 3), (5,)]
    with pytest.raises(LayoutError, match=r"holds a parameter \(bias\) that is not the partitioned model's"):
        whole_layout(layout, {"weight": CUT})


def test_a_model_that_is_whole_is_refused() -> None:
    with pytest.raises(UsageError, match=r"in a group of 3 seats takes a partitioned model.*got Linear"):
        as_partitioned(nn.Linear(1, 1), 3)


@pytest.mark.parametrize("own", [True, False])
def test_a_seat_without_a_state_takes_part_with_zeros(own: bool) -> None:
    """Every seat must take part in what is put together, whether its optimizer has a state or not."""
    parts = {"weight": Part((3, 3), ((Box(((0, 3), (0, 3))),), (Box(((3, 3), (0, 3))),))), "other": CUT}
    asked: list[Tensor] = []

    def whole(name: str, local: Tensor) -> Tensor:
        asked.append(local)
        return local

    model: Any = SimpleNamespace(parts=parts, whole=whole)
    parameters = [torch.ones(3, 3), torch.ones(2, 3)]
    state = {"momentum": torch.full((2, 3), 7.0), "step": torch.tensor(3.0)}
    held = {1: {"momentum": torch.float32, "step": 3.0}}
    found = whole_states(
        model, {0: "weight", 1: "other"}, parameters, {1: state} if own else {}, lambda said: [held, said]
    )
    assert found.keys() == {1} and found[1]["step"] == 3.0
    assert [tensor.tolist() for tensor in asked] == [[[7.0 * own] * 3] * 2]
