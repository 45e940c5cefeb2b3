"""Cargo that lies in files already: it is mapped from there, as it was mapped, or copied where that is not sure."""

import mmap
import os
import pickle
import warnings
from collections.abc import Callable
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from syncline.engines.local import file_mappings as mappings
from syncline.engines.local.shared_pickle import INLINE, pack, unpack
from syncline.errors import RunError, UsageError
from tests.ready_python import run_ready
from tests.unit.engines.local.doubles import open_descriptors, unpack_again
from tests.unit.engines.local.test_shared_pickle import copied, mapping_of

SIZE = 1 << 20  # bytes of a file
NUMBERS = np.arange(SIZE // 4, dtype=np.float32)


def trip(obj: Any, *, most: int = 0) -> Any:
    """Packed and unpacked; at most so many bytes were copied."""
    parcel = pack(obj, mapped=True)
    try:
        assert copied(parcel) <= most
        return unpack_again(parcel)
    finally:
        parcel.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    NUMBERS.tofile(tmp_path / "numbers.bin")
    return tmp_path / "numbers.bin"


def opened(file: Path, mode: Any = "r", **options: Any) -> np.memmap:
    return np.memmap(file, np.float32, mode=mode, **options)


def address(array: Any) -> int:
    return int(array.data_ptr() if isinstance(array, Tensor) else array.ctypes.data)


# -- arrays ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode, kind", [("r", "r--s"), ("c", "rw-p"), ("r+", "rw-s"), ("w+", "rw-s")])
def test_a_memmap_is_mapped_again_as_it_was(mode: str, kind: str, file: Path) -> None:
    given = opened(file, mode, shape=(512, 512))
    found = trip(given)
    assert type(found) is np.memmap and found.mode == mode and found.filename == file
    assert np.array_equal(found, given) and found.flags.writeable == given.flags.writeable
    line, sizes = mapping_of(address(found))
    assert line.endswith(str(file)) and line.split()[1] == kind and sizes["Anonymous"] == 0
    assert address(found) != address(given)


@pytest.mark.parametrize("mode", ["r+", "w+"])
def test_writes_to_a_shared_map_reach_the_file_and_the_caller(mode: str, file: Path) -> None:
    given = opened(file, mode, shape=(10,))
    found = trip(given[2:4])
    found[:] = -1
    found.flush()
    assert given[:5].tolist()[2:4] == [-1, -1] and np.fromfile(file, np.float32)[2:4].tolist() == [-1, -1]


def test_writes_to_a_private_map_stay_where_they_were_made(file: Path) -> None:
    given = opened(file, "c")
    parcel = pack(given, mapped=True)
    one, other = unpack_again(parcel), unpack_again(parcel)
    one[:] = -1
    assert other[5] == given[5] == np.fromfile(file, np.float32)[5] == 5


VIEWS: dict[str, Callable[[np.memmap], np.ndarray]] = {
    "rows": lambda x: x[3:7],
    "columns": lambda x: x[:, 10:20],
    "steps": lambda x: x[1::5, ::3],
    "backwards": lambda x: x[::-1, ::-2],
    "turned": lambda x: x.T[4:],
    "repeated": lambda x: np.broadcast_to(x[0], (3, x.shape[1])),
    "bytes": lambda x: x.view(np.uint8)[2:, 1:7],
    "records": lambda x: x.view([("a", "<f4"), ("b", "<i4")])[4],
    "plain": lambda x: np.asarray(x)[100:],
    "single": lambda x: x[3:4, 5].reshape(()),
    "buffer": lambda x: np.frombuffer(memoryview(x._mmap), np.float32)[7:90],  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("offset", [0, 4096 + 64])
def test_views_of_a_memmap_travel_as_their_place_too(
    view: Callable[[np.memmap], np.ndarray], offset: int, file: Path
) -> None:
    given = view(opened(file, offset=offset, shape=(200, 1000)))
    found = trip(given)
    assert found.tobytes() == given.tobytes() and found.dtype == given.dtype and type(found) is type(given)
    assert found.strides == given.strides and mapping_of(address(found))[0].endswith(str(file))


def test_views_of_one_private_map_stay_views_of_one(file: Path) -> None:
    given = opened(file, "c")
    found = trip({"all": given, "part": given[10:20], "tensor": torch.from_numpy(given)[15:]})
    found["all"][15] = -1
    assert found["part"][5] == found["tensor"][0] == -1


def test_a_private_map_that_was_written_to_is_copied(file: Path) -> None:
    given = opened(file, "c")
    given[100_000] = -1
    found = trip({"all": given}, most=SIZE)["all"]
    assert found[100_000] == -1 and np.array_equal(found, given) and type(found) is np.memmap
    found[3] = -3
    assert given[3] == 3 and np.fromfile(file, np.float32)[100_000] == 100_000
    assert trip(given[:50_000])[49_999] == 49_999, "the pages of this part are the file's"


def test_maps_are_copied_where_the_system_does_not_say_what_was_written(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "/proc/self/pagemap":
            raise PermissionError(name)
        return open(name, *args, **kwargs)

    monkeypatch.setattr(mappings, "open", refusing, raising=False)
    assert copied(pack(opened(file), mapped=True)) == 0, "a shared map is what its file is"
    assert copied(pack(opened(file, "c"), mapped=True)) == SIZE


def test_what_arithmetic_leaves_of_a_memmap_is_copied_once_beside_the_message() -> None:
    given = NUMBERS.view(np.memmap)
    parcel = pack(given)
    assert parcel.bulk == given.nbytes and len(parcel.pickled) < 2000
    found = unpack(parcel)
    assert type(found) is np.memmap and np.array_equal(found, given)


def test_messages_are_values_of_their_moment(file: Path) -> None:
    given = opened(file, "r+")
    shared = torch.zeros(SIZE).share_memory_()
    parcel = pack([given, shared])
    given[0], shared[0] = -1, -1
    found = unpack(parcel)
    assert found[0][0] == 0 and found[1][0] == 0


def test_arrays_in_shared_memory_stay_shared() -> None:
    given = np.frombuffer(RawArray("f", SIZE // 4), np.float32)
    found = trip(given[10:])
    found[0] = 7
    assert given[10] == 7


def test_anonymous_shared_memory_is_copied() -> None:
    given = np.frombuffer(mmap.mmap(-1, SIZE), np.uint8)
    assert np.array_equal(trip(given[5:], most=SIZE), given[5:])


# -- tensors -----------------------------------------------------------------------------------------------


def read_only(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings(action="ignore"):
        return torch.from_numpy(array)


def from_numpy(path: Path) -> Tensor:
    NUMBERS.tofile(path)
    return torch.from_numpy(opened(path, "c"))


def loaded(path: Path) -> Tensor:
    torch.save({"x": torch.from_numpy(NUMBERS), "y": torch.ones(3)}, path)
    return torch.load(path, mmap=True)["x"]  # type: ignore[no-any-return]


def from_safetensors(path: Path) -> Tensor:
    save_file({"x": torch.from_numpy(NUMBERS)}, path)
    return load_file(path)["x"]


def from_file(path: Path) -> Tensor:
    NUMBERS.tofile(path)
    return torch.from_file(str(path), shared=False, size=len(NUMBERS))


def from_file_shared(path: Path) -> Tensor:
    NUMBERS.tofile(path)
    return torch.from_file(str(path), shared=True, size=len(NUMBERS))


PRIVATE = [from_numpy, loaded, from_safetensors, from_file]


@pytest.mark.parametrize("make", [*PRIVATE, from_file_shared])
def test_tensors_in_files_are_mapped_from_there(make: Callable[[Path], Tensor], tmp_path: Path) -> None:
    given = make(tmp_path / "file")
    found = trip({"all": given, "half": given[::2], "array": given.numpy()[5:]})
    assert torch.equal(found["all"], given) and torch.equal(found["half"], given[::2])
    assert found["array"][0] == 5
    assert all(mapping_of(address(value))[0].endswith("file") for value in found.values())
    found["all"][0] = -1
    assert found["half"][0] == -1, "tied as they were"
    assert given[0] == (-1 if make is from_file_shared else 0)


@pytest.mark.parametrize("make", PRIVATE)
def test_tensors_in_files_that_were_written_to_are_copied(
    make: Callable[[Path], Tensor], tmp_path: Path
) -> None:
    given = make(tmp_path / "file")
    given[7] = -1
    assert torch.equal(trip(given, most=SIZE), given)


def test_a_tensor_of_a_read_only_map_is_read_from_there(file: Path) -> None:
    given = read_only(opened(file))
    assert torch.equal(trip(given[9:]), given[9:])


def test_shared_tensors_stay_shared() -> None:
    given = torch.zeros(SIZE).share_memory_()
    found = trip([given[3:], given])
    found[0][0] = 7
    given[4] = 8
    assert given[3] == found[1][3] == 7 and found[0][1] == 8


OTHER_STRATEGY = """
import torch
from tests.unit.engines.local.test_file_mappings import SIZE, trip
torch.multiprocessing.set_sharing_strategy("file_system")
given = torch.zeros(SIZE).share_memory_()
found = trip(given[3:])
found[0] = 7
assert given[3] == 7
"""


def test_tensors_shared_by_a_named_file_stay_shared() -> None:
    done = run_ready(["-c", OTHER_STRATEGY], timeout=100)
    assert done.returncode == 0, done.stderr


def test_descriptors_are_few_even_with_many_shared_tensors() -> None:
    given = [torch.full((INLINE,), number).share_memory_() for number in range(mappings.MOST_DESCRIPTORS + 9)]
    parcel = pack(given, mapped=True)
    assert len(parcel.fds) == mappings.MOST_DESCRIPTORS + 1 and copied(parcel) == 9 * INLINE * 8
    assert [int(tensor[-1]) for tensor in unpack(parcel)] == list(range(len(given)))


# -- what is trained -----------------------------------------------------------------------------------------


def test_every_learner_has_a_shared_model_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300))
    model.share_memory()
    loose = torch.zeros(300, requires_grad=True)
    loose.detach().share_memory_()
    found, weight, other = trip([model, model[0].weight.detach(), loose], most=400_000)
    assert torch.equal(found[0].weight, model[0].weight)
    with torch.no_grad():
        for tensor in [*found.state_dict().values(), other]:
            tensor.fill_(9)
    assert bool((weight == 9).all()), "still tied"
    assert not any(bool((tensor == 9).any()) for tensor in [*model.state_dict().values(), loose])


def test_a_models_tensors_are_its_own_also_where_they_come_before_it() -> None:
    model = nn.Linear(300, 300)
    model.share_memory()
    weight, found = trip([model.weight.detach(), model], most=400_000)
    weight.fill_(9)
    assert bool((found.weight == 9).all()) and not bool((model.weight == 9).any())


def test_a_model_in_a_file_is_mapped_from_there_until_it_is_trained(tmp_path: Path) -> None:
    torch.save(nn.Linear(300, 300).state_dict(), tmp_path / "model.pt")
    before = (tmp_path / "model.pt").read_bytes()
    model = nn.Linear(300, 300)
    model.load_state_dict(torch.load(tmp_path / "model.pt", mmap=True), assign=True)
    found = trip(model)
    optimizer = torch.optim.SGD(found.parameters(), lr=0.1)
    found(torch.ones(2, 300)).sum().backward()
    optimizer.step()
    assert not torch.equal(found.weight, model.weight)
    assert (tmp_path / "model.pt").read_bytes() == before


def test_a_model_in_a_read_only_map_can_be_trained(file: Path) -> None:
    model = nn.Linear(512, 512, bias=False)
    model.weight.data = read_only(opened(file, shape=(512, 512)))
    found = trip(model, most=SIZE)
    with torch.no_grad():
        found.weight.fill_(1)


def test_lazy_and_meta_modules_go_round() -> None:
    found = trip([nn.LazyLinear(3), nn.Linear(3, 3, device="meta")], most=INLINE)
    assert found[0](torch.ones(1, 2)).shape == (1, 3) and found[1].weight.device.type == "meta"


# -- files that change -------------------------------------------------------------------------------------


def test_a_deleted_file_is_still_mapped(file: Path) -> None:
    given = opened(file)
    before = open_descriptors()
    file.unlink()
    parcel = pack(given[10:], mapped=True)
    assert copied(parcel) == 0 and len(parcel.fds) == 1
    found = unpack_again(parcel)
    assert np.array_equal(found, NUMBERS[10:])
    parcel.close(), parcel.close()
    del found
    assert open_descriptors() == before


def test_a_file_in_the_place_of_a_deleted_one_is_not_taken_for_it(file: Path) -> None:
    given, tensor = opened(file), torch.from_file(str(file), shared=False, size=len(NUMBERS))
    file.unlink()
    np.zeros_like(NUMBERS).tofile(file)
    found = trip([given, tensor])
    assert np.array_equal(found[0], NUMBERS) and np.array_equal(found[1].numpy(), NUMBERS)


def test_a_file_with_the_name_that_the_system_shows_is_not_taken_for_a_deleted_one(file: Path) -> None:
    given = opened(file)
    file.unlink()
    np.zeros_like(NUMBERS).tofile(f"{file} (deleted)")
    assert np.array_equal(trip(given, most=SIZE), NUMBERS)


@pytest.mark.parametrize("name", ["a b ", "a\nb", "a\rb", "a\\012b", "a (deleted)", "ä", b"\xff"])
def test_files_of_any_name_are_mapped(name: str | bytes, file: Path) -> None:
    given = opened(file.rename(file.parent / os.fsdecode(name)))
    assert np.array_equal(trip(given), NUMBERS)


def test_a_deleted_file_that_nobody_holds_open_is_copied(file: Path) -> None:
    given = torch.from_file(str(file), shared=False, size=len(NUMBERS))
    file.unlink()
    assert np.array_equal(trip(given, most=SIZE).numpy(), NUMBERS)


def rewritten(file: Path) -> None:
    os.utime(file, ns=(1, 1))


def replaced(file: Path) -> None:
    NUMBERS.tofile(file.with_suffix(".new"))
    file.with_suffix(".new").rename(file)


CHANGES: list[tuple[Callable[[Path], object], str]] = [
    (Path.unlink, r"numbers.bin, mapped by the caller: No such file or directory; keep the file until"),
    (lambda file: os.truncate(file, 4096), r"has 4,096 bytes of 1,048,576; keep the file"),
    (rewritten, r"numbers.bin, mapped by the caller, has changed since the run began; keep"),
    (replaced, r"is another file by now; keep"),
]


@pytest.mark.parametrize("change, words", CHANGES)
@pytest.mark.parametrize("mode", ["r", "c"])
def test_a_file_that_changes_after_packing_is_an_error(
    change: Callable[[Path], object], words: str, mode: str, file: Path
) -> None:
    parcel = pack(opened(file, mode), mapped=True)
    change(file)
    before = open_descriptors()
    with pytest.raises(RunError, match=words) as caught:
        unpack(parcel)
    assert "\n" not in str(caught.value) and open_descriptors() == before


def test_a_file_that_learners_write_to_may_change(file: Path) -> None:
    parcel = pack([opened(file, "r+"), opened(file, "r")], mapped=True)
    first = unpack_again(parcel)
    first[0][0] = -1
    rewritten(file)
    assert [array[0] for array in unpack(parcel)] == [-1, -1]


@pytest.mark.parametrize("left", [0, 4096, 5000])
@pytest.mark.parametrize("mode", ["r", "c"])
def test_a_file_that_was_cut_is_refused(left: int, mode: str, file: Path) -> None:
    given = opened(file, mode)
    os.truncate(file, left)
    with pytest.raises(UsageError, match=rf"numbers.bin, .* was cut .*: {SIZE - left:,} bytes are missing"):
        pack(given, mapped=True)
    if left == 5000:
        assert trip(given[: 4096 // 4])[100] == 100


def test_packing_and_unpacking_leave_no_descriptors_behind(file: Path) -> None:
    before = open_descriptors()
    parcel = pack([opened(file), torch.zeros(SIZE).share_memory_(), torch.zeros(SIZE)], mapped=True)
    found = unpack_again(parcel)
    parcel.close()
    del found
    assert open_descriptors() == before


def test_a_plain_pickle_of_what_came_is_whole(file: Path) -> None:
    found = trip(opened(file)[100:])
    assert np.array_equal(pickle.loads(pickle.dumps(found)), NUMBERS[100:])


def test_messages_that_map_nothing_do_not_read_the_list_of_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has thousands of lines: reading it for each message was most of what a short run did."""

    def read() -> list[Any]:
        raise AssertionError

    monkeypatch.setattr(mappings, "_ranges", read)
    parcel = pack([torch.zeros(SIZE), NUMBERS, "a word"])
    parcel.close()
