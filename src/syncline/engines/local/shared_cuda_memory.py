"""Memory of a card that processes share, the order of their work on it (CUDA IPC), and losses that it writes by itself.

Its owner has it from the driver, others map it; both see it as a tensor. What a process had on the card goes with it. Orders are
events on streams: no host waits for another's copies, nor for a loss. Not responsible for what lies there, nor for who may look.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from syncline.engines.local.shared_memory import Region, SharedWords
from syncline.errors import RunError

RECORD = 16  # words of a handle's record: its length, then the handle
OUT_OF_MEMORY = 2
MEMORY, EVENT = 0, 1  # handles of a lane: its block, its learner; of a shelf: its block, its shards
LOSSES = 4096  # bytes of losses on their way, of one learner and table
ROOM = LOSSES // 16  # tickets whose losses these are
PATIENCE = 5.0  # seconds; a learner that is gone leaves a loss unsaid
_NOT_YET = 0x7FF8DEAD00000001  # the bits of a value that is on its way: no computation gives them


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_byte * 64),)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, what: str) -> None:
    if code == OUT_OF_MEMORY:
        raise RunError(f'the card has no room for {what}; table_device="cpu" keeps the table beside the card')
    if code:
        raise RunError(f'CUDA error {code} for {what}; table_device="cpu" keeps the table beside the card')


class CardMemory:
    """A block of a card's memory, this process's own or, by its handle, another's."""

    def __init__(self, device: str, nbytes: int, what: str, handle: bytes | None = None) -> None:
        self._device, self._nbytes, self._owns = torch.device(device), nbytes, handle is None
        self._address = ctypes.c_uint64()
        torch.cuda.set_device(self._device)
        torch.zeros(1, device=self._device)  # the driver needs this device's context
        what = f"{nbytes / 2**20:,.1f} MiB of {what}"
        address = ctypes.byref(self._address)
        if handle is None:
            _check(_driver().cuMemAlloc_v2(address, ctypes.c_size_t(nbytes)), what)
        else:
            found = _Handle.from_buffer_copy(handle)
            _check(_driver().cuIpcOpenMemHandle_v2(address, found, ctypes.c_uint(1)), what)

    def handle(self) -> bytes:
        handle = _Handle()
        _check(_driver().cuIpcGetMemHandle(ctypes.byref(handle), self._address), "a handle of its memory")
        return bytes(handle)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = (self._address.value, False)
        return {"shape": (self._nbytes,), "typestr": "|u1", "data": data, "version": 3}

    def tensor(self) -> Tensor:
        """Its bytes; the block lives as long as a tensor looks at it."""
        return torch.as_tensor(self, device=self._device)

    def __del__(self) -> None:
        if self._address.value:
            driver = _driver()
            (driver.cuMemFree_v2 if self._owns else driver.cuIpcCloseMemHandle)(self._address)


class Handles:
    """Records in shared memory through which handles are passed on: each is written once, by one process."""

    def __init__(self, region: Region, offset: int) -> None:
        self._cells = SharedWords(region, offset // 8)
        self._events: dict[int, torch.cuda.Event] = {}  # of others, opened

    @staticmethod
    def nbytes(count: int) -> int:
        return 8 * RECORD * count

    def put(self, index: int, handle: bytes) -> None:
        self._cells.write(index * RECORD + 1, handle)
        self._cells.store(index * RECORD, len(handle))

    def get(self, index: int) -> bytes | None:
        length = self._cells.load(index * RECORD)
        return self._cells.read(index * RECORD + 1, length) if length else None

    def event(self, index: int, device: torch.device) -> torch.cuda.Event | None:
        """Another process's; None: it has not begun."""
        if index not in self._events and (handle := self.get(index)) is not None:
            self._events[index] = torch.cuda.Event.from_ipc_handle(device, handle)
        return self._events.get(index)

    def clear(self, count: int) -> None:
        for index in range(count):
            self._cells.store(index * RECORD, 0)


def share(
    handles: Handles, device: str, nbytes: int, what: str, *, owner: bool, check: Callable[[], None] | None
) -> Tensor:
    """A block that its owner makes and the others map, as soon as they hear of it; meanwhile they `check` whether it lives."""
    if owner:
        memory = CardMemory(device, nbytes, what)
        memory.tensor().zero_()
        torch.cuda.current_stream().synchronize()
        handles.put(MEMORY, memory.handle())
        return memory.tensor()
    while (handle := handles.get(MEMORY)) is None:
        if check is not None:
            check()
        time.sleep(0.001)
    return CardMemory(device, nbytes, what, handle).tensor()


class StreamOrder:
    """This process's work on a card, so that others' comes after it, and theirs before its own: on streams alone."""

    def __init__(self, device: str, handles: Handles, index: int) -> None:
        self._device = torch.device(device)
        with torch.cuda.device(self._device):
            self._event = torch.cuda.Event(interprocess=True)
            self._event.record()
        handles.put(index, self._event.ipc_handle())
        self._index = torch.cuda.current_device() if self._device.index is None else self._device.index
        self._raw = -1
        self._stream: torch.cuda.Stream

    def _current(self) -> torch.cuda.Stream:
        """Torch makes an object at each look: that takes longer than to record an event."""
        if (raw := torch._C._cuda_getCurrentRawStream(self._index)) != self._raw:
            self._raw, self._stream = raw, torch.cuda.current_stream(self._device)
        return self._stream

    def signal(self) -> None:
        """All that was begun here is done before what others begin after they hear of it."""
        self._event.record(self._current())

    def after(self, handles: Handles, indices: Sequence[int]) -> None:
        """What they have signalled is done before what is begun here from now on."""
        stream = self._current()
        for index in indices:
            if (event := handles.event(index, self._device)) is not None:
                stream.wait_event(event)


class LateLosses:
    """Losses that a GPU writes into shared memory after the note of their gradient: both ends of a page that the learner locks for it.

    A learner says of which ticket a loss is, and has its card copy the value behind that; the leading shard looks whether it has come.
    """

    def __init__(self, region: Region, offset: int) -> None:
        first = offset // 8
        self._tickets = region.words[first : first + ROOM]
        self._bits = region.words[first + ROOM : first + 2 * ROOM]
        self.page = region.tensor()[offset : offset + LOSSES]
        self._values = self.page[LOSSES // 2 :].view(torch.float64)
        self._unread: deque[LateLoss] = deque()

    def write(self, number: int, loss: Tensor) -> None:
        """The learner's: this ticket's, when the card has it."""
        place = number % ROOM
        if self._bits[place] == _NOT_YET:  # the card is as many steps behind as there is room for
            torch.cuda.current_stream(loss.device).synchronize()
        self._bits[place] = _NOT_YET
        self._tickets[place] = number + 1
        self._values[place].copy_(loss.detach().reshape(()).double(), non_blocking=True)

    def of(self, number: int, said: float) -> float | LateLoss:
        """The shard's: what was said with the ticket, or what comes later."""
        while self._unread and self._unread[0].come():
            self._unread.popleft()
        if self._tickets[number % ROOM] != number + 1:
            return said
        self._unread.append(LateLoss(self, number))
        return self._unread[-1]

    def look(self, number: int) -> float | None:
        """None: it is on its way."""
        place = number % ROOM
        if self._tickets[place] != number + 1:
            return float("nan")
        return None if self._bits[place] == _NOT_YET else self._values[place].item()


class LateLoss:
    """A number, from when it is needed on."""

    def __init__(self, losses: LateLosses, number: int) -> None:
        self._losses, self._number = losses, number
        self._value: float | None = None

    def come(self) -> bool:
        if self._value is None:
            self._value = self._losses.look(self._number)
        return self._value is not None

    def __float__(self) -> float:
        deadline = time.monotonic() + PATIENCE
        while not self.come() and time.monotonic() < deadline:
            time.sleep(0.0002)
        return float("nan") if self._value is None else self._value
