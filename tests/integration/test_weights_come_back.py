"""Weights that were trained always come back, with the result or with the error; models that do not travel are made in learners."""

from __future__ import annotations

import sys
import threading
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import SGD
from torch.utils.data import TensorDataset

import syncline as sl
from syncline.errors import LayoutError, RunError, UsageError
from tests.integration.small_runs import launched, same

cloudpickle.register_pickle_by_value(sys.modules[__name__])

X = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True))


def train(model: Any, **options: Any) -> Any:
    settings = {"loss": F.mse_loss, "optimizer": partial(SGD, lr=0.05), "sync": "hardsync", "batch_size": 4}
    return sl.train(model, DATA, learners=2, epochs=2, threads=1, **{**settings, **options})


def normed() -> nn.Module:
    """Keeps a tensor that it computed, which cannot be copied."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and much used
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 1))


def parametrised() -> nn.Module:
    """Cannot be pickled."""
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 1))


def lazy() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))
    model(torch.zeros(1, 3))
    return model


def meta() -> nn.Module:
    model = nn.Linear(3, 1, device="meta").to_empty(device="cpu")
    model.reset_parameters()
    return model


@pytest.mark.parametrize(
    "engine, topology", [("local", "servers"), ("local", "allreduce"), ("sim", "servers")]
)
@pytest.mark.parametrize("make", [normed, parametrised, lazy, meta])
def test_a_function_makes_models_that_do_not_travel(engine: str, topology: str, make: Any) -> None:
    result = train(make, engine=engine, topology=topology, evaluate=DATA)
    losses = [record["loss"] for record in result.history]
    assert losses[-1] < losses[0]
    result.model.eval()
    assert F.mse_loss(result.model(X), DATA.tensors[1]).item() == pytest.approx(losses[-1])


@pytest.mark.parametrize("engine", ["local", "sim"])
def test_a_model_that_keeps_computed_tensors_comes_back(engine: str) -> None:
    torch.manual_seed(3)
    model = normed()
    first = {name: value.clone() for name, value in model.state_dict().items()}
    result = train(model, engine=engine, evaluate=DATA)
    assert F.mse_loss(result.model(X), DATA.tensors[1]).item() == pytest.approx(result.history[-1]["loss"])
    assert same(model.state_dict(), first), "the caller's own is left alone"


def test_a_function_gives_the_model_that_the_caller_would_have_made() -> None:
    """In its values and in all that learners draw afterwards: bits are those of the model itself."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    before = torch.get_rng_state()
    made = train(make, seed=11)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(11)
    given = train(make(), seed=11)
    assert same(made.state_dict(), given.state_dict())


def test_a_parametrised_model_itself_is_refused_with_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"model cannot travel to the learners' processes.*\(model=\)"):
        train(parametrised())


@pytest.mark.parametrize("model", [nn.LazyLinear(1), lambda: nn.LazyLinear(1)], ids=["model", "function"])
def test_lazy_models_are_refused_before_a_process_starts(model: Any) -> None:
    with pytest.raises(LayoutError, match="'weight' of LazyLinear is lazy and has no shape yet"):
        train(model)


class Shy(nn.Linear):
    """Cannot be copied any more when it is told so."""

    shy = False

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("not me")

    def __reduce_ex__(self, protocol: Any) -> Any:
        if Shy.shy:
            raise RuntimeError("nor so")
        return super().__reduce_ex__(protocol)


def test_weights_come_back_with_the_error_where_no_model_can_be_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = train(Shy(3, 1), wait=False, run_dir=tmp_path / "run")
    while not run.done:
        threading.Event().wait(0.01)
    monkeypatch.setattr(Shy, "shy", True)
    with pytest.raises(
        RunError, match=r"no model could be made of its weights \(RuntimeError: nor so\)"
    ) as caught:
        run.wait()
    result = caught.value.result
    assert result.updates == 12 and result.model is None
    assert same(result.state_dict(), load_file(tmp_path / "run" / "model.safetensors"))


def diverging(session: sl.Session) -> float:
    """Learners that change their copies differently."""
    model = nn.Linear(3, 1)
    optimizer = session.optimizer(model, partial(SGD, lr=0.05))
    for x, y in session.loader(DATA, batch_size=4):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        model.bias.fill_(session.rank)
    return float(session.rank)


@pytest.mark.parametrize("engine", ["local", "sim"])
def test_copies_that_differ_come_back_with_the_error(engine: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the copies of table 0 differ at the end") as caught:
        launched(diverging, learners=2, topology="allreduce", engine=engine, run_dir=tmp_path / "run")
    state = caught.value.result.state_dict()
    assert state["bias"].item() == 0.0 and state["weight"].abs().sum() > 0, "learner 0's"
    assert caught.value.result.updates == 6
    assert same(state, load_file(tmp_path / "run" / "model.safetensors"))


@pytest.mark.parametrize("topology", ["servers", "allreduce"])
def test_what_a_learner_returns_may_not_travel_without_the_run_being_lost(topology: str) -> None:
    def learner(session: sl.Session) -> Any:
        model = nn.Linear(3, 1)
        optimizer = session.optimizer(model, partial(SGD, lr=0.05))
        model(X).sum().backward()
        optimizer.step()
        return threading.Lock() if session.rank else 7

    with pytest.warns(RuntimeWarning, match=r"learner 1 returned could not travel.*returned\[1\] is None"):
        result = launched(learner, learners=2, topology=topology)
    assert result.returned == [7, None] and result.updates == 1
