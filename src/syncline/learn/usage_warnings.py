"""Warn of what a learner's loop hardly means, once: a plain optimizer's steps, batches of a DataLoader beside the session's loaders,
weights that are written to between two steps, losses that are not finite. The recorder shows the warnings.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Container, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import Dataset, Subset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from syncline import messages as m

_NORMED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WATCH: ContextVar[Watch | None] = ContextVar("watch", default=None)  # of the learner that runs here
_hooked = False
LOOK = 1000  # steps
FEEDS = 3  # steps in a row that batches of one DataLoader feed


class Loop(Protocol):
    """What a watch sees of its learner's session."""

    loaders: list[Any]

    @property
    def most_steps(self) -> int: ...


class Watch:
    """Watch one learner's loop; `tell` reports a warning, `owned` are the parameters in tables, by identity."""

    def __init__(self, rank: int, tell: Callable[[Any], None], owned: Container[int], loop: Loop) -> None:
        self._rank, self._tell, self._owned, self._loop = rank, tell, owned, loop
        self._fetched: dict[
            int, tuple[int, int]
        ] = {}  # DataLoader, by its data -> (steps before its last batch, steps it fed)
        self._said: set[str] = set()
        self.shared: list[Optimizer] = []  # those of the tables, and those that these run
        self.steps = 0  # of tables
        self.outer: list[int] = []  # steps of tables before each optimizer that is stepping now
        self._looked: tuple[int, int | None] = (0, -1)  # step and epoch of the last loss on a card
        self._alone = ""  # a plain optimizer that stepped before there was a table
        global _hooked
        if not _hooked:  # once in a process; outside learners the hooks do nothing
            _hooked = True
            register_optimizer_step_pre_hook(_before)
            register_optimizer_step_post_hook(_after)
            _BaseDataLoaderIter.__next__ = _fetch  # type: ignore[assignment, method-assign]
        _WATCH.set(self)

    def warn(self, cause: str, text: str) -> None:
        if cause not in self._said:
            self._said.add(cause)
            self._tell(m.Warned(f"learner {self._rank}: {text}", cause))

    def fetched(self, batches: _BaseDataLoaderIter) -> None:
        """Warn of a DataLoader whose batches feed one step after the other: every learner that has it reads all of its data.

        Batches for a validation are none of these: gradients are off, or many steps lie between two of its loops.
        """
        if self._loop.loaders or not torch.is_grad_enabled():
            return
        data, steps = batches._dataset, self._loop.most_steps
        before, fed = self._fetched.get(id(data), (steps, 0))
        fed = fed + steps - before if steps - before <= 1 else 0
        self._fetched[id(data)] = steps, fed
        if fed == FEEDS:
            size = getattr(batches._index_sampler, "batch_size", None)
            text = (
                f"trains on batches of a DataLoader, and so does another learner on the same data: each of them reads all of it. Give "
                f"each example to one learner: for batch in session.loader(dataset, batch_size={size or '…'})"
            )
            mark = self._rank, _identity_of(data, batches)
            self._tell(m.Warned(f"learner {self._rank}: {text}", "data", mark))

    def close(self) -> None:
        """Its function is over."""
        _WATCH.set(None)
        if self._alone and not self.shared:
            self.warn(
                "plain",
                f"stepped a plain {self._alone} and opened no table: every learner has trained a model of its own, and the "
                "result has none. Make the optimizer with session.optimizer(model, factory)",
            )

    def not_finite(self, value: float, step: int, epoch: int | None) -> None:
        """The loss of a gradient, as the loop says it."""
        self.warn("loss", not_finite(f"its step {step + 1}", epoch, value))

    def loss_on_card(self, loss: Tensor, step: int, epoch: int | None) -> None:
        """The same once an epoch, or in many steps: each look waits for the card."""
        if epoch != self._looked[1] or step >= self._looked[0] + LOOK:
            self._looked = step, epoch
            if not math.isfinite(value := loss.item()):
                self.not_finite(value, step, epoch)

    def stepped_plain(self, optimizer: Optimizer) -> None:
        """One that is no table's, nor around one."""
        kind = type(optimizer).__name__
        if not self.shared:
            self._alone = kind
            return
        held = any(id(p) in self._owned for group in optimizer.param_groups for p in group["params"])
        lost = "parameters of a table, which the next read overwrites" if held else "this learner's own copy"
        self.warn(
            "plain",
            f"steps a plain {kind} beside session.optimizer's: what it changes is {lost}. Make it with "
            "session.optimizer(model, factory)",
        )


def _identity_of(data: Dataset[Any], batches: _BaseDataLoaderIter) -> str:
    """Return a text that learners have alike where they read the same data: parts of it, or samplers by rank, differ."""
    sampler = getattr(batches._index_sampler, "sampler", batches._index_sampler)
    parts = [str(getattr(sampler, "rank", "")), str(list(getattr(sampler, "indices", ())))]
    while isinstance(data, Subset):
        parts.append(str(list(data.indices)))
        data = data.dataset
    length = len(data) if hasattr(data, "__len__") else ""
    return f"{type(data).__qualname__} {length} {zlib.crc32(' '.join(parts).encode())}"


_next_batch = _BaseDataLoaderIter.__next__


def _fetch(batches: _BaseDataLoaderIter) -> Any:
    batch = _next_batch(batches)
    if (watch := _WATCH.get()) is not None:
        watch.fetched(batches)
    return batch


def not_finite(of: str, epoch: int | None, loss: float) -> str:
    """Return the warning of such a loss; `epoch` counts from 0, its text from 1."""
    when = f" in epoch {epoch + 1}" if epoch is not None else ""
    return (
        f"the loss of {of}{when} is {loss}, and the weights may be lost with it. A smaller rate, clip_norm= or a look at the "
        "data may help; this is said once"
    )


def hooked(optimizer: Optimizer) -> bool:
    """Somebody else wants to know of its steps."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return True
    return len(_global_optimizer_pre_hooks) > 1 or len(_global_optimizer_post_hooks) > 1


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if (watch := _WATCH.get()) is not None:
        if any(optimizer is each for each in watch.shared):
            watch.steps += 1
        watch.outer.append(watch.steps)


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """A step of something that stepped no table: not one of ours, nor something around it."""
    watch = _WATCH.get()
    if watch is None or not watch.outer or watch.outer.pop() != watch.steps:
        return
    if all(optimizer is not each for each in watch.shared):
        watch.stepped_plain(optimizer)


class Untouched:
    """Parameters that only reads may change.

    Writes count up their versions; those through `.data` do not, and are seen by norms, which are compared after 1, 2, 4, 8 …
    steps.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], names: Sequence[str], watch: Watch) -> None:
        self._parameters, self._names, self._watch = parameters, names, watch
        self._normed = [i for i, p in enumerate(parameters) if p.dtype in _NORMED and p.numel()]
        self._versions: list[int] = []
        self._norms: list[Tensor] | None = None

    def note(self, steps: int) -> None:
        """As they are after so many steps."""
        self._versions = [parameter._version for parameter in self._parameters]
        self._norms = self._measure() if steps & (steps - 1) == 0 else None

    def look(self) -> None:
        """Warn of one that the loop has written to since: that is in no gradient."""
        versions = [parameter._version for parameter in self._parameters]
        if versions == self._versions and self._norms is None:
            return
        versioned = zip(self._names, versions, self._versions, strict=True)
        changed = [name for name, now, before in versioned if now != before]
        norms, self._norms = self._norms, None
        if norms and not changed:
            for before, after in zip(norms, self._measure(), strict=True):
                differ = (before != after) & ~(before.isnan() & after.isnan())
                if bool(differ.any()):
                    changed.append(self._names[self._normed[int(differ.nonzero()[0, 0])]])
        if changed:
            self._watch.warn(
                "written",
                f"'{changed[0]}' was changed in place between two steps: with servers that is lost at the next read. "
                "session.put(model) after it makes it global; over topology='allreduce' it stays",
            )

    @torch.no_grad()
    def _measure(self) -> list[Tensor]:
        """The largest of each, which a clamp changes, and the length, which all else does."""
        held = [self._parameters[index].detach() for index in self._normed]
        if not held:
            return []
        device = held[0].device
        found = [torch._foreach_norm(held, order) for order in (math.inf, 2.0)]
        return [torch.stack([each.double().to(device) for each in norms]).cpu() for norms in found]
