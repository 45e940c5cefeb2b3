"""Frames over real sockets: from memory into memory, both directions at once, and what is refused."""

import socket
import threading
import tracemalloc
from collections.abc import Iterator

import pytest
import torch

from syncline.engines.local.shared_memory import Region
from syncline.engines.ray.bulk_connection import _HEAD, Connection, Frame, Head, Lost

RUN, OTHER = b"the run!", b"another!"
LARGE = 16 << 20


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy())


def nothing(head: Head) -> memoryview | None:
    return None


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    yield near, far
    near.close()
    far.close()


def connection(end: socket.socket, into=nothing, *, run: bytes = RUN, incarnation: int = 7) -> Connection:
    return Connection(end, run=run, incarnation=incarnation, into=into)


def drive(end: Connection, frames: int, into: list[Frame]) -> None:
    """Receive and send until both are done, as one thread does it."""
    while not end.flush() or len(into) < frames:
        if len(into) < frames and (frame := end.receive(0.001)) is not None:
            into.append(frame)


def test_a_body_goes_from_memory_into_memory_in_both_directions_at_once(ends) -> None:
    regions = [Region(LARGE) for _ in range(4)]
    ours, theirs, into_ours, into_theirs = (region.tensor() for region in regions)
    ours.random_(0, 255)
    theirs.random_(0, 255)
    near = connection(ends[0], lambda head: regions[2].bytes)
    far = connection(ends[1], lambda head: regions[3].bytes)
    near.send(1, bytes_of(ours), place=3)
    far.send(1, bytes_of(theirs), place=4)
    got: tuple[list[Frame], list[Frame]] = ([], [])
    threads = [
        threading.Thread(target=drive, args=(end, 1, found))
        for end, found in zip((near, far), got, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(into_theirs, ours) and torch.equal(into_ours, theirs)
    assert [frame.place for found in got for frame in found] == [4, 3]
    assert got[1][0].body.obj is regions[3].bytes.obj  # no copy: the very memory


def test_frames_arrive_in_their_order_with_kind_place_and_generation(ends) -> None:
    near, far = connection(ends[0]), connection(ends[1])
    for number in range(50):
        near.send(number, bytes([number]) * number, b"end", place=number * 2, generation=number * 3)
    for number in range(50):
        frame = far.receive()
        assert frame is not None
        assert (frame.kind, frame.place, frame.generation) == (number, number * 2, number * 3)
        assert bytes(frame.body) == bytes([number]) * number + b"end"
    assert far.receive(0) is None


def test_memory_may_be_used_again_when_its_frame_is_sent_and_nothing_is_copied_meanwhile(ends) -> None:
    body, place = bytearray(b"x" * LARGE), bytearray(LARGE)
    near, far = connection(ends[0]), connection(ends[1], lambda head: memoryview(place))
    tracemalloc.start()
    number = near.send(1, body)
    near.flush()
    assert not near.sent(number)  # nobody reads: it waits in its own memory
    reader = threading.Thread(target=far.receive)
    reader.start()
    near.wait_sent(number)
    reader.join()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert near.sent(number) and place == body
    assert peak < LARGE // 8


@pytest.mark.parametrize("other", [{"run": OTHER}, {"incarnation": 8}], ids=["run", "incarnation"])
def test_frames_of_another_are_discarded_and_counted_and_the_next_one_arrives(ends, other) -> None:
    end = ends[0]
    foreign, near, far = connection(end, **other), connection(end), connection(ends[1])
    foreign.send(1, b"void" * 1000)
    near.send(2, b"ours")
    frame = far.receive()
    assert frame is not None and frame.kind == 2 and bytes(frame.body) == b"ours"
    assert far.refused["foreign"] == 1


def test_frames_that_come_again_are_discarded_and_counted_and_missing_ones_end_the_connection(ends) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        elsewhere = socket.create_connection(server.getsockname())
        recorder, _ = server.accept()
    with elsewhere, recorder:
        near = connection(elsewhere)
        near.send(1, b"first")
        near.send(2, b"second")
        near.send(3, b"third")
        size = _HEAD.size
        first, second, third = (recorder.recv(size + length, socket.MSG_WAITALL) for length in (5, 6, 5))
    far = connection(ends[1])
    ends[0].sendall(first + first + second + first)
    assert [frame.kind for frame in (far.receive(), far.receive()) if frame] == [1, 2]
    assert far.receive(0.01) is None and far.refused["again"] == 2
    far = connection(ends[1])
    ends[0].sendall(first + third)
    far.receive()
    with pytest.raises(Lost, match="frames are missing"):
        far.receive()
    assert far.refused["garbage"] == 1


def test_garbage_ends_the_connection_and_is_counted(ends) -> None:
    far = connection(ends[1])
    ends[0].sendall(b"GET / HTTP/1.1\r\nHost: somewhere in the network, wherever\r\n\r\n")
    with pytest.raises(Lost, match="no frame"):
        far.receive()
    assert far.refused["garbage"] == 1
    assert ends[0].recv(1) == b""


def test_a_frame_larger_than_its_place_is_refused_before_its_body_is_read(ends) -> None:
    far = connection(ends[1], lambda head: memoryview(bytearray(10)))
    near = connection(ends[0])
    near.send(1, b"x" * 11)
    with pytest.raises(Lost, match="11 bytes where 10 belong"):
        far.receive()
    assert far.refused["oversized"] == 1


def test_a_frame_that_nobody_expects_may_be_small_only(ends) -> None:
    far = connection(ends[1])
    ends[0].sendall(_HEAD.pack(b"SL1", 1, RUN, 0, 7, 0, 0, 0, 1 << 60))
    with pytest.raises(Lost, match="1,152,921,504,606,846,976 bytes where 1,048,576 belong"):
        far.receive()


def test_an_end_within_a_frame_is_counted_as_truncated_and_one_between_frames_is_not(ends) -> None:
    far = connection(ends[1], lambda head: memoryview(bytearray(head.length)))
    near = connection(ends[0])
    near.send(1, b"whole")
    assert far.receive() is not None
    near.send(1, bytearray(100 << 20))
    near.close()  # in the middle
    with pytest.raises(Lost):
        far.receive()
    assert far.refused["truncated"] == 1


def test_an_end_between_frames_is_no_refusal(ends) -> None:
    far = connection(ends[1])
    ends[0].close()
    with pytest.raises(Lost, match="closed"):
        far.receive()
    assert far.refused.total() == 0


def test_whoever_waits_to_send_hears_that_the_other_is_gone(ends) -> None:
    near = connection(ends[0])
    number = near.send(1, bytearray(100 << 20))
    ends[1].close()
    with pytest.raises(Lost):
        near.wait_sent(number)
    with pytest.raises(Lost):
        near.send(2, b"more")


def test_whoever_waits_to_receive_hears_that_another_thread_has_closed(ends, monkeypatch) -> None:
    near = connection(ends[0])
    read = near._read_into

    def closes(view: memoryview) -> int:
        monkeypatch.undo()
        assert near._read_into == read
        near.close()
        raise BlockingIOError

    monkeypatch.setattr(near, "_read_into", closes)
    with pytest.raises(Lost):
        near.receive()
