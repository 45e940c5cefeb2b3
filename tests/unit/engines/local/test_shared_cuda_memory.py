"""What of a shared card's memory needs no card: handles that are passed on, losses that come late, errors in words."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import pytest
import torch

from syncline.engines.local import shared_cuda_memory as shared
from syncline.engines.local.shared_cuda_memory import (
    LOSSES,
    ROOM,
    CardMemory,
    Handles,
    LateLoss,
    LateLosses,
    share,
)
from syncline.engines.local.shared_memory import Region
from syncline.errors import RunError

NOT_YET = torch.tensor(0x7FF8DEAD00000001).view(torch.float64)  # as it lies there before the card has written


@pytest.fixture
def losses() -> LateLosses:
    return LateLosses(Region(2 * LOSSES), LOSSES)


def test_handles_are_there_from_when_they_were_put_until_they_are_cleared() -> None:
    region = Region(4096)
    mine, theirs = Handles(region, 64), Handles(region, 64)
    assert [theirs.get(index) for index in range(3)] == [None] * 3
    mine.put(1, b"x" * 64), mine.put(2, b"y" * 40)
    assert [theirs.get(index) for index in range(3)] == [None, b"x" * 64, b"y" * 40]
    assert theirs.event(0, torch.device("cpu")) is None
    mine.clear(2)
    assert [theirs.get(index) for index in range(3)] == [None, None, b"y" * 40]
    assert not any(region.bytes[:64]), "what lies before them is another's"


def test_a_loss_belongs_to_its_ticket_and_others_are_as_they_were_said(losses: LateLosses) -> None:
    losses.write(5, torch.tensor([0.25]))
    assert float(losses.of(5, 9.0)) == 0.25
    assert losses.of(4, 9.0) == 9.0 and losses.of(5 + ROOM, 9.0) == 9.0


def test_a_loss_on_its_way_is_waited_for_when_it_is_needed(
    losses: LateLosses, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses.write(3, NOT_YET)
    late = losses.of(3, 0.0)
    assert isinstance(late, LateLoss) and not late.come()
    place = losses.page[LOSSES // 2 :].view(torch.float64)[3:4]
    monkeypatch.setattr(shared.time, "sleep", lambda seconds: place.fill_(1.5))  # the card's copy arrives
    assert float(late) == 1.5
    losses.write(3 + ROOM, torch.tensor(2.0))
    assert float(late) == 1.5, "read once, it stays"


def test_a_loss_whose_learner_is_gone_is_not_waited_for_for_ever(
    losses: LateLosses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "PATIENCE", -1.0)
    losses.write(3, NOT_YET)
    assert math.isnan(float(losses.of(3, 0.0)))


def test_losses_that_have_come_are_read_before_their_place_is_anothers(losses: LateLosses) -> None:
    losses.write(3, torch.tensor(1.0))
    first = losses.of(3, 0.0)
    losses.of(4, 0.0)  # whoever asks for the next sees what has come
    losses.write(3 + ROOM, torch.tensor(2.0))
    assert float(first) == 1.0 and float(losses.of(3 + ROOM, 0.0)) == 2.0


class Driver:
    """In place of CUDA's: every call ends with this code."""

    def __init__(self, code: int) -> None:
        self.code, self.called = code, list[str]()

    def __getattr__(self, name: str) -> Any:
        def call(address: Any, *rest: Any) -> int:
            self.called.append(name)
            if name == "cuMemAlloc_v2" and not self.code:
                address._obj.value = 4096
            return self.code

        return call


@pytest.fixture
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: None)


@pytest.mark.parametrize(
    "code, words", [(2, r"the card has no room for 3\.0 MiB of versions;"), (5, r"CUDA error 5 for 3\.0 MiB")]
)
def test_what_the_driver_refuses_is_said_with_the_remedy(
    code: int, words: str, no_card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_driver", lambda: Driver(code))
    with pytest.raises(RunError, match=rf'{words}.* table_device="cpu" keeps the table beside the card'):
        CardMemory("cuda:0", 3 << 20, "versions")


def test_who_owns_memory_frees_it_and_who_mapped_it_unmaps_it(
    no_card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(0)
    monkeypatch.setattr(shared, "_driver", lambda: driver)
    own = CardMemory("cuda:0", 8, "versions")
    handle = own.handle()
    assert len(handle) == 64 and own.__cuda_array_interface__["data"] == (4096, False)
    del own
    theirs = CardMemory("cuda:0", 8, "versions", handle)
    theirs._address = ctypes.c_uint64(4096)
    del theirs
    assert driver.called == [
        "cuMemAlloc_v2",
        "cuIpcGetMemHandle",
        "cuMemFree_v2",
        "cuIpcOpenMemHandle_v2",
        "cuIpcCloseMemHandle",
    ]


def test_who_waits_for_a_block_looks_whether_its_owner_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared.time, "sleep", lambda seconds: None)
    looks = iter([None, None, RunError("gone")])

    def check() -> None:
        if (error := next(looks)) is not None:
            raise error

    with pytest.raises(RunError, match="gone"):
        share(Handles(Region(8), 0), "cuda:0", 8, "versions", owner=False, check=check)
    assert list(looks) == []
