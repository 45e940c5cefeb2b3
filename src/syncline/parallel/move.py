"""Moves between the processes of a group: one all-to-all that carries exactly what `windows` says, with its mirror.

Gloo carries tensors of CPUs, and those of GPUs through the host; NCCL carries those of GPUs. Not responsible for
making or watching the process group: whoever calls hands one over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from syncline.errors import UsageError
from syncline.parallel.windows import Box, Route, route

Arriving = Callable[[], Tensor]


class Group:
    """Processes that hold one model together. `group` is torch's, plain or registered; None for one process alone."""

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.rank: int = group.rank() if group is not None else 0
        self.size: int = group.size() if group is not None else 1
        self._direct = group is not None and "nccl" in group.name().lower()

    def exchange(self, send: Tensor, sent: list[int], received: list[int]) -> Arriving:
        """Start an all-to-all of so many numbers to and from each rank; call what it returns to wait for what arrives."""
        device, staged = send.device, send.is_cuda and not self._direct
        source = send.cpu() if staged else send
        buffer = torch.empty(sum(received), dtype=send.dtype, device=source.device)
        with self.guard():
            work = self._group.alltoall_base(buffer, source, received, sent)

        def arrived(_kept: Tensor = source) -> Tensor:  # what is sent stays until it has left
            self.finish(work)
            return buffer.to(device)

        return arrived

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Around what others take part in: who watches their processes is told that it failed, before the caller is."""
        try:
            yield
        except RuntimeError:
            self.broken()
            raise

    def broken(self) -> None:
        """Somebody is gone."""

    def finish(self, work: Any) -> None:
        """Wait for one of torch's collectives."""
        with self.guard():
            work.wait()

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, the same in each; differentiable."""
        summed: Tensor = tensor if self.size == 1 else _Total.apply(self, tensor)
        return summed

    def add(self, tensor: Tensor) -> Tensor:
        """`total` without autograd, into a new tensor."""
        if self.size == 1:
            return tensor.clone()
        staged = tensor.is_cuda and not self._direct
        buffer = tensor.detach().cpu() if staged else tensor.detach().clone()
        buffer = buffer.contiguous()
        with self.guard():
            work = self._group.allreduce([buffer])
        self.finish(work)
        return buffer.to(tensor.device)


@dataclass(frozen=True, slots=True)
class Joined:
    """The group that this process is in."""

    group: Group
    plan: Any = None  # of the run
    seed: int = 0  # of what is dropped


_here: list[Joined] = []


def join(group: Joined | None) -> None:
    """This process is one of it from here on; of none, with None."""
    _here[:] = [group] if group is not None else []


def joined() -> Joined | None:
    """The group that this process has joined, if there is one."""
    return _here[0] if _here else None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, tensor: Tensor) -> Tensor:
        ctx.group = group
        return group.add(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, ctx.group.add(gradients[0])


class Move:
    """One array's way from those who own it to those who want it; called with the tensors that this process owns.

    `owns` and `wants` are boxes by rank. Owned windows that overlap are copies of one value, or with `sums` parts that
    are added. Each wanted window comes as a tensor, filled with its `pads` outside of the array. In backward the
    gradients of all wanted windows are added on their way back; with `shared` every process has the same gradient of
    the same values (each computes one loss from all of it), and it counts once. Who owns nothing owns an empty box.
    """

    def __init__(
        self,
        group: Group,
        shape: Sequence[int],
        owns: Sequence[Sequence[Box]],
        wants: Sequence[Sequence[Box]],
        *,
        pads: Sequence[float] = (),
        sums: bool = False,
        shared: bool = False,
    ) -> None:
        self.group, self.sums, self.shared = group, sums, shared
        self.route: Route = route(shape, owns, wants, sums=sums)
        self.owned, self.wanted = tuple(owns[group.rank]), tuple(wants[group.rank])
        self.pads = tuple(pads) or (0.0,) * len(self.wanted)
        self._moves = self.route.moved > 0
        if not shared:
            return
        for own in self.owned:
            if own.size and not any(own.meet(want) == own for want in self.wanted):
                raise UsageError(f"a shared gradient of {own} has to be wanted where it is owned")
        # places whose shared gradient enters here: of copies, in the first process that has one
        self.counted = list(self.owned)
        for box in (box for boxes in owns[: group.rank] for box in boxes if not sums):
            self.counted = [rest for part in self.counted for rest in part.minus(box)]

    def __call__(self, *owned: Tensor) -> tuple[Tensor, ...]:
        return self.start(*owned).finish()

    def start(self, *owned: Tensor) -> Moving:
        """Send; what does not need the result can be computed before `finish`."""
        moving = Moving(self, owned)
        moving.token = _Start.apply(moving, *owned)
        return moving

    # -- what autograd calls -------------------------------------------------------------------------------

    def _ranks(self, *, up: bool) -> list[tuple[tuple[Box, ...], tuple[Box, ...]]]:
        """For each other rank the boxes sent to it and those received from it."""
        me, pieces = self.group.rank, self.route.pieces
        found = []
        for rank in range(self.group.size):
            there = pieces.get((me, rank), ()) if rank != me else ()
            back = pieces.get((rank, me), ()) if rank != me else ()
            found.append((there, back) if up else (back, there))
        return found

    def exchange(self, source: Sequence[tuple[Box, Tensor]], *, up: bool) -> Arriving | None:
        """Send from these buffers; backward sends what forward received."""
        if not self._moves:
            return None
        ranks = self._ranks(up=up)
        parts = [_gather(box, source).reshape(-1) for there, _ in ranks for box in there]
        send = torch.cat(parts) if parts else source[0][1].new_empty(0)
        sent, received = ([sum(box.size for box in boxes[way]) for boxes in ranks] for way in (0, 1))
        return self.group.exchange(send, sent, received)

    def arrived(self, buffer: Tensor, *, up: bool) -> list[tuple[Box, Tensor]]:
        """Received boxes as views of the buffer."""
        found, at = [], 0
        for _, back in self._ranks(up=up):
            for box in back:
                found.append((box, buffer[at : at + box.size].reshape(box.shape)))
                at += box.size
        return found

    def stays(self, source: Sequence[tuple[Box, Tensor]]) -> list[tuple[Box, Tensor]]:
        me = self.group.rank
        return [(box, _gather(box, source)) for box in self.route.pieces.get((me, me), ())]


class Moving:
    """A move under way."""

    token: Tensor

    def __init__(self, move: Move, owned: tuple[Tensor, ...]) -> None:
        for box, tensor in zip(move.owned, owned, strict=True):
            if tuple(tensor.shape) != box.shape:
                raise UsageError(
                    f"the owned window {box} has shape {list(box.shape)}, got {list(tensor.shape)}"
                )
        self.move, self.like = move, owned[0].detach().new_empty(0)
        self.local: list[tuple[Box, Tensor]] = []  # what stays here, either way
        self.arriving: Arriving | None = None

    def finish(self) -> tuple[Tensor, ...]:
        """The wanted windows."""
        found: tuple[Tensor, ...] = _Finish.apply(self, self.token)
        return found

    def take(self, *, up: bool) -> list[tuple[Box, Tensor]]:
        """Everything that came, from here and elsewhere; nothing of it is kept."""
        pieces, self.local = self.local, []
        if self.arriving is not None:
            pieces = pieces + self.move.arrived(self.arriving(), up=up)
            self.arriving = None
        return pieces


class _Start(torch.autograd.Function):
    """Send what is owned; in backward, receive its gradient."""

    @staticmethod
    def forward(ctx: Any, moving: Moving, *owned: Tensor) -> Tensor:
        ctx.moving, move = moving, moving.move
        source = list(zip(move.owned, (tensor.detach() for tensor in owned), strict=True))
        moving.local = move.stays(source)
        moving.arriving = move.exchange(source, up=True)
        return owned[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        moving: Moving = ctx.moving
        results = [moving.like.new_zeros(box.shape) for box in moving.move.owned]
        pieces = moving.take(up=False)
        for box, result in zip(moving.move.owned, results, strict=True):
            _put(pieces, box, result, add=True)
        return None, *results


class _Finish(torch.autograd.Function):
    """Receive what is wanted; in backward, send its gradient."""

    @staticmethod
    def forward(ctx: Any, moving: Moving, token: Tensor) -> tuple[Tensor, ...]:
        ctx.moving, move = moving, moving.move
        pieces = moving.take(up=True)
        results = []
        for box, pad in zip(move.wanted, move.pads, strict=True):
            result = moving.like.new_full(box.shape, pad)
            if move.sums:
                result[box.meet(Box.whole(move.route.shape)).inside(box)] = 0
            _put(pieces, box, result, add=move.sums)
            results.append(result)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        moving: Moving = ctx.moving
        move = moving.move
        source = list(zip(move.wanted, gradients, strict=True))
        if move.shared:  # each box from the first buffer that holds all of it
            moving.local = [
                (box, next(tensor[box.inside(outer)] for outer, tensor in source if outer.meet(box) == box))
                for box in move.counted
            ]
        else:
            moving.local = move.stays(source)
            moving.arriving = move.exchange(source, up=False)
        return None, moving.like.new_empty(0)


def _gather(box: Box, source: Sequence[tuple[Box, Tensor]]) -> Tensor:
    """A box of the array: the sum of what the buffers have of it. Owned ones never overlap, gradients add up."""
    held = [(outer, tensor) for outer, tensor in source if outer.meet(box).size or not box.size]
    if len(held) == 1 and held[0][0].meet(box) == box:
        return held[0][1][box.inside(held[0][0])]
    result = source[0][1].new_zeros(box.shape)
    _put(held, box, result, add=True)
    return result


def _put(pieces: Sequence[tuple[Box, Tensor]], box: Box, result: Tensor, *, add: bool) -> None:
    for piece, tensor in pieces:
        common = piece.meet(box)
        if common.size:
            target, value = result[common.inside(box)], tensor[common.inside(piece)]
            if add:
                target += value
            else:
                target.copy_(value)
