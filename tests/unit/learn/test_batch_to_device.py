"""Batches of any shape: on another device they are what they were, and their examples are counted."""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import InitVar, dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import TensorDataset

from syncline.learn.batch_to_device import to_device
from syncline.learn.gradient_ways import Backprop
from syncline.learn.train_and_evaluate import evaluation_of

META = torch.device("meta")  # as good as a GPU for where tensors are


class Pair(NamedTuple):
    x: Tensor
    name: str


Untyped = namedtuple("Untyped", "name x")


@dataclass
class Plain:
    x: Tensor
    name: str = "a"
    derived: Any = field(init=False)
    first: InitVar[int] = 0

    def __post_init__(self, first: int) -> None:
        self.derived = [self.x[first:]]


@dataclass(frozen=True, slots=True)
class Frozen:
    name: str
    x: Tensor


class Encoding(UserDict[str, Any]):
    """Moves itself in place, as Hugging Face's `BatchEncoding` does."""

    def to(self, device: torch.device) -> Encoding:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


class Graph:
    """An object of one's own; one that forgot to return itself."""

    def __init__(self) -> None:
        self.name, self.x = "a", torch.ones(3)

    def to(self, device: torch.device) -> None:
        self.x = self.x.to(device)


class ReadOnly(Mapping[str, Any]):
    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content

    def __getitem__(self, key: str) -> Any:
        return self._content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)


def of_three() -> dict[str, Any]:
    """Batches of three examples."""
    x = torch.ones(3, 2)
    return {
        "tensor": x,
        "dict": {"name": "ab", "x": x},
        "ordered": OrderedDict(name="ab", x=x),
        "default": defaultdict(list, name="ab", x=x),
        "user dict": UserDict(name="ab", x=x),
        "encoding": Encoding(x=x),
        "proxy": MappingProxyType({"x": x}),
        "read-only": ReadOnly({"x": x}),
        "list": ["ab", x],
        "tuple": (x, 1),
        "user list": UserList([x, "ab"]),
        "deque": deque(["ab", x]),
        "named": Pair(x, "ab"),
        "untyped": Untyped("ab", x),
        "torch's": x.max(1),
        "data class": Plain(x),
        "frozen": Frozen("ab", x),
        "own": Graph(),
        "packed": pack_sequence([torch.ones(4), torch.ones(3), torch.ones(1)]),
        "nested": {"names": ["a", "b"], "scale": torch.tensor(2.0), "inner": [None, Frozen("ab", x)]},
    }


KINDS = list(of_three())


def tensors(batch: Any) -> list[Tensor]:
    """All of a batch's, found in another way than by the code under test."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, (PackedSequence, Pair, Untyped)):
        return tensors(batch.data if isinstance(batch, PackedSequence) else batch.x)
    if isinstance(batch, (Plain, Frozen, Graph)):
        return [batch.x, *tensors(getattr(batch, "derived", None))]
    if isinstance(batch, Mapping):
        return tensors(list(batch.values()))
    parts = batch if isinstance(batch, (list, tuple, UserList, deque)) else []
    return [tensor for part in parts for tensor in tensors(part)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_on_another_device_is_what_it_was(kind: str) -> None:
    before = of_three()[kind]
    shapes = [tensor.shape for tensor in tensors(before)]
    batch = to_device(before, META)
    assert type(batch) is type(before)
    assert shapes and [tensor.shape for tensor in tensors(batch)] == shapes
    assert all(tensor.device == META for tensor in tensors(batch))
    if kind not in ("encoding", "own"):  # these move themselves
        assert all(tensor.device.type == "cpu" for tensor in tensors(before)), "what was read stays"


def test_what_is_no_tensor_comes_along() -> None:
    given = of_three()
    assert to_device(given["named"], META).name == "ab" and to_device(given["frozen"], META).name == "ab"
    assert to_device(given["default"], META).default_factory is list
    assert list(to_device(given["dict"], META)) == ["name", "x"]
    assert to_device(given["deque"], META)[0] == "ab"


@pytest.mark.parametrize(
    "batch", ["text", 3, None, ["a", "b"], {"a": 1}, torch.Size([1, 2]), Tensor, Frozen, b"x", {1, 2}]
)
def test_what_holds_no_tensor_is_left_alone(batch: Any) -> None:
    assert to_device(batch, META) is batch


def test_nothing_moves_to_where_it_is() -> None:
    for batch in of_three().values():
        assert to_device(batch, torch.device("cpu")) is batch


def squares(model: nn.Module, batch: Frozen) -> Tensor:
    return batch.x.square().mean()


def test_evaluation_weighs_batches_of_any_kind_by_their_examples() -> None:
    data = TensorDataset(torch.arange(300.0))
    evaluation = evaluation_of(
        nn.Linear(1, 1),
        data,
        Backprop(squares),
        1,
        lambda items: Frozen("ab", torch.stack([x for (x,) in items])),
    )
    assert evaluation is not None
    metrics = evaluation(nn.Linear(1, 1).state_dict())
    assert metrics["loss"] == pytest.approx(float(torch.arange(300.0).square().mean()))


def test_hugging_faces_batches_move() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    before = transformers.BatchEncoding({"input_ids": torch.ones(3, 2), "labels": torch.ones(3)})
    batch = to_device([before, "ab"], META)
    assert type(batch[0]) is transformers.BatchEncoding and batch[0].input_ids.device == META
