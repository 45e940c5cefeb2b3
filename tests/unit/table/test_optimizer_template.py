"""A user's optimizer cut for the shards (M5): the bits of the plain one, and its `state_dict` both ways."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop

from syncline.errors import LayoutError
from syncline.table.gradient_slot import options_of, options_text
from syncline.table.layout import Layout, lay_out
from syncline.table.optimizer_template import OptimizerTemplate, cut_state, merge, piece_states, split

Factory = Callable[[Any], torch.optim.Optimizer]
SHAPES = ((5, 7), (33,), (), (0,), (64, 3), (1, 1, 17), (2, 0), (2, 301), (0,))


class Whole(torch.optim.Optimizer):
    """Not elementwise: divides by the norm of the whole tensor, and must see its shape."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.seen: list[tuple[int, ...]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.seen.append(tuple(p.shape))
                    self.state[p]["total"] = self.state[p].get("total", torch.zeros_like(p)) + p.grad
                    p.sub_(group["lr"] * p.grad / (1 + p.grad.norm()))


OPTIMIZERS: dict[str, Factory] = {
    "SGD": partial(SGD, lr=0.1),
    "SGD momentum": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "SGD nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "SGD maximize": partial(SGD, lr=0.1, momentum=0.5, dampening=0.3, maximize=True),
    "SGD fused": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True),
    "Adam": partial(Adam, lr=0.01, amsgrad=True),
    "AdamW": partial(AdamW, lr=0.01),
    "Adagrad": partial(Adagrad, lr=0.01, initial_accumulator_value=0.5, lr_decay=0.1),
    "RMSprop": partial(RMSprop, lr=0.01, momentum=0.9, centered=True),
    **{kind.__name__: partial(kind, lr=0.01) for kind in (Adadelta, Adamax, NAdam, RAdam, Rprop)},
    "Whole": partial(Whole, lr=0.1),
}
FOREACH = {
    f"{name} foreach={on}": partial(factory, foreach=on)
    for name, factory in OPTIMIZERS.items()
    for on in (False, True)
    if name not in ("SGD fused", "Whole")
}
every = pytest.mark.parametrize("name", [*OPTIMIZERS, *FOREACH])


def model_of(shapes: Iterable[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32) -> nn.Module:
    drawn = torch.Generator().manual_seed(1)
    model = nn.Module()
    model.all = nn.ParameterList(torch.randn(shape, generator=drawn).to(dtype) for shape in shapes)
    return model


def gradients_of(model: nn.Module, step: int) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=drawn).to(p.dtype) for p in model.parameters()]


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, without: int = -1) -> None:
    found = zip(model.parameters(), gradients_of(model, step), strict=True)
    for index, (parameter, gradient) in enumerate(found):
        parameter.grad = None if index == without else gradient
    optimizer.step()


class Cut:
    """The same training on shards."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, shards: int) -> None:
        self.model = model
        template = OptimizerTemplate.of(optimizer)
        groups = [group["params"] for group in optimizer.param_groups]
        self.layout, _ = lay_out(model, groups, cuttable=template.cuttable, shards=shards)
        flat = self.layout.parameters
        self.segments = flat.segments(torch.zeros(flat.nbytes, dtype=torch.uint8))
        for view, parameter in zip(flat.views(self.segments), model.parameters(), strict=True):
            view.copy_(parameter.detach())
        self.options = template.options
        self.built = [
            template.build(part, self.layout, part.views(part.segments(self.segments), flat.entries))
            for part in self.layout.parts
        ]

    def step(self, step: int, without: int = -1) -> None:
        gradients = gradients_of(self.model, step)
        for part, (optimizer, parameters) in zip(self.layout.parts, self.built, strict=True):
            for piece, parameter in zip(part.pieces, parameters, strict=True):
                gradient = gradients[piece.entry].reshape(-1)[piece.start : piece.stop].clone()
                parameter.grad = None if piece.entry == without else gradient.view(parameter.shape)
            optimizer.step()

    def values(self) -> list[Tensor]:
        return self.layout.parameters.views(self.segments)

    def state_dict(self) -> dict[str, Any]:
        shards = [
            piece_states(optimizer, part, parameters)
            for part, (optimizer, parameters) in zip(self.layout.parts, self.built, strict=True)
        ]
        return merge(self.layout, self.options, shards)

    def load(self, state_dict: dict[str, Any]) -> None:
        _, state = split(self.layout, state_dict)
        for part, (optimizer, parameters) in zip(self.layout.parts, self.built, strict=True):
            optimizer.state.clear()
            for piece, parameter in zip(part.pieces, parameters, strict=True):
                if piece.entry in state:
                    optimizer.state[parameter] = cut_state(state[piece.entry], piece, self.layout)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def assert_same_weights(model: nn.Module, values: Sequence[Tensor]) -> None:
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True))


def factory_of(name: str) -> Factory:
    return OPTIMIZERS.get(name) or FOREACH[name]


@every
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_shards_give_the_bits_and_the_state_of_the_plain_optimizer(name: str, shards: int) -> None:
    model = model_of()
    optimizer = factory_of(name)(model.parameters())
    cut = Cut(model, optimizer, shards)
    assert any(not piece.whole for part in cut.layout.parts for piece in part.pieces) == (
        shards > 1 and name != "Whole"
    )
    for step in range(3):
        late = step == 0 and name != "SGD fused"  # (PyTorch's own fused SGD cannot)
        without = 7 if late else -1  # the largest parameter, one that is cut, begins a step later
        plain_step(model, optimizer, step, without)
        cut.step(step, without)
        assert_same_weights(model, cut.values())
    assert same(cut.state_dict(), optimizer.state_dict())


@every
def test_a_plain_state_goes_on_at_any_number_of_shards_and_back(name: str) -> None:
    model = model_of()
    optimizer = factory_of(name)(model.parameters())
    fresh = factory_of(name)(model.parameters())
    for step in range(2):
        plain_step(model, optimizer, step)
    cuts = [Cut(model, fresh, shards) for shards in (1, 2, 3)]
    for cut in cuts:
        cut.load(optimizer.state_dict())
    cuts.append(Cut(model, optimizer, 3))  # a template that carries its state
    for step in (2, 3):
        plain_step(model, optimizer, step)
        for cut in cuts:
            cut.step(step)
            assert_same_weights(model, cut.values())
    for cut in cuts:
        assert same(cut.state_dict(), optimizer.state_dict())
    fresh.load_state_dict(cuts[1].state_dict())
    assert same(fresh.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["SGD momentum", "Adam", "Adagrad", "RMSprop"])
def test_other_dtypes_keep_their_bits_too(name: str, dtype: torch.dtype) -> None:
    model = model_of(dtype=dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    cut = Cut(model, optimizer, 3)
    for step in range(3):
        plain_step(model, optimizer, step)
        cut.step(step)
    assert_same_weights(model, cut.values())
    assert same(cut.state_dict(), optimizer.state_dict())


def test_mixed_dtypes_lie_in_segments_of_their_own() -> None:
    model = model_of()
    for index, dtype in ((1, torch.float64), (7, torch.bfloat16), (6, torch.float64)):
        model.all[index] = nn.Parameter(model.all[index].to(dtype))
    optimizer = Adam(model.parameters(), lr=0.01)
    cut = Cut(model, optimizer, 3)
    assert cut.layout.parameters.dtypes == ("float32", "float64", "bfloat16")
    for step in range(3):
        plain_step(model, optimizer, step)
        cut.step(step)
    assert_same_weights(model, cut.values())
    assert same(cut.state_dict(), optimizer.state_dict())


def test_groups_keep_their_own_options() -> None:
    model = model_of()
    parameters = list(model.parameters())
    groups = [
        {"params": parameters[:2], "lr": 0.5, "weight_decay": 0.1},
        {"params": parameters[2:5], "momentum": 0.0},
        {"params": parameters[5:]},
    ]
    optimizer = SGD(groups, lr=0.01, momentum=0.9)
    cut = Cut(model, optimizer, 2)
    for step in range(3):
        plain_step(model, optimizer, step)
        cut.step(step)
    assert_same_weights(model, cut.values())
    assert same(cut.state_dict(), optimizer.state_dict())
    assert [option["lr"] for option in cut.options] == [0.5, 0.01, 0.01]
    assert cut.layout.groups == ((0, 1), (2, 3, 4), (5, 6, 7, 8))


def test_unknown_classes_get_whole_tensors_in_their_shape() -> None:
    model = model_of()
    optimizer = Whole(model.parameters())
    cut = Cut(model, optimizer, 3)
    cut.step(0)
    seen = [shape for built, _ in cut.built for shape in built.seen]  # type: ignore[attr-defined]
    assert sorted(seen) == sorted(SHAPES)
    assert optimizer.seen == []  # the template itself never steps


class Renamed(SGD):
    """A subclass may do anything: it is not taken for elementwise."""


def test_only_known_classes_are_cut() -> None:
    model = model_of()
    assert OptimizerTemplate.of(SGD(model.parameters())).cuttable
    assert not OptimizerTemplate.of(Renamed(model.parameters())).cuttable


def test_what_cannot_run_on_a_shard_is_refused() -> None:
    model = model_of()
    with pytest.raises(LayoutError, match="LBFGS calls its closure"):
        OptimizerTemplate.of(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(LayoutError, match="sparse"):
        OptimizerTemplate.of(torch.optim.SparseAdam(model.parameters()))


def test_a_state_of_other_groups_is_refused() -> None:
    layout: Layout = Cut(model_of(), SGD(model_of().parameters()), 1).layout
    other = SGD(model_of(((1,), (2,))).parameters())
    with pytest.raises(LayoutError, match=r"sizes \[2\], this optimizer has \[9\]"):
        split(layout, other.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_options_that_are_tensors_travel_as_copies_of_their_type(dtype: torch.dtype) -> None:
    model, rate, beta = model_of(), torch.tensor(0.1, dtype=dtype), torch.tensor(0.9, dtype=dtype)
    optimizer = Adam(model.parameters(), lr=rate, betas=(beta, beta), foreach=False)  # type: ignore[arg-type]
    layout = Cut(model, optimizer, 1).layout
    template = OptimizerTemplate.of(optimizer)
    parted, _ = split(layout, optimizer.state_dict())
    travelled = options_of(options_text(template.options))
    rate.fill_(7.0), beta.fill_(7.0)
    for (option,) in (template.options, parted, travelled):
        assert torch.equal(option["lr"], torch.tensor(0.1, dtype=dtype)) and "params" not in option
        assert all(torch.equal(each, torch.tensor(0.9, dtype=dtype)) for each in option["betas"])
