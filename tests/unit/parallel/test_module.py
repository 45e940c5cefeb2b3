"""Whole models: functions between layers, losses, dropout, shared parameters, other batch sizes, checks and refusals."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncline.errors import RunError, UsageError
from syncline.models import AlexNet, GoogLeNet
from syncline.nn import StackShape, TiedAutoencoder, build_stacks
from syncline.nn.layers import Noise
from syncline.parallel import Box, layer, partition
from syncline.parallel.move import Group
from syncline.parallel.rules import RULES
from tests.unit.parallel.seats import Seats
from tests.unit.parallel.test_layer_slicing import check_same, numbers

seats = Seats()


@pytest.fixture(autouse=True, scope="module")
def _groups_end() -> Iterator[None]:
    yield
    seats.close()


class Through(nn.Module):
    """A function between two layers: a convolution below, a dense layer above."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.conv(x))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: F.relu(x) * 2 + 1,
    "softmax over channels": lambda x: F.softmax(x, 1),
    "softmax over rows": lambda x: x.softmax(dim=2),
    "softmax over examples": lambda x: torch.softmax(x, 0),
    "mean over the image": lambda x: x.mean((2, 3)),
    "mean over channels, kept": lambda x: x - x.mean(1, keepdim=True),
    "mean over examples": lambda x: x - x.mean(0),
    "mean of everything": lambda x: x * x.mean(),
    "sum over rows": lambda x: x.sum(2),
    "largest over columns": lambda x: x.max(3).values + x.amax(3),
    "variance": lambda x: x.var((2, 3)) + x.std(),
    "flatten": lambda x: x.flatten(1),
    "view of examples and channels": lambda x: x.view(x.size(0) * x.size(1), -1).tanh(),
    "view that mixes rows and columns": lambda x: x.reshape(x.shape[0], 6, 9, 4, 2).sin(),
    "permute": lambda x: x.permute(0, 2, 3, 1).flatten(1, 2),
    "transpose to examples last": lambda x: x.flatten(1).transpose(0, 1).exp(),
    "split and cat": lambda x: torch.cat([part * i for i, part in enumerate(x.split([1, 3, 2], 1))], 1),
    "cat of two": lambda x: torch.cat((x, x.relu()), dim=1) + 1,
    "cat over rows": lambda x: torch.cat((x, x), 2),
    "chunks": lambda x: torch.stack([a * b for a, b in zip(x.chunk(3, 1), x.flip(1).chunk(3, 1), strict=True)], 2),
    "slices": lambda x: x[:, 1:4, ..., None] * x[:, :1, 2, :, None, None].mean(),
    "flipped rows and columns": lambda x: x.flip(2, 3) + torch.flip(x, (1,)),
    "chosen channels": lambda x: x[:, [0, 2, 5]] + x[:, :3],
    "cat by another word": lambda x: torch.cat((x, x), axis=1).sum(axis=1),
    "chosen by places": lambda x: x[x.argmax(0)[:, 0, 0] % 2],
    "smallest and largest": lambda x: x.min(1, keepdim=True)[0] + torch.max(x, -x).norm(dim=(2, 3), keepdim=True),
    "an unknown function": lambda x: torch.fft.fft(x, dim=2).real,
    "multiplied maps": lambda x: x.flatten(2) @ x.flatten(2).transpose(1, 2),
    "einsum": lambda x: torch.einsum("nchw,ndhw->ncd", x, x),
    "gram matrix of examples": lambda x: x.flatten(1).t() @ x.flatten(1),
    "interpolated": lambda x: F.interpolate(x, scale_factor=2.0),
    "padded": lambda x: F.pad(x, (1, 2, 0, 1)),
    "pooled": lambda x: F.max_pool2d(x, 2),
    "layer norm": lambda x: F.layer_norm(x, x.shape[2:]),
    "where": lambda x: torch.where(x > 0, x, torch.zeros(x.shape[0], 1, 1, 1, dtype=x.dtype)),
    "expanded": lambda x: torch.cat((x.mean((2, 3)), torch.ones(1, 2, dtype=x.dtype).expand(x.size(0), 2)), 1),
    "in place": lambda x: (x * 2).add_(1).relu_(),
    "sorted": lambda x: x.sort(-1).values.cumsum(1),
    "a loss": lambda x: F.cross_entropy(x.mean((2, 3)), x.flatten(1).argmax(1) % 6),
}  # fmt: skip


@pytest.mark.sweep(50)
@pytest.mark.parametrize("way, size", [("data", 3), ("model", 3), ("spatial", 4)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_between_layers_are_never_wrong_on_a_slice(name: str, way: str, size: int) -> None:
    check_same(lambda: Through(FUNCTIONS[name]), {"conv": way}, (numbers(5, 3, 9, 8),), size)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "AlexNet, dense layers by features": (
        lambda: AlexNet(7, image=32, width=0.05, hidden=24, dropout=0.0),
        {"fc*": "model"},
    ),
    "AlexNet, image then features then rows": (
        lambda: AlexNet(7, image=32, width=0.05, hidden=24, dropout=0.0),
        {"conv1": "spatial", "conv2": "spatial", "conv3": "model", "conv4": "model", "pool#3": "data", "fc6": "rows"},
    ),
    "GoogLeNet, with heads": (
        lambda: GoogLeNet(5, image=32, width=0.05, auxiliary=True, dropout=0.0),
        {"conv*": "spatial", "blocks.3a.*": "spatial", "blocks.4*.three": "model", "heads.*.hidden": "model", "output": "model"},
    ),
}  # fmt: skip


# -- whatever `forward` takes and returns --------------------------------------------------------------------


class Pair(NamedTuple):
    one: Any
    two: Any


@dataclass(frozen=True, slots=True)
class Scores:
    values: Any
    name: str
    parts: Any = None


@dataclass
class Batch:
    first: Tensor
    others: list[Tensor]
    options: dict[str, Any] = field(default_factory=dict)


def _one(model: Any, x: Tensor, *more: Tensor) -> Any:
    return model.a(x)


def _sum(model: Any, x: Tensor, *more: Tensor, **named: Tensor) -> Any:
    return sum((model.a(each) for each in more), model.a(x)) + sum(named.values(), 0)


def _optional(
    model: Any, x: Tensor, *, scale: float = 2.0, sizes: tuple[int, ...] = (1, 2), **named: Any
) -> Any:
    return model.a(x) * scale * len(sizes) + named.get("bias", 0)


BIAS = numbers(6)


def _defaults(
    model: Any, x: Tensor, bias: Tensor = BIAS, mask: Tensor | None = None, dims: Any = (1, 2)
) -> Any:
    return (model.a(x) if mask is None else model.a(x) * mask) + bias, len(dims)


def _batch(model: Any, batch: Batch) -> Any:
    x = model.a(batch.first) * batch.options["scale"]
    return Scores(x, "scores", Batch(x.tanh(), [model.b(x), *batch.others]))


def _structure(model: Any, x: Tensor) -> Any:
    y = model.a(x)
    return {
        "again": [y, (y, x)],
        "none": None,
        "n": len(x),
        "pair": Pair(y.sum(1), model.b(y)),
        "weight": model.b.bias,
    }


def _parts(model: Any, batch: dict[str, Any]) -> Any:
    largest = model.a(batch["x"]).max(1)
    return OrderedDict(chunks=model.a(batch["more"][0]).chunk(2, 1), largest=largest.values)


CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "no further arguments": (_one, (numbers(4, 5),), {}),
    "further arguments that are not used": (_one, (numbers(4, 5), numbers(4, 5)), {}),
    "further arguments": (_sum, (numbers(4, 5), numbers(4, 5, seed=2), numbers(4, 5, seed=3)), {}),
    "further arguments and names": (_sum, (numbers(4, 5), numbers(4, 5, seed=2)), {"y": numbers(4, 6), "z": numbers(6)}),
    "keywords alone": (_optional, (numbers(4, 5),), {"scale": 3.0, "bias": numbers(4, 6)}),
    "keywords left out": (_optional, (numbers(4, 5),), {}),
    "all by name": (_optional, (), {"x": numbers(4, 5), "sizes": (1, 2, 3)}),
    "a tensor as default": (_defaults, (numbers(4, 5),), {}),
    "in place of a default": (_defaults, (numbers(4, 5), numbers(4, 6)), {"mask": numbers(4, 6, seed=2), "dims": {"a": 1}}),
    "a dataclass in and out": (_batch, (Batch(numbers(4, 5), [numbers(4, 5)], {"scale": 0.5}),), {}),
    "a structure": (_structure, (numbers(4, 5),), {}),
    "parts of a batch": (_parts, ({"x": numbers(4, 5), "more": [numbers(4, 5, seed=2)]},), {}),
}  # fmt: skip


class Calling(nn.Module):
    """Two dense layers; each test case brings the `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 3)
        self.double()


@pytest.mark.parametrize("plan", [{"a": "model"}, {"a": "rows"}, {}])
@pytest.mark.parametrize("case", CALLS)
def test_a_call_takes_and_returns_what_the_plain_model_does(case: str, plan: dict[str, str]) -> None:
    forward, args, kwargs = CALLS[case]
    torch.manual_seed(0)
    model = type("Calling", (Calling,), {"forward": forward})()
    expected = model(*args, **kwargs)

    def work(group: Group) -> Any:
        return partition(model, plan, args or kwargs, group, check=True)(*args, **kwargs)

    for found in seats.run(2, work):
        assert outline(found) == outline(expected)
        torch.testing.assert_close(tensors_of(found), tensors_of(expected), rtol=1e-12, atol=1e-12)


def test_a_check_finds_another_structure() -> None:
    mine = partition(Other(), {}, numbers(4, 5), check=True)
    with pytest.raises(RunError, match=r"check: the partitioned model returns .*tuple.*, the model .*list"):
        mine(numbers(4, 5))


def outline(value: Any) -> Any:
    """Return the types of a structure, the shapes of its tensors, and all other values."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if is_dataclass(value):
        return type(value), {each.name: outline(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, dict):
        return type(value), {key: outline(each) for key, each in value.items()}
    return (type(value), [*map(outline, value)]) if isinstance(value, list | tuple) else value


def tensors_of(value: Any) -> list[Tensor]:
    if is_dataclass(value):
        return tensors_of([getattr(value, each.name) for each in fields(value)])
    if isinstance(value, dict | list | tuple):
        return [
            x for each in (value.values() if isinstance(value, dict) else value) for x in tensors_of(each)
        ]
    return [value] if isinstance(value, Tensor) else []


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_equal_one_process(name: str, size: int) -> None:
    make, plan = NETWORKS[name]
    check_same(lambda: _without_dropout(make()), plan, (numbers(5, 3, 32, 32),), size)


def _without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


# -- what looks like examples and is not ------------------------------------------------------------------------


class Halved(nn.Conv2d):
    """A convolution with code of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / 2 + self.weight.sum()


class Attention(nn.Module):
    """Its first dimension is time, whatever stands there."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        found, _ = self.attention(x, x, x, need_weights=False)
        return found


TRAPS: dict[str, tuple[Callable[[], nn.Module], dict[str, str], tuple[int, ...]]] = {
    "time where examples are expected": (lambda: nn.Sequential(nn.LSTM(4, 6)), {}, (5, 3, 4)),
    "attention between examples": (Attention, {}, (5, 3, 4)),
    "norm over maps of channels that are cut": (
        lambda: nn.Sequential(nn.Conv2d(3, 6, 1), nn.LayerNorm((4, 5), elementwise_affine=False)),
        {"0": "model"},
        (5, 3, 4, 5),
    ),
    "batch norm over steps of features that are cut": (
        lambda: nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(3, affine=False)),
        {"0": "model"},
        (5, 3, 4),
    ),
    "pooling over features that are cut": (
        lambda: nn.Sequential(nn.Linear(4, 12), nn.AvgPool1d(3, padding=1)),
        {"0": "model"},
        (5, 3, 4),
    ),
    "a softmax that chooses its dimension": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Softmax(None)), {"0": "model"}, (5, 3, 4)
    ),
    "a convolution with other code": (lambda: nn.Sequential(Halved(3, 6, 3)), {}, (5, 3, 6, 6)),
    "examples as channels": (lambda: Through(lambda x: F.group_norm(x.transpose(0, 1), 1)), {}, (5, 3, 4, 4)),
    "examples as channels of a layer": (
        lambda: nn.Sequential(Through(lambda x: x.transpose(0, 1)), nn.LocalResponseNorm(3, alpha=0.5)),
        {},
        (5, 3, 4, 4),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", TRAPS)
def test_what_is_easily_taken_for_something_else_equals_one_process(name: str, size: int) -> None:
    make, plan, shape = TRAPS[name]
    check_same(make, plan, (numbers(*shape),), size)


# -- the grid of COTS (C4) -------------------------------------------------------------------------------------


class Greedy(nn.Module):
    """One stack on top of others that stay as they are: what a greedy update of it computes."""

    def __init__(self, stacks: nn.Sequential, number: int) -> None:
        super().__init__()
        self.below, self.coder = stacks[:number], TiedAutoencoder(stacks[number])

    def forward(self, images: Tensor) -> Any:
        return self.coder(self.below(images).detach())


def test_one_greedy_update_of_three_stacks_on_a_grid_equals_one_process() -> None:
    shape = StackShape(field=6, step=2, block=(2, 2, 3), window=3)
    stacks = build_stacks(2, (26, 24), (shape,) * 3, dtype=torch.float64)
    images = numbers(4, 2, 26, 24)

    def updated(model: nn.Module, reduce: Callable[[], None] = lambda: None) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        optimizer.zero_grad()
        objective = model(images)
        objective.loss.backward()
        reduce()
        optimizer.step()
        return objective

    for number in range(3):
        before = {name: t.clone() for name, t in stacks.state_dict().items()}

        def work(group: Group, number: int = number) -> Any:
            mine = partition(Greedy(stacks, number), {"*": "spatial"}, images, group, grid=(2, 2))
            held = mine.parts["coder.stack.filter.weight"]
            objective = updated(mine, mine.reduce_gradients)
            return [float(value.detach()) for value in objective], mine.gather(), held

        found = seats.run(4, work)
        stacks.load_state_dict(before)
        whole = Greedy(stacks, number)
        objective = updated(whole)
        for values, state, held in found:
            assert values == pytest.approx([float(value.detach()) for value in objective], rel=1e-10)
            assert (
                not held.replicated
                and sum(box.size for boxes in held.boxes for box in boxes) == torch.Size(held.shape).numel()
            )
            for name, parameter in whole.named_parameters():
                torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-10, atol=1e-10)


# -- dropout ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["data", "model"])
def test_slices_drop_with_random_numbers_of_their_own(way: str) -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.drop = nn.Linear(6, 40, bias=False), nn.Dropout(0.25)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.drop(self.layer(x)), 0.5, self.training)

    model = Dropping()
    nn.init.ones_(model.layer.weight)
    x = torch.ones(40, 6)

    def work(group: Group) -> Any:
        mine = partition(model, {"layer": way}, x, group, seed=3)
        outs = [mine(x) for _ in range(2)]
        outs[0].sum().backward()
        mine.reduce_gradients()
        return (
            [out.detach() / 6 for out in outs],
            mine.gather(gradients=True)["layer.weight"],
            mine.eval()(x) / 6,
        )

    results = seats.run(2, work)
    (first, second), gradient, still = results[0]
    assert torch.equal(still, torch.ones(40, 40))
    assert all(torch.equal(first, other[0][0]) for other in results)  # what everybody got is the same
    assert not torch.equal(first, second)  # another step, other random numbers
    halves = first.chunk(2, 0 if way == "data" else 1)
    assert not torch.equal(halves[0], halves[1])
    assert first.unique().tolist() == pytest.approx([0.0, 1 / (0.75 * 0.5)], rel=1e-6)
    assert (first > 0).float().mean() == pytest.approx(0.375, abs=0.06)
    torch.testing.assert_close(gradient, first.sum(0)[:, None].expand(40, 6))


@pytest.mark.parametrize("kind", ["mask", "gaussian"])
def test_a_model_can_drop_what_one_process_would(kind: str) -> None:
    layers = (Noise(kind, 0.3), nn.Conv2d(3, 4, 1), nn.Dropout(0.4), nn.Dropout2d(0.5), nn.Flatten(1, 2))
    model = nn.Sequential(*layers, nn.LSTM(8, 6, 2, dropout=0.5, batch_first=True)).double()
    x = numbers(5, 3, 6, 8)
    torch.manual_seed(0)
    expected, _ = model(x)
    torch.manual_seed(0)
    found, _ = partition(model, {"1": "spatial", "5": "model"}, x, as_one=True, check=True)(x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_parts_of_one_map_are_dropped_together() -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 1), nn.Dropout2d(0.5))
    x = torch.ones(6, 1, 4, 4)
    (out, *_) = seats.run(4, lambda group: partition(model, {"0": "spatial"}, x, group)(x).detach())
    kept = (out != 0).flatten(2)
    assert torch.equal(kept.all(2), kept.any(2)) and 8 < kept.any(2).sum() < 40


@pytest.mark.filterwarnings("ignore:dropout2d")
def test_maps_are_not_dropped_where_there_are_none() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout2d(0.5))
    with pytest.raises(UsageError, match=r"'1' \(Dropout2d\) reads 3 dimensions: give it examples, channels"):
        partition(model, {}, torch.zeros(2, 3, 4))(torch.zeros(2, 3, 4))


def test_layers_with_dropout_inside_draw_for_their_own_examples() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    x = torch.ones(4, 3, 8)
    (out, again) = seats.run(2, lambda group: partition(model, "data", x, group)(x).detach())
    assert torch.equal(out, again) and not torch.allclose(out[:2], out[2:])
    state = torch.random.get_rng_state()
    assert not torch.equal(partition(model, "data", x)(x), partition(model, "data", x, seed=1)(x))
    assert torch.equal(state, torch.random.get_rng_state())  # nobody else's are used up


# -- use -------------------------------------------------------------------------------------------------------


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(96, 10)
    ).double()  # fmt: skip


PLAN = {"0": "spatial", "5": "model"}


@pytest.mark.parametrize("batch", [1, 3, 9])
def test_other_batch_sizes_follow_also_fewer_examples_than_processes(batch: int) -> None:
    model, other = small(), small()
    x = numbers(batch, 3, 8, 8)

    def work(group: Group) -> Tensor:
        mine = partition(model, {"5": "model"}, numbers(6, 3, 8, 8), group)
        mine(numbers(6, 3, 8, 8))
        return mine(x).detach()

    expected = [other(numbers(6, 3, 8, 8)), other(x)][1]
    for found in seats.run(4, work):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-10, atol=1e-10)


def test_inference_needs_no_gradients_and_uses_the_running_statistics() -> None:
    model = small().eval()
    x = numbers(6, 3, 8, 8)

    def work(group: Group) -> Tensor:
        mine = partition(model, PLAN, x, group)
        with torch.inference_mode():
            return mine(x)

    for found in seats.run(3, work):
        torch.testing.assert_close(found, model(x).detach(), rtol=1e-10, atol=1e-10)


def test_parameters_know_their_windows_and_states_can_be_taken_over_and_gathered() -> None:
    model, other = small(), small()
    nn.init.ones_(other[5].weight)
    x = numbers(6, 3, 8, 8)

    def work(group: Group) -> Any:
        mine = partition(model, PLAN, x, group)
        shapes = {name: tuple(p.shape) for name, p in mine.named_parameters()}
        mine.load(other.state_dict())
        return shapes, mine.parts, mine.gather()

    for rank, (shapes, parts, state) in enumerate(seats.run(3, work)):
        assert list(shapes) == [name for name, _ in model.named_parameters()]
        assert parts["5.weight"].boxes[rank] == (Box(((10 * rank // 3, 10 * (rank + 1) // 3), (0, 96))),)
        assert (
            shapes["5.weight"]
            == parts["5.weight"].boxes[rank][0].shape
            == parts["5.weight"].local_shape(rank)
        )
        assert parts["0.weight"].replicated and not parts["5.bias"].replicated
        assert state.keys() == other.state_dict().keys()
        assert all(torch.equal(state[name], t) for name, t in other.state_dict().items())


def test_a_model_without_values_is_partitioned_and_loaded_by_slices() -> None:
    model, x = small(), numbers(6, 3, 8, 8)
    with torch.device("meta"):
        shapes = small()

    def work(group: Group) -> Tensor:
        mine = partition(shapes, PLAN, x, group)
        mine.load(model.state_dict())
        return mine.eval()(x).detach()

    for found in seats.run(2, work):
        torch.testing.assert_close(found, model.eval()(x).detach(), rtol=1e-10, atol=1e-10)
    assert all(p.is_meta for p in shapes.parameters())


def test_the_model_stays_as_it_was() -> None:
    model, x = small(), numbers(6, 3, 8, 8)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    seats.run(2, lambda group: partition(model, PLAN, x, group, check=True)(x))
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert (
        type(model[0]) is nn.Conv2d
        and not model[0]._forward_hooks
        and not hasattr(model, "_tensor_constant0")
    )


def test_each_value_goes_to_a_process_once_whatever_the_number_of_readers() -> None:
    class Ways(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(2, 4, 1)
            self.narrow, self.wide = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 5, padding=2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.narrow(x) + self.wide(x) + x

    x, sent = numbers(1, 2, 8, 8), []

    class Counting:
        """A process group that counts what leaves this process."""

        def __init__(self, group: Any) -> None:
            self._group = group

        def __getattr__(self, name: str) -> Any:
            return getattr(self._group, name)

        def alltoall_base(self, out: Tensor, send: Tensor, received: list[int], parts: list[int]) -> Any:
            sent.append(send.numel())
            return self._group.alltoall_base(out, send, received, parts)

    def work(group: Group) -> int:
        counting = Group(Counting(group._group))
        mine = partition(Ways().double(), {"*": "spatial"}, x, counting)
        out = mine(x)
        (program,) = mine._programs.values()
        sent.append(-program._ends[id(program.steps[-1].outs[0])].route.count(group.rank, 1 - group.rank))
        out.sum().backward()
        return program.moved

    moved = seats.run(2, work)
    assert (
        moved == [2 * 2 * 8 * 4] * 2
    )  # two rows of eight each way, of four maps: what the widest field wants
    assert sum(sent) == 2 * moved[0]  # up and down; results apart


# -- check, layers of one's own ----------------------------------------------------------------------------------


class Shifted(nn.Module):
    """Each place plus its left neighbour, times a weight for each map."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(channels))

    def forward(self, x: Tensor) -> Tensor:
        return (x[..., 1:] + x[..., :-1]) * self.weight.view(-1, 1, 1)


@pytest.fixture
def _own_layers() -> Iterator[None]:
    yield
    RULES.pop(Shifted, None)


def _shifted_wants(module: Shifted, window: Box, shapes: Any) -> Box:
    low, high = window.spans[3]
    return window.replaced(3, (low, high + 1))


def _shifted_slices(module: Shifted, window: Box) -> dict[str, tuple[Box, ...]]:
    return {"weight": (Box((window.spans[1],)),)}


@pytest.mark.usefixtures("_own_layers")
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("way", ["data", "model", "spatial"])
def test_a_layer_of_ones_own_registers_two_functions(way: str, size: int) -> None:
    layer(Shifted, _shifted_wants, _shifted_slices)
    make = lambda: nn.Sequential(nn.Conv2d(3, 5, 1), Shifted(5))  # noqa: E731
    check_same(make, {"1": way}, (numbers(5, 3, 7, 8),), size, check=True)


@pytest.mark.usefixtures("_own_layers")
def test_a_check_finds_a_layer_that_is_not_what_it_is_said_to_be() -> None:
    layer(
        Shifted,
        lambda module, window, shapes: _shifted_wants(module, window, shapes).replaced(1, (0, 1)),
        _shifted_slices,
    )
    x, wrong, right = numbers(4, 3, 6, 6), nn.Sequential(nn.Conv2d(3, 4, 1), Shifted(4)).double(), small()

    def work(group: Group) -> Any:
        with pytest.raises(
            RunError,
            match=r"check: result 0 of the partitioned model is off by .* times what rounding explains",
        ):
            partition(wrong, {"1": "spatial"}, x, group, check=True)(x)
        mine = partition(right, PLAN, numbers(6, 3, 8, 8), group, check=True)
        return mine(numbers(6, 3, 8, 8)) is not None

    assert seats.run(2, work) == [True, True]


def test_a_check_is_not_misled_by_what_is_dropped() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.drop, self.two = nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4)
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(F.dropout(self.two(self.drop(self.one(x))), 0.5, self.training))

    x, model = numbers(6, 6), Dropping().double()

    def work(group: Group) -> Any:
        made = [partition(model, {"one": "model"}, x, group, check=check) for check in (True, False)]
        assert all(module.training for module in made[0].modules())
        return [mine(x).detach() for mine in made], made[0].norm.num_batches_tracked

    for (checked, plain), count in seats.run(2, work):
        assert torch.equal(checked, plain) and count == 1


def test_a_model_whose_names_are_taken_is_refused() -> None:
    model = nn.Sequential()
    model.add_module("parts", nn.Linear(6, 6))
    with pytest.raises(
        UsageError, match=r"the model has a 'parts', as a partitioned model has: give it another name"
    ):
        partition(model, {}, torch.zeros(4, 6))


def test_layers_that_share_a_weight_share_its_slices() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x).relu())

    check_same(Tied, {"one": "model", "two": "model"}, (numbers(5, 6),), 3)
    check_same(Tied, {}, (numbers(5, 6),), 3)
    with pytest.raises(
        UsageError, match=r"'two.weight' and 'one.weight' are one tensor, but cut in different ways"
    ):
        seats.run(2, lambda group: partition(Tied(), {"one": "model"}, numbers(5, 6), group))


def test_parameters_used_by_functions_are_whole_and_their_gradients_add_up() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.offset = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(()))
            self.inner = nn.Linear(4, 4)
            self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0]))

        def forward(self, x: Tensor, *, twice: bool = False) -> Tensor:
            x = F.linear(x, self.inner.weight * self.scale, self.inner.bias) * self.mask + self.offset
            return self.inner(x) * 2 if twice else self.inner(x)

    check_same(Scaled, {}, (numbers(5, 4),), 2)
    check_same(Scaled, {}, (numbers(5, 4),), 4)


# -- refusals --------------------------------------------------------------------------------------------------


class Peeking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Drawing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(4)


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        return y + y.relu_()


class Hidden:
    """Holds a tensor in an attribute."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Hiding(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return Hidden(x * 2)


class Scoring(nn.GELU):
    """A leaf to the tracer that returns a dataclass."""

    __module__ = "torch.nn"

    def forward(self, x: Tensor) -> Any:
        return Scores(x, "scores")


class Other(nn.Module):
    """Returns a list, but a tuple where it is traced."""

    def forward(self, x: Tensor) -> Any:
        return (x, x + 1) if isinstance(x, torch.fx.Proxy) else [x, x + 1]


class Everything(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.t()


def _conv(*args: Any, **options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Conv2d(*args, **options))


IMAGES, ROWS = (4, 3, 8, 8), (4, 6)
REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, tuple[int, ...], str]] = {
    "a way that is none": (small, {"0": "spacial"}, IMAGES, r"'0' is to be cut as 'spacial', did you mean 'spatial'.*the ways are data, model, spatial, rows"),
    "a layer that is none": (small, {"fc": "model"}, IMAGES, r"plan: no layer is called 'fc'; the model has 0, 1, 2, 3, 4, 5"),
    "no plan": (small, 3, IMAGES, r"a plan maps layers to ways, as \{'fc\*': 'model'\}, or is 'data'; got 3"),
    "a dense layer as an image": (small, {"5": "spatial"}, IMAGES, r"'5' \(Linear\) cannot be cut as 'spatial': it can be 'data', 'model', 'rows'"),
    "an unknown layer by features": (lambda: nn.Sequential(nn.GroupNorm(1, 3)), {"0": "model"}, IMAGES, r"'0' \(GroupNorm\) cannot be cut as 'model': it can be 'data'"),
    "fewer channels than processes": (_conv(3, 2, 1), {"0": "model"}, IMAGES, r"'0' \(Conv2d\) has 2 places in dimension 1, fewer than the 3 processes"),
    "fewer rows than processes": (_conv(3, 2, 7), {"0": "spatial"}, IMAGES, r"'0' \(Conv2d\) has 2 × 2 places for a grid of 3 × 1 processes"),
    "reflected padding": (_conv(3, 4, 3, padding=1, padding_mode="reflect"), {"0": "spatial"}, IMAGES, r"'0' \(Conv2d\) cannot be cut as 'spatial': it pads by 'reflect'"),
    "softmax over what is cut": (lambda: nn.Sequential(nn.Softmax(1)), {"0": "model"}, ROWS, r"'0' \(Softmax\) works along a dimension that 'model' cuts"),
    "both ways through time": (lambda: nn.Sequential(nn.LSTM(8, 4, bidirectional=True, batch_first=True)), {"0": "model"}, (4, 3, 8), r"cannot be cut as 'model': it is bidirectional"),
    "weights made by others": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 8))), {"0": "model"}, ROWS,
        r"'0' \(ParametrizedLinear\) cannot be cut as 'model': 'weight' is no parameter of it",
    ),
    "recurrent weights made by others": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.GRU(6, 8, batch_first=True), "weight_hh_l0")),
        {"0": "model"}, (4, 3, 6), r"Sequential cannot be copied to be traced: ",
    ),
    "places in a map": (
        lambda: nn.Sequential(nn.MaxPool2d(2, return_indices=True)), {"0": "model"}, IMAGES,
        r"'0' \(MaxPool2d\) cannot be cut as 'model': return_indices counts in the whole image",
    ),
    "values decide": (Peeking, {}, ROWS, r"Peeking cannot be traced \(TraceError: .*has to be a module of its own"),
    "random numbers": (Drawing, {}, (3, 4), r"Drawing.forward draws random numbers \(aten.rand.default\): use nn.Dropout"),
    "random functions": (lambda: Through(torch.rand_like), {}, IMAGES, r"'rand_like' \(function\) draws random numbers"),
    "batch norm as a function": (lambda: Through(lambda x: F.batch_norm(x, None, None, training=True)), {}, IMAGES, r"normalises by the examples at hand.*use nn.BatchNorm1d"),
    "in place, but read elsewhere": (InPlace, {}, ROWS, r"'relu_' changes 'mul' in place, which others read too"),
    "tensors in an object": (Hiding, {}, ROWS, r"what Hiding.forward returns has a Hidden, whose tensors cannot be seen"),
    "a record between layers": (lambda: nn.Sequential(Scoring(), nn.Identity()), {}, ROWS, r"call_module 0 gives a dataclass: between layers use tensors"),
    "examples against examples": (Everything, {}, ROWS, r"call_function .* mixes examples: its result has shape \[4, 4\] for 4 of them and \[5, 5\] for 5"),
    "another input": (small, {}, (4, 3, 12, 12), r"Sequential cannot be traced \(RuntimeError: "),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_wrong_is_refused_by_name(case: str) -> None:
    make, plan, shape, words = REFUSED[case]
    model = make().double()

    def work(group: Group) -> None:
        with pytest.raises(UsageError, match=words) as refused:
            partition(model, plan, numbers(*shape), group)
        assert "\n" not in str(refused.value)

    seats.run(3, work)


def test_a_grid_has_to_have_the_groups_size() -> None:
    with pytest.raises(UsageError, match=r"a grid of 2 × 2 needs 4 processes, the group has 3"):
        seats.run(3, lambda group: partition(small(), PLAN, numbers(*IMAGES), group, grid=(2, 2)))


def test_a_state_of_another_model_is_refused() -> None:
    mine = partition(small(), {}, numbers(*IMAGES))
    with pytest.raises(UsageError, match=r"the state lacks '0.bias' and others: it is of another model"):
        mine.load({"0.weight": torch.zeros(6, 3, 3, 3)})
