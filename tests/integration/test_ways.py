"""Ways to a gradient over dials, topologies and engines: contrastive divergence with two learners against one process, the
bits of resumed and simulated runs, functions of the user's, and what is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils.data import TensorDataset

import syncline as sl
from syncline.jobs import Job
from syncline.nn import DBN, RBM, Net
from tests.integration.small_runs import PRESETS, same

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SEED, SIZE, BATCH = 3, 96, 8


def bars() -> TensorDataset:
    """Rows and columns of a 3×3 image, and its number."""
    generator = torch.Generator().manual_seed(0)
    kind = torch.randint(6, (SIZE,), generator=generator)
    image = torch.zeros(SIZE, 3, 3)
    for number, which in enumerate(kind.tolist()):
        image[number, which % 3 if which < 3 else slice(None), slice(None) if which < 3 else which % 3] = 1.0
    return TensorDataset(image, kind)


def machine(**options: Any) -> RBM:
    torch.manual_seed(1)
    return RBM(9, 5, std=0.1, **options)


def train(model: nn.Module | None = None, **options: Any) -> sl.Result:
    settings: dict[str, Any] = {
        "gradient": "cd:1",
        "optimizer": partial(SGD, lr=0.2, momentum=0.5),
        "sync": "hardsync",
        "learners": 2,
        "batch_size": BATCH,
        "epochs": 2,
        "seed": SEED,
        "threads": 1,
        "engine": "sim",
    }
    return sl.train(model if model is not None else machine(), bars(), **{**settings, **options})


class Streams:
    """Every learner's random numbers, in one process."""

    def __init__(self, learners: int) -> None:
        self._states = []
        for rank in range(learners):
            torch.manual_seed(SEED + rank)
            self._states.append(torch.get_rng_state())

    def each(self) -> Iterator[int]:
        for rank, state in enumerate(self._states):
            torch.set_rng_state(state)
            yield rank
            self._states[rank] = torch.get_rng_state()


def one_process(epochs: int, persistent: bool) -> dict[str, Tensor]:
    """The joint batch, its halves drawn by the streams of the learners that have them."""
    model, streams = machine(), Streams(2)
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.5)
    images = bars().tensors[0]
    chains = [torch.zeros(BATCH, 9) for _ in range(2)]
    for epoch in range(epochs):
        order = torch.as_tensor(sl.epoch_order(SIZE, seed=SEED, epoch=epoch))
        for joint in order.split(2 * BATCH):
            optimizer.zero_grad()
            for rank in streams.each():
                if persistent:
                    model.register_buffer("chains", chains[rank], persistent=False)
                model.contrastive_divergence(images[joint[rank * BATCH :][:BATCH]], persistent=persistent)
            for parameter in model.parameters():
                parameter.grad /= 2  # type: ignore[operator]
            optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("gradient", ["cd:1", "pcd:1"])
@pytest.mark.parametrize("topology", ["servers:2", "allreduce"])
def test_two_learners_in_lockstep_are_one_process_with_the_joint_batch(topology: str, gradient: str) -> None:
    result = train(engine="local", topology=topology, gradient=gradient)
    wanted = one_process(2, gradient == "pcd:1")
    assert result.model is not None
    assert result.model.state_dict().keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(result.model.state_dict()[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("gradient", ["cd:2", "pcd:1"])
def test_the_twin_keeps_the_bits(gradient: str) -> None:
    runs = [train(engine=engine, gradient=gradient, topology="servers:2") for engine in ("local", "sim")]
    assert same(runs[0].state_dict(), runs[1].state_dict())


@pytest.mark.parametrize("gradient", ["cd:1", "pcd:2"])
@pytest.mark.parametrize("topology", ["servers:1", "allreduce"])
def test_a_resumed_run_keeps_the_bits(gradient: str, topology: str, tmp_path: Path) -> None:
    engine = "local" if topology == "allreduce" else "sim"
    options = {"gradient": gradient, "topology": topology, "engine": engine}
    whole = train(epochs=3, **options)
    train(epochs=1, run_dir=tmp_path / "run", **options)
    resumed = train(epochs=3, resume=tmp_path / "run", **options)
    assert resumed.version == whole.version
    assert same(resumed.state_dict(), whole.state_dict())


@pytest.mark.parametrize("sync", PRESETS)
def test_every_dial_trains_an_rbm(sync: str) -> None:
    result = train(sync=sync, learners=3, epochs=6, optimizer=partial(SGD, lr=0.3), evaluate=bars())
    losses = [record.metrics["loss"] for record in result.history]
    assert losses[-1] < losses[0]


def test_all_reduce_with_delays_trains_one_too() -> None:
    result = train(
        sync="delayed:1", topology="allreduce", engine="local", epochs=6, evaluate=bars(), gradient="pcd:1"
    )
    losses = [record.metrics["loss"] for record in result.history]
    assert losses[-1] < losses[0]


def test_an_evaluation_tells_the_reconstruction_error() -> None:
    result = train(evaluate=bars())
    model = result.model
    assert isinstance(model, RBM)
    wanted = float(model.reconstruction_error(bars().tensors[0]))
    assert result.history[-1].metrics == {"loss": pytest.approx(wanted, rel=1e-5)}


def test_a_dbn_is_trained_stack_by_stack() -> None:
    torch.manual_seed(1)
    dbn = DBN([9, 12, 12], std=0.1)
    before = {name: value.clone() for name, value in dbn.state_dict().items()}
    for number in (0, 1):
        dbn.only(number)
        model = train(dbn, epochs=4).model
        assert isinstance(model, DBN)
        dbn = model
        moved = [name for name, value in dbn.state_dict().items() if not torch.equal(value, before[name])]
        assert {name.split(".")[1] for name in moved} == {str(each) for each in range(number + 1)}
    net = dbn.only(None).classifier(6)
    assert torch.equal(net[1].weight, dbn.rbms[0].weight)  # type: ignore[arg-type]
    adam = partial(Adam, lr=0.02)
    tuned = train(net, gradient="backprop", loss=F.cross_entropy, optimizer=adam, epochs=20, evaluate=bars())
    assert tuned.history[-1].metrics["accuracy"] > 0.8


def squares(model: nn.Module, batch: Any) -> Tensor:
    value = F.cross_entropy(model(batch[0].flatten(1)), batch[1])
    value.backward()
    return value


def squared(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0].flatten(1)), batch[1])


def nothing(model: nn.Module, batch: Any) -> Tensor:
    return torch.zeros(())


@pytest.mark.parametrize(
    "engine, topology", [("local", "servers:2"), ("local", "allreduce"), ("sim", "servers")]
)
def test_a_function_that_fills_gradients_is_back_propagation(engine: str, topology: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(9, 6)
    own = train(model, gradient=squares, engine=engine, topology=topology)
    theirs = train(model, gradient="backprop", objective=squared, engine=engine, topology=topology)
    assert same(own.state_dict(), theirs.state_dict())


def test_a_function_that_fills_none_is_refused() -> None:
    with pytest.raises(sl.LearnerError, match=r"given as gradient= has filled no parameter's \.grad"):
        train(nn.Linear(9, 6), gradient=nothing)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"gradient": "cd:0"}, r"gradient='cd:0': k is a number of Gibbs steps, at least 1, as in 'cd:1'"),
        ({"gradient": "backprp"}, r"gradient must be 'backprop', 'cd:k', .*, got 'backprp', did you mean 'backprop'\?"),
        ({"gradient": 3}, r"gradient must be 'backprop', 'cd:k', 'pcd:k' or a function .*, got 3"),
        ({"loss": F.mse_loss}, r"gradient='cd:1' needs no loss=: leave it out, or gradient="),
        ({"model": nn.Linear(9, 2)}, r"gradient='cd:1' trains energy models, .*, got Linear"),
        ({"gradient": squares, "evaluate": bars()}, r"evaluate= with an own gradient= must be a function of the model"),
        ({"sync": "sandblaster"}, r"sandblaster"),
        ({"model": DBN([9, 3]).requires_grad_(False)}, r"all RBMs of this DBN are frozen"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(sl.UsageError, match=words):
        train(options.pop("model", None), **options)


JOB = """\
sync = "hardsync"
batch_size = 16
epochs = 3
engine = "sim"
gradient = "cd:1"
data = "digits"
optimizer = {name = "sgd", lr = 0.1, momentum = 0.5}

[evaluate]
split = "test"

[[layers]]
name = "data"
type = "input"

[[layers]]
name = "first"
type = "rbm"
units = 20
freeze = true
init = {name = "gaussian", std = 0.5}

[[layers]]
name = "second"
type = "rbm"
units = 10
"""


def test_a_job_trains_the_rbms_of_a_net_on_what_reaches_them() -> None:
    result = sl.train(**Job.parse(JOB).build())
    losses = [record.metrics["loss"] for record in result.history]
    assert losses[-1] < losses[0]
    assert isinstance(result.model, Net) and result.model.second.weight.std() > 0.011


@pytest.mark.parametrize(
    "gradient, words",
    [
        ("cd:x", "job:5: gradient: gradient='cd:x': k is a number of Gibbs steps"),
        ("pcd:k", "job:5: gradient: gradient='pcd:k': k is a number of Gibbs steps"),
        ("cdd:1", "job:5: gradient: gradient must be 'backprop', 'cd:k'"),
        ("backprop", "job: loss: missing"),
        ("no_such:function", "job:5: gradient: "),
    ],
)
def test_ways_of_a_job_are_checked(gradient: str, words: str) -> None:
    with pytest.raises(sl.UsageError) as caught:
        Job.parse(JOB.replace('"cd:1"', f'"{gradient}"')).build()
    assert str(caught.value).startswith(words), caught.value


def test_a_job_without_an_rbm_has_nothing_for_contrastive_divergence() -> None:
    text = JOB.replace("freeze = true", "").replace('type = "rbm"', 'type = "dense"')
    with pytest.raises(sl.UsageError, match=r"^job:5: gradient: the net has no rbm layer that is trained"):
        Job.parse(text).build()
