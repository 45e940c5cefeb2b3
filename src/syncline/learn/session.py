"""What a learner's loop sees of a run, whatever the topology: `syncline.Session`, and what its optimizers have alike.

`ServerSession` (learn/server_session.py) publishes to servers, `AllReduceSession` (learn/allreduce_session.py) reduces with its equals.
"""

from __future__ import annotations

import contextlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from syncline import messages as m
from syncline.errors import LayoutError, UsageError
from syncline.learn.loader import POLICIES, identity, read_ahead
from syncline.learn.model_factories import refuse_unready, seed_random
from syncline.learn.usage_warnings import Watch
from syncline.ports import RunStopped
from syncline.roles.run_plan import Seat
from syncline.table.layout import Tensors
from syncline.table.optimizer_template import refuse_unsupported

Factory = Callable[..., torch.optim.Optimizer]
Collate = Callable[[list[Any]], Any] | None
UNSAID = float("nan")  # this very object: a loss that is not a number is another


class Session(ABC):
    """One learner's view of the run."""

    seat: int = 0  # of this process, among those of the learner
    seats: int = 1
    draws_as_one: bool = True  # torch's generator is in the same state in all seats
    loss: float | Tensor = UNSAID  # of the gradient that is being made, for the record
    _stops = 0  # how often the loop was unwound

    def __init__(self, port: Any, seat: Seat) -> None:
        self.port, self.reader, self.plan = port, seat.reader, seat.plan
        self.rank, self.learners = seat.rank, seat.plan.learners
        self.device = torch.device(seat.device)
        self.sync = self.plan.course.first  # as of the last read of any table
        self._tables: list[Any] = []
        self.loaders: list[Any] = []
        self._same: dict[tuple[Any, ...], Any] = {}  # loaders
        # parameters in tables, by identity: the names that their first table gave them
        self._owned: dict[int, str] = {}
        self.watch = Watch(self.rank, port.tell, self._owned, self)

    @property
    @abstractmethod
    def most_steps(self) -> int:
        """Return how many steps were made of the table that was stepped most."""

    def seed(self) -> None:
        """Rank 0 draws what a plain script draws after `torch.manual_seed(seed)`."""
        seed_random(self.plan.seed + self.rank)

    @property
    def epoch(self) -> int | None:
        """Return the epoch of the first loader, counted from 0."""
        return self.loaders[0].epoch if self.loaders else None

    @property
    @abstractmethod
    def ending(self) -> bool:
        """Return whether the run is to end, as planned or before."""

    @property
    @abstractmethod
    def full(self) -> bool:
        """Return whether all updates were made that the run is limited to."""

    def goes_on(self) -> bool:
        """Return whether there may be another batch; raise `RunStopped` where the run is stopped.

        A loader that merely ended would leave the loop over epochs running, with epochs that have no batches.
        """
        ending = self.ending  # once: the seats of a group agree on each answer
        if ending and not self.full:
            raise self.unwind()
        return not ending

    def unwind(self) -> RunStopped:
        """Return what unwinds the loop; the first two times are reported."""
        self._stops += 1
        if self._stops <= 2:
            self.port.left_loop(again=self._stops == 2)
        return RunStopped("the run was stopped")

    @contextlib.contextmanager
    def until_stopped(self) -> Iterator[None]:
        """Swallow what a stop raises, and the SystemExit of a script that catches it."""
        try:
            yield
        except RunStopped:
            return
        except SystemExit:
            if not self._stops:
                raise

    def optimizer(self, model: nn.Module, factory: Factory) -> TableOptimizer:
        """The shared state of this model's parameters, as a torch optimizer."""
        if not isinstance(model, nn.Module):
            raise UsageError(f"session.optimizer takes an nn.Module first, got {type(model).__name__}")
        refuse_sparse(model)
        inner = make_optimizer(model, factory)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        held = [id(parameter) for group in inner.param_groups for parameter in group["params"]]
        for parameter in held:
            if parameter in self._owned:
                raise LayoutError(
                    f"'{names.get(parameter, 'a parameter')}' is in two optimizers (the first calls it "
                    f"'{self._owned[parameter]}'): its updates would overwrite each other. Give each optimizer its own "
                    "parameters."
                )
        table = self._open_table(model, inner)
        self._owned.update((parameter, names.get(parameter, "a parameter")) for parameter in held)
        self._tables.append(table)
        return table

    @abstractmethod
    def _open_table(self, model: nn.Module, inner: torch.optim.Optimizer) -> TableOptimizer:
        """A new one, of the parameters that the user's own optimizer holds."""

    def loader(
        self,
        data: Dataset[Any],
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        policy: str = "ledger",
        collate: Collate = None,
        ahead: int | None = None,
    ) -> Any:
        """This learner's batches; iterate once per epoch. The same call again gives the same loader, another `collate` another.

        `ahead` batches are read by a thread, and copied to a GPU, before they are needed: none of tensors that lie on the
        learner's device, else two. Given again it holds from the next epoch on. `len` is the batches of an epoch that one loop sees: the same number in every learner,
        exact in lockstep and over all-reduce; elsewhere the mean over the learners, of which a fast one gets more.
        `global_batch_size` is that of all learners together, each takes its share.
        """
        check_data("session.loader's data", data)
        check_function("collate", collate)
        check_policy(policy)
        batches = self._batches(batch_size, global_batch_size)
        reads = read_ahead(data, ahead, self.device)
        key = (id(data), batches, policy, identity(collate))
        if key not in self._same:
            self._same[key] = self._open_loader(data, batches, policy, collate, reads)
        elif ahead is not None:
            self._same[key].ahead = reads
        return self._same[key]

    @abstractmethod
    def _batches(self, batch_size: int | None, joint: int | None) -> Any:
        """What a loader is opened with, from one of the two."""

    @abstractmethod
    def _open_loader(self, data: Any, batches: Any, policy: str, collate: Collate, ahead: int) -> Any: ...

    @abstractmethod
    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        """Backwards inside only add to `p.grad`: nothing is communicated before the one after it."""

    def put(self, model: nn.Module) -> None:
        """Make this learner's present values of the model global (M6)."""
        if not isinstance(model, nn.Module):
            raise UsageError(f"session.put takes an nn.Module, got {type(model).__name__}")
        own = {id(parameter) for parameter in model.parameters()}
        found = [table for table in self._tables if not own.isdisjoint(map(id, table.parameters))]
        if not found:
            raise UsageError("session.put: no optimizer of this session holds a parameter of that model")
        for table in found:
            table.put()

    def log(self, **metrics: float) -> None:
        """Metrics of this learner, for the run's record."""
        said: dict[str, Any] = metrics
        single = {key: v.item() for key, v in said.items() if isinstance(v, Tensor) and v.numel() == 1}
        self.port.tell(m.Log({**said, **single}))

    @abstractmethod
    def mean(self, value: float | Tensor) -> Any:
        """The mean of a number or tensor over all live learners; every learner must call it."""

    @abstractmethod
    def close(self) -> None:
        """The learner's function is over."""


class TableOptimizer(torch.optim.Optimizer):
    """What users step in place of `inner`, their own: with its groups, options and state."""

    def __init__(self, number: int, inner: torch.optim.Optimizer, tensors: Tensors) -> None:
        self.number, self.kind = number, type(inner)
        self.parameters, self._buffers = tensors.parameters, tensors.buffers
        super().__init__(inner.param_groups, dict(inner.defaults))
        self._opened = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "_opened" in self.__dict__:
            raise UsageError(
                "parameter groups cannot be added to a table that is open; give them to the optimizer's factory"
            )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none or torch.autograd._profiler_enabled():
            super().zero_grad(set_to_none)
            return
        for parameter in self.parameters:  # what torch's wrappers do costs a third of a small step
            parameter.grad = None


def make_optimizer(model: nn.Module, factory: Factory) -> torch.optim.Optimizer:
    """Run the user's factory on the model's parameters, or on the model where it asks for `model`."""
    refuse_unready(model)
    if next(iter(model.parameters()), None) is None:
        raise LayoutError(
            f"{type(model).__name__} has no parameters: there is nothing to train. "
            "Register layers as attributes, or parameters as nn.Parameter."
        )
    if not callable(factory):
        raise UsageError(
            f"the optimizer must be a callable that makes one, got {type(factory).__name__}; "
            "give a callable such as partial(torch.optim.SGD, lr=0.1)"
        )
    try:
        first = next(iter(inspect.signature(factory).parameters), None)
    except (TypeError, ValueError):
        first = None
    inner = factory(model if first == "model" else model.parameters())
    if not isinstance(inner, torch.optim.Optimizer):
        raise UsageError(
            f"the optimizer factory returned {type(inner).__name__}, not a torch.optim.Optimizer; "
            "give a callable such as partial(torch.optim.SGD, lr=0.1)"
        )
    refuse_unsupported(inner)
    vars(inner).setdefault("defaults", {})  # a wrapper may have none
    return inner


def refuse_sparse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise LayoutError(
                f"'{name}' is an embedding with sparse=True: sparse gradients do not travel; use sparse=False"
            )


def sparse_gradient() -> LayoutError:
    return LayoutError(
        "a parameter has a sparse gradient, which does not travel; make its layer with sparse=False"
    )


def copy_all(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


# -- what is given to sessions, `train` and studies ----------------------------------------------------------


def check_policy(policy: str) -> None:
    if policy not in POLICIES:
        raise UsageError(f"policy {policy!r} is none of {', '.join(POLICIES)}")


def check_function(name: str, given: Any) -> None:
    """Where a function may be given."""
    if isinstance(given, type) and issubclass(given, nn.Module):
        raise UsageError(f"{name} is the class {given.__name__}: give an instance, {given.__name__}()")
    if given is not None and not callable(given):
        raise UsageError(f"{name} must be a function, got {given!r}")


def as_data(name: str, data: Any) -> Any:
    """A data set; a tuple of tensors is a `TensorDataset`."""
    if isinstance(data, tuple) and data and all(isinstance(part, Tensor) for part in data):
        lengths = [len(part) if part.dim() else 0 for part in data]
        if len(set(lengths)) > 1:
            raise UsageError(
                f"{name}: the tensors have {', '.join(map(str, lengths))} examples; they must be the same"
            )
        return TensorDataset(*data)
    check_data(name, data)
    return data


def check_data(name: str, data: Any) -> None:
    """A torch Dataset, or anything with a length and items."""
    words = isinstance(data, (type, str, bytes, dict, tuple))
    sequence = not words and hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if not sequence and not isinstance(data, Dataset):
        raise UsageError(f"{name} must be a torch Dataset, got {_what(data)}")
    if isinstance(data, IterableDataset):
        return
    try:
        len(data)
    except (TypeError, NotImplementedError) as error:
        raise UsageError(
            f"{name}: {type(data).__name__} has no length; give it a __len__, or make it an IterableDataset"
        ) from error


def _what(data: Any) -> str:
    if isinstance(data, DataLoader):
        return "DataLoader; give its .dataset, and batch_size= and collate= beside it: every learner gets batches of its own"
    if isinstance(data, type):
        return f"the class {data.__name__}; give an instance of it"
    if isinstance(data, tuple):
        kinds = ", ".join(type(part).__name__ for part in data)
        return f"a tuple of ({kinds}); give tensors, or TensorDataset(torch.as_tensor(x), torch.as_tensor(y))"
    return f"{type(data).__name__}; wrap tensors in TensorDataset"
