"""Cargo: objects between processes; bulk data once, shared until written, everything else by pickle (M11)."""

import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from syncline.engines.local.shared_memory import Region, WakeUp
from syncline.engines.local.shared_pickle import INLINE, Parcel, pack, pack_task, unpack
from syncline.engines.run import Task
from syncline.errors import UsageError
from tests.unit.engines.local.doubles import open_descriptors, spec_of, unpack_again

BIG = INLINE  # elements of any dtype: more than what travels inline


def copied(parcel: Parcel) -> int:
    """Bytes of bulk data, beside the message or in it."""
    pickled = len(parcel.pickled)
    return max(0, parcel.bulk) + len(parcel.inline) + (pickled if pickled > INLINE else 0)


def trip(obj: Any, *, mapped: bool = False, most: int | None = None) -> Any:
    """Packed and unpacked; at most so many bytes were copied."""
    parcel = pack(obj, mapped=mapped)
    try:
        assert most is None or copied(parcel) <= most
        return unpack_again(parcel)
    finally:
        parcel.close()


def mapping_of(address: int) -> tuple[str, dict[str, int]]:
    """The line of the mapping that holds an address, and its numbers in kB."""
    with open("/proc/self/smaps") as file:
        blocks = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", file.read(), flags=re.MULTILINE)[1:]
    for block in blocks:
        first, *lines = block.splitlines()
        low, high = (int(bound, 16) for bound in first.split()[0].split("-"))
        if low <= address < high:
            return first, {k: int(v) for k, v in re.findall(r"^(\w+): +(\d+) kB", "\n".join(lines), re.M)}
    raise LookupError(hex(address))


FILLERS = {"small": 1, "big": BIG}  # inline, or in a file
sized = pytest.mark.parametrize("size", FILLERS.values(), ids=FILLERS)


# -- tensors and arrays ------------------------------------------------------------------------------------


@sized
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_tensors_of_any_dtype_go_round(dtype: torch.dtype, size: int) -> None:
    tensor = (torch.arange(3 * size) % 5).to(dtype).view(3, size)
    found = trip(tensor)
    assert found.dtype == dtype and torch.equal(found, tensor)
    assert found.data_ptr() % 8 == 0


@sized
def test_views_of_one_storage_stay_views_of_one(size: int) -> None:
    base = torch.arange(4.0 * size)
    found = trip(
        {"base": base, "rows": base.view(2, -1)[1], "odd": base[1::2], "turned": base.view(4, -1).t()}
    )
    assert all(torch.equal(a, b) for a, b in zip(found["turned"], base.view(4, -1).t(), strict=True))
    assert torch.equal(found["odd"], base[1::2]) and found["odd"].stride() == (2,)
    found["base"].fill_(7.0)
    assert all(bool((view == 7.0).all()) for view in found.values())
    assert bool((base[1:] != 7.0).any())  # and not of ours


@sized
def test_empty_tensors_and_arrays_travel_with_others(size: int) -> None:
    made = [
        torch.empty(0),
        torch.ones(size),
        torch.empty(3, 0, dtype=torch.int32),
        np.zeros((0, 2)),
        np.ones(3),
    ]
    found = trip([*made, torch.ones(2)])
    assert [tuple(value.shape) for value in found] == [(0,), (size,), (3, 0), (0, 2), (3,), (2,)]
    assert [value.dtype for value in found[:4]] == [value.dtype for value in made[:4]]
    assert found[1].sum() == size and found[4].sum() == 3 and found[5].sum() == 2


@sized
def test_arrays_go_round_in_their_order_of_memory(size: int) -> None:
    base = np.arange(6.0 * size).reshape(2, 3 * size)
    fixed = base.copy()
    fixed.flags.writeable = False
    texts = np.array(["a", "bc", None], dtype=object)
    found = trip({"c": base, "f": np.asfortranarray(base), "every": base[:, ::2], "fixed": fixed, "o": texts})
    assert np.array_equal(found["c"], base) and np.array_equal(found["f"], base)
    assert np.array_equal(found["every"], base[:, ::2]) and found["o"].tolist() == ["a", "bc", None]
    assert found["f"].flags.f_contiguous and not found["fixed"].flags.writeable
    found["c"][0] = -1  # what could be written can be


def test_numbers_are_aligned_even_inline() -> None:
    found = trip([torch.ones(3, dtype=torch.uint8), torch.ones(2, dtype=torch.float64), np.ones(5)])
    assert found[1].data_ptr() % 16 == 0 and found[2].flags.aligned
    assert found[1].sum() == 2 and found[2].sum() == 5


def test_tensors_and_arrays_interleave() -> None:
    made = [np.full(BIG, 1), torch.full((BIG,), 2), np.full(BIG, 3), torch.full((BIG,), 4), np.full(1, 5)]
    assert [int(value[-1]) for value in trip(made)] == [1, 2, 3, 4, 5]


# -- code --------------------------------------------------------------------------------------------------


def test_closures_and_local_classes_travel_with_what_they_hold() -> None:
    held = torch.arange(BIG)

    class Local:
        factor = 3

        def __call__(self, index: int) -> int:
            return int(held[index]) * self.factor

    function = trip(lambda index: Local()(index) + 1)
    assert function(5) == 16
    assert trip(Local)()(4) == 12


@pytest.mark.parametrize("width", [2, 200])
def test_a_module_goes_round_with_tied_weights_and_buffers(width: int) -> None:
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width))
    model[2].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    model.eval()
    found = trip(model)
    x = torch.randn(3, width)
    assert torch.equal(found(x), model(x)) and not found.training
    assert found[2].weight is found[0].weight
    assert [p.requires_grad for p in found.parameters()] == [p.requires_grad for p in model.parameters()]
    optimizer = torch.optim.SGD(found.parameters(), lr=0.1)
    found(x).sum().backward()
    optimizer.step()  # its memory can be written
    assert not torch.equal(found[0].weight, model[0].weight)


# -- shared memory by descriptor ---------------------------------------------------------------------------


@sized
def test_regions_and_bells_are_the_same_ones_on_both_sides(size: int) -> None:
    region, bell = Region(100), WakeUp()
    found = trip({"region": region, "more": torch.ones(size), "bells": [bell, WakeUp()]})
    region.words[3] = 42
    found["region"].bytes[0] = 7
    assert found["region"].words[3] == 42 and region.bytes[0] == 7
    assert found["region"].nbytes == region.nbytes == 4096
    bell.ring()
    assert os.eventfd_read(found["bells"][0].fd) == 1
    with pytest.raises(BlockingIOError):
        os.eventfd_read(found["bells"][1].fd)


def test_packing_and_unpacking_leave_no_descriptors_behind() -> None:
    before = open_descriptors()
    region = Region(1)
    parcel = pack([torch.zeros(BIG), region])
    found = unpack_again(parcel)
    parcel.close(), parcel.close()
    assert len(parcel.fds) == 2 and open_descriptors() > before
    del found, parcel, region
    assert open_descriptors() == before


# -- once ----------------------------------------------------------------------------------------------------


@pytest.fixture
def two() -> Iterator[tuple[Tensor, Tensor]]:
    """Two unpackings of one parcel of 64 MB."""
    parcel = pack(torch.ones(1 << 24))
    yield unpack_again(parcel), unpack_again(parcel)
    parcel.close()


def test_bulk_data_is_mapped_and_not_copied(two: tuple[Tensor, Tensor]) -> None:
    for tensor in two:
        line, sizes = mapping_of(tensor.data_ptr())
        assert "syncline-cargo" in line and line.split()[1] == "rw-p"
        assert sizes["Size"] == 65536 and sizes["Private_Dirty"] == sizes["Anonymous"] == 0
        assert tensor.sum() == 1 << 24  # reading costs no memory of its own
        assert mapping_of(tensor.data_ptr())[1]["Anonymous"] == 0


def test_writes_in_one_copy_are_not_seen_in_another(two: tuple[Tensor, Tensor]) -> None:
    one, other = two
    one[:1024] = 5.0
    assert other.sum() == 1 << 24 and one.sum() == (1 << 24) + 4 * 1024
    assert mapping_of(one.data_ptr())[1]["Anonymous"] == 4  # one page
    assert mapping_of(other.data_ptr())[1]["Anonymous"] == 0


def test_the_senders_data_is_copied_once_and_then_its_own() -> None:
    tensor = torch.ones(BIG)
    parcel = pack(tensor)
    tensor.zero_()
    assert unpack_again(parcel).sum() == BIG
    parcel.close()


# -- slices ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mapped", [False, True])
def test_of_a_storage_only_what_is_used_travels(mapped: bool) -> None:
    big = torch.arange(1 << 22)
    given = {"slice": big[5000:9000:2], "turned": big[6000:6100].view(10, 10).t(), "none": big[7:7]}
    parcel = pack(given, mapped=mapped)
    assert copied(parcel) <= 4000 * 8 + 64
    found = unpack(parcel)
    assert all(torch.equal(found[key], given[key]) for key in given)
    assert found["slice"].stride() == (2,) and found["none"].shape == (0,)
    found["slice"][500] = -1
    assert found["turned"][0, 0] == -1, "tied as they were"


def test_a_parameter_that_is_a_part_of_a_buffer_travels_alone() -> None:
    flat = torch.zeros(1 << 22)
    layer = nn.Linear(100, 100)
    layer.weight.data = flat[4096:14_096].view(100, 100)
    found = trip(layer, mapped=True, most=50_000)
    assert found.weight.shape == (100, 100) and found.weight.requires_grad


class Tagged(Tensor):
    """A tensor of one's own class."""


def test_whole_storages_and_slices_of_them_go_together() -> None:
    big = torch.arange(BIG := 3 * INLINE)
    found = trip(
        [big[INLINE:], big.untyped_storage(), big[2:].as_subclass(Tagged)], mapped=True, most=BIG * 8
    )
    assert found[0][0] == INLINE and found[1].nbytes() == BIG * 8 and type(found[2]) is Tagged
    found[2][0] = -5
    assert int.from_bytes(bytes(found[1][16:24]), "little", signed=True) == -5


def test_views_as_other_types_stay_tied() -> None:
    big = torch.zeros(1 << 20, dtype=torch.uint8)
    found = trip([big[4099:4200], big[8192:16384].view(torch.complex128)], mapped=True, most=17_000)
    assert found[1].shape == (512,) and found[0].shape == (101,)
    assert found[1].untyped_storage().data_ptr() == found[0].untyped_storage().data_ptr()


# -- a run's task ----------------------------------------------------------------------------------------------


@dataclass
class Arguments:
    data: Any
    objective: Any = None


LOCK = threading.Lock()


@pytest.mark.parametrize(
    "task, name",
    [
        (Task(print, (Arguments(LOCK),)), "data"),
        (Task(print, (3, LOCK)), "argument 2"),
        (Task(print, (), {"extra": LOCK}), "extra"),
        (Task(lambda session: LOCK.locked()), "<lambda>"),
    ],
)
def test_what_of_a_task_cannot_travel_is_named(task: Task, name: str) -> None:
    with pytest.raises(
        UsageError, match=rf"^{name} cannot travel to the learners' processes: .*lock.*made there"
    ) as caught:
        pack_task(replace(spec_of(), task=task))
    assert "\n" not in str(caught.value)


def test_the_evaluator_travels_by_itself_and_is_named() -> None:
    task, evaluate = pack_task(replace(spec_of(), task=Task(max, (1,)), evaluate=len))
    assert unpack_again(task) == Task(max, (1,)) and evaluate is not None and unpack_again(evaluate) is len
    assert pack_task(spec_of())[1] is None
    with pytest.raises(UsageError, match=r"^evaluate cannot travel"):
        pack_task(replace(spec_of(), evaluate=lambda state: LOCK.locked()))
