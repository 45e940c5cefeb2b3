"""Bad input: one clear error that says what to do, before any process starts where that is possible."""

from __future__ import annotations

import pickle
import re
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

import syncline as sl
from syncline.engines.local import forkserver
from syncline.errors import DialError, LayoutError, NotYetError, UsageError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

DATA = TensorDataset(torch.randn(40, 3), torch.randn(40, 1))
LOCK = threading.Lock()
GOOD: dict[str, Any] = {
    "model": nn.Linear(3, 1),
    "data": DATA,
    "loss": F.mse_loss,
    "optimizer": partial(SGD, lr=0.1),
    "learners": 4,
    "batch_size": 4,
    "epochs": 1,
    "threads": 1,
}


class NoLength(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return DATA[index]


def frozen() -> nn.Module:
    return nn.Linear(3, 1).requires_grad_(False)


def train(**changes: Any) -> Any:
    arguments = {**GOOD, **changes}
    return sl.train(arguments.pop("model"), arguments.pop("data"), **arguments)


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("a process was to be started")

    monkeypatch.setattr(forkserver, "connect", refuse)


@pytest.mark.parametrize(
    "changes, kind, words",
    [
        ({"sync": "hardsink"}, DialError, "did you mean 'hardsync'"),
        (
            {"sync": "softsync:5"},
            DialError,
            r"n <= learners, got n = 5 with 4 learners.*⌊4/5⌋ = 0.*softsync:4",
        ),
        ({"sync": "softsync:0"}, DialError, "n >= 1, got 0"),
        ({"sync": "softsync:x"}, DialError, "'x' is not a whole number"),
        ({"sync": "delayed"}, DialError, "lacks its number: write delayed:k"),
        ({"sync": 3}, DialError, "sync must be a text .* or a Sync record, got int"),
        ({"learners": 0}, UsageError, "learners must be a whole number of at least 1, got 0"),
        ({"learners": 2.5}, UsageError, "learners must be a whole number"),
        ({"batch_size": 41}, UsageError, "41 is larger than the data set of 40 examples; use at most 40"),
        ({"batch_size": 0}, UsageError, "batch_size must be a whole number of at least 1"),
        ({"batch_size": 2.5}, UsageError, "batch_size must be a whole number of at least 1"),
        ({"data": TensorDataset(torch.zeros(0, 3))}, UsageError, "the data set is empty"),
        ({"data": None}, UsageError, "data must be a torch Dataset, got NoneType"),
        ({"model": nn.ReLU()}, LayoutError, "ReLU has no parameters.*Register layers as attributes"),
        ({"model": None}, UsageError, "model must be an nn.Module or a callable that makes one"),
        ({"model": dict}, UsageError, "model must be an nn.Module or a callable that makes one, got dict"),
        ({"objective": lambda model, batch: 0}, UsageError, "give either loss=.* or objective="),
        ({"loss": None}, UsageError, "give either loss=.* or objective="),
        ({"steps": 5}, UsageError, "either epochs= or steps=, got epochs=1 and steps=5"),
        ({"epochs": 0}, UsageError, "epochs must be a whole number of at least 1, got 0"),
        ({"epochs": 1.5}, UsageError, "epochs must be a whole number of at least 1, got 1.5"),
        ({"epochs": None, "steps": 0}, UsageError, "steps must be a whole number of at least 1, got 0"),
        (
            {"optimizer": SGD(nn.Linear(1, 1).parameters())},
            UsageError,
            r"got SGD; give .*partial\(torch.optim.SGD",
        ),
        ({"optimizer": torch.optim.LBFGS}, LayoutError, "LBFGS .* use a first-order optimizer"),
        ({"optimizer": lambda params: params}, UsageError, "factory returned .* not a torch.optim.Optimizer"),
        ({"policy": "random"}, UsageError, "policy 'random' is none of ledger, partition, sample"),
        ({"threads": 0}, UsageError, "threads must be a whole number of at least 1"),
        ({"clip_norm": -1.0}, UsageError, "clip_norm must be a number > 0, got -1.0; leave it out"),
        ({"evaluate": 3}, UsageError, "evaluate must be a data set or a function of the model, got int"),
        ({"engine": "cloud"}, UsageError, "unknown engine 'cloud': use one of local, ray, sim"),
        ({"topology": "ring"}, UsageError, "unknown topology 'ring': use servers"),
        ({"topology": "servers:0"}, UsageError, "shards must be a whole number of at least 1"),
        ({"device": "abacus"}, UsageError, "device 'abacus' is none that torch knows"),
        ({"device": 0}, UsageError, 'device must be a text such as "cuda".*got 0'),
        ({"device": []}, UsageError, r"one for each learner, got \[\]"),
        ({"callbacks": 3}, UsageError, "callbacks must be functions of an epoch's record, got 3"),
        ({"callbacks": [None]}, UsageError, "callbacks must be functions of an epoch's record"),
        ({"callbacks": "abc"}, UsageError, "callbacks must be functions of an epoch's record, got 'abc'"),
        ({"clip_norm": "1"}, UsageError, "clip_norm must be a number > 0, got '1'"),
        ({"clip_norm": float("nan")}, UsageError, "clip_norm must be a number > 0, got nan"),
        ({"seed": "a"}, UsageError, "seed must be a whole number of at most 63 bits, got 'a'"),
        ({"seed": None}, UsageError, "seed must be a whole number"),
        ({"seed": 1.5}, UsageError, "seed must be a whole number.*got 1.5"),
        ({"seed": 1 << 70}, UsageError, "seed must be a whole number of at most 63 bits"),
        (
            {"schedule": StepLR(SGD(nn.Linear(1, 1).parameters(), lr=0.1), 1)},
            UsageError,
            r"schedule must not be a StepLR itself: give a callable.*partial\(StepLR, step_size=1\)",
        ),
        ({"schedule": StepLR}, UsageError, "the schedule's factory failed: TypeError: .*step_size"),
        ({"schedule": ReduceLROnPlateau}, UsageError, "ReduceLROnPlateau needs a metric"),
        ({"schedule": lambda optimizer: None}, UsageError, "factory returned NoneType, no LR scheduler"),
        (
            {"evaluate": DataLoader(DATA)},
            UsageError,
            "a function of the model, got DataLoader; give its .dataset",
        ),
        ({"evaluate": TensorDataset(torch.zeros(0, 3))}, UsageError, "evaluate: the data set is empty"),
        ({"evaluate": TensorDataset}, UsageError, "got the class TensorDataset; give an instance of it"),
        ({"data": (DATA.tensors[0], DATA.tensors[1][:39])}, UsageError, "the tensors have 40, 39 examples"),
        (
            {"data": ([1.0], [2.0])},
            UsageError,
            r"a tuple of \(list, list\); give tensors, or TensorDataset\(",
        ),
        ({"data": DataLoader(DATA)}, UsageError, "got DataLoader; give its .dataset, and batch_size="),
        ({"data": {"x": DATA.tensors[0]}}, UsageError, "data must be a torch Dataset, got dict"),
        ({"data": "mnist"}, UsageError, "data must be a torch Dataset, got str"),
        ({"data": TensorDataset}, UsageError, "got the class TensorDataset; give an instance of it"),
        ({"data": NoLength()}, UsageError, "data: NoLength has no length; give it a __len__"),
        ({"data": iter(DATA)}, UsageError, "data must be a torch Dataset, got"),
        ({"loss": nn.MSELoss}, UsageError, r"loss is the class MSELoss: give an instance, MSELoss\(\)"),
        ({"loss": "mse"}, UsageError, "loss must be a function, got 'mse'"),
        ({"loss": None, "objective": "mse"}, UsageError, "objective must be a function, got 'mse'"),
        ({"collate": "pad"}, UsageError, "collate must be a function, got 'pad'"),
        ({"model": frozen()}, LayoutError, "all 2 parameters .* of Linear are frozen .*nothing to train"),
        ({"model": nn.LazyLinear(1)}, LayoutError, "'weight' of LazyLinear is lazy and has no shape yet"),
        ({"model": nn.Linear(3, 1, device="meta")}, LayoutError, "on the meta device and has no values"),
        (
            {"model": nn.Linear},
            UsageError,
            "the function that makes the model failed: TypeError: .*in_features",
        ),
        ({"model": lambda: 1 / 0}, UsageError, "the model failed: ZeroDivisionError"),
        ({"model": nn.Linear(3, 1).state_dict()}, UsageError, "a callable that makes one, got OrderedDict"),
        ({"optimizer": "sgd"}, UsageError, "must be a callable that makes one, got str"),
        (
            {"optimizer": partial(SGD, lr=-1.0)},
            UsageError,
            "factory failed: ValueError: Invalid learning rate",
        ),
        ({"optimizer": partial(SGD, rate=1)}, UsageError, "factory failed: TypeError: .* argument 'rate'"),
        (
            {"optimizer": lambda _: SGD(nn.Linear(2, 2).parameters(), lr=0.1)},
            LayoutError,
            "made SGD of parameters that are not Linear's",
        ),
        (
            {"sync": None},
            DialError,
            "sync must be a text such as 'softsync:2' or a Sync record, got NoneType",
        ),
        ({"sync": {1: "hardsync"}}, DialError, "begin with epoch 0"),
        ({"topology": 2}, UsageError, "topology must be a text such as 'servers:2' or 'allreduce', got 2"),
        ({"engine": None}, UsageError, "unknown engine None"),
        ({"engine": sl.Sim}, UsageError, r"Sim is a class, give Sim\(\)"),
        ({"engine": ["local"]}, UsageError, r"unknown engine \['local'\]"),
        ({"batch_size": "4"}, UsageError, "batch_size must be a whole number of at least 1, got '4'"),
        ({"batch_size": None}, UsageError, "batch_size must be a whole number of at least 1, got None"),
        ({"global_batch_size": "8"}, UsageError, "global_batch_size must be a whole number"),
        ({"learners": "2"}, UsageError, "learners must be a whole number of at least 1, got '2'"),
        ({"warmstart": "1"}, UsageError, "warmstart is a number of updates, at least 0, got '1'"),
        ({"patience": "60"}, UsageError, "patience is a number of seconds > 0, or None, got '60'"),
        ({"run_dir": 3}, UsageError, "run_dir must be the path of a folder, got 3"),
        ({"run_dir": ""}, UsageError, "run_dir must be the path of a folder, got ''"),
        ({"resume": True}, UsageError, "resume must be the path of a folder, got True"),
    ],
)
@pytest.mark.usefixtures("no_process")
def test_train_refuses_before_a_process_starts(changes: dict[str, Any], kind: type, words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        train(**changes)
    assert isinstance(caught.value, UsageError) and isinstance(caught.value, ValueError)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"sync": "diloco:4"}, "not built yet; working now: hardsync, softsync:n, async, downpour"),
        ({"topology": "tree:2,broadcast", "group": 2}, "not built yet with group=2, .* leave broadcast out"),
    ],
)
@pytest.mark.usefixtures("no_process")
def test_what_is_not_built_yet_says_so(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(NotYetError, match=words):
        train(**changes)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", ["cpu", "cuda:1"]])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.usefixtures("no_process")
def test_a_gpu_that_is_not_there(device: Any) -> None:
    with pytest.raises(UsageError, match=r"torch sees .* GPU"):
        train(device=device)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"sync": "softsync:3"}, "n <= learners, got n = 3 with 2"),
        ({"sync": "hardsync:reference_batch=8"}, "batch_size is not known here"),
        ({"learners": -1}, "learners must be a whole number"),
        ({"topology": "servers:many"}, "the number of shards must be a whole number"),
        ({"batch_size": "4"}, "batch_size must be a whole number"),
        ({"seed": "x"}, "seed must be a whole number"),
        ({"clip_norm": "x"}, "clip_norm must be a number > 0"),
    ],
)
@pytest.mark.usefixtures("no_process")
def test_launch_refuses_before_a_process_starts(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        sl.launch(print, **{"learners": 2, **changes})
    with pytest.raises(UsageError, match="launch takes a function"):
        sl.launch("not a function")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "function, arguments, keywords, words",
    [
        (lambda: 1, (), {}, "too many positional arguments"),
        (lambda session, width: 1, (), {}, "missing a required argument: 'width'"),
        (lambda session, /, width: 1, (2,), {"width": 2}, "multiple values for argument 'width'"),
    ],
)
@pytest.mark.usefixtures("no_process")
def test_launch_refuses_a_function_that_cannot_be_called_so(
    function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], words: str
) -> None:
    with pytest.raises(
        UsageError, match=f"cannot be called with a session and what launch was given: {words}"
    ):
        sl.launch(function, *arguments, **keywords)


@pytest.mark.parametrize(
    "keywords, near",
    [
        ({"learner": 2}, ", did you mean 'learners'?"),
        ({"toplogy": "servers"}, ", did you mean 'topology'?"),
        ({"width": 1, "depht": 2}, ", did you mean 'depth'?"),
        ({"zzz": 2}, ""),
    ],
)
@pytest.mark.usefixtures("no_process")
def test_launch_names_the_option_or_argument_that_was_meant(keywords: dict[str, Any], near: str) -> None:
    def function(session: sl.Session, width: int = 1, depth: int = 1) -> None: ...

    unknown = list(keywords)[-1]
    with pytest.raises(UsageError) as refused:
        sl.launch(function, **keywords)
    assert str(refused.value).startswith(
        f"'{unknown}' is no option of launch, and no argument of function(session"
    )
    assert str(refused.value).partition(", did you mean")[1:] == near.partition(", did you mean")[1:]


def test_a_function_of_any_keywords_gets_them() -> None:
    def function(session: sl.Session, **given: int) -> dict[str, int]:
        return given

    assert sl.launch(function, learner=3, learners=1, engine="sim").returned == [{"learner": 3}]


@pytest.mark.usefixtures("no_process")
def test_train_names_the_option_that_was_meant() -> None:
    with pytest.raises(UsageError, match=r"^train has no option 'lerners', did you mean 'learners'\?$"):
        sl.train(nn.Linear(4, 2), (), optimizer=SGD, lerners=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"loss": lambda a, b: F.mse_loss(a, b) * (not LOCK.locked())}, "loss"),
        ({"data": [(LOCK, 1)] * 40}, "data"),
        ({"evaluate": lambda model: {"free": not LOCK.locked()}}, "evaluate"),
    ],
)
@pytest.mark.parametrize("topology", ["servers", "allreduce"])
@pytest.mark.usefixtures("no_process")
def test_what_cannot_be_pickled_is_named_before_a_process_starts(
    changes: dict[str, Any], name: str, topology: str
) -> None:
    words = f"{name} cannot travel to the learners' processes: cannot pickle '_thread.lock' object; what .* made there"
    with pytest.raises(UsageError, match=words) as caught:
        train(topology=topology, sync="hardsync", **changes)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("engine", ["local", "sim"])
def test_a_single_callback_and_a_pair_of_tensors_are_fine(engine: str) -> None:
    told: list[int] = []
    result = train(
        engine=engine,
        learners=2,
        data=DATA.tensors,
        evaluate=DATA.tensors,
        callbacks=lambda record: told.append(record.epoch),
        device=torch.device("cpu"),
    )
    assert told == [0] and result.history[0].examples == 40 and result.history[0]["loss"] > 0


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"loss": lambda a, b: (a - b) ** 2},
            r"loss must be a scalar tensor, got a tensor of shape \(4, 1\); reduce it",
        ),
        ({"loss": lambda a, b: 1.0}, "loss must be a scalar tensor, got float; return the tensor itself"),
        ({"loss": lambda a, b: None}, "must be a scalar tensor, got None; the function has to return it"),
        ({"loss": lambda a, b: F.mse_loss(a, b).detach()}, "the loss does not depend on a parameter"),
        ({"data": TensorDataset(torch.randn(40, 3))}, r"batches of \(input, target\).*use objective="),
    ],
)
@pytest.mark.parametrize("engine", ["local", "sim"])
def test_what_only_a_learner_can_find(changes: dict[str, Any], words: str, engine: str) -> None:
    """One error, from the first learner that meets it: one line, then where; its cause is the usage error."""
    with pytest.raises(sl.LearnerError, match=words) as caught:
        train(learners=2, engine=engine, **changes)
    error = caught.value
    assert isinstance(error.__cause__, UsageError)
    first, empty, *rest = str(error).splitlines()
    assert first == f"learner {error.rank}: {error.__cause__}" and not empty
    assert rest[0] == "Traceback (most recent call last):"


def test_other_errors_of_a_learner_begin_with_their_type_and_words() -> None:
    with pytest.raises(sl.LearnerError) as caught:
        train(learners=1, loss=lambda a, b: 1 / 0)
    assert str(caught.value).splitlines()[0] == "learner 0 raised ZeroDivisionError: division by zero"
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)


@pytest.mark.parametrize(
    "use, words",
    [
        (lambda session: session.optimizer(nn.Linear(1, 1).parameters(), SGD), "takes an nn.Module first"),
        (lambda session: session.optimizer(nn.LazyLinear(1), SGD), "'weight' of LazyLinear is lazy"),
        (lambda session: session.optimizer(nn.Linear(1, 1, device="meta"), SGD), "on the meta device"),
        (lambda session: session.loader(None, batch_size=4), "data must be a torch Dataset, got NoneType"),
        (lambda session: session.loader(DataLoader(DATA), batch_size=4), "got DataLoader; give its .dataset"),
        (lambda session: session.loader(DATA.tensors, batch_size=4), r"got a tuple of \(Tensor, Tensor\)"),
        (lambda session: session.loader(DATA, batch_size=4, collate=3), "collate must be a function, got 3"),
        (lambda session: session.loader(DATA), "give either batch_size= .* or global_batch_size="),
        (lambda session: session.mean("x"), "takes a number or a tensor of real numbers, got str"),
        (lambda session: session.put("x"), "session.put takes an nn.Module, got str"),
    ],
)
@pytest.mark.parametrize("topology", ["servers", "allreduce"])
def test_wrong_uses_of_a_session_are_one_line(use: Any, words: str, topology: str) -> None:
    with pytest.raises(sl.LearnerError, match=words) as caught:
        sl.launch(use, learners=1, topology=topology, engine="sim")
    assert isinstance(caught.value.__cause__, UsageError)
    assert str(caught.value).splitlines()[0] == f"learner 0: {caught.value.__cause__}"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"evaluate": lambda model: 1 / 0}, "evaluation failed: ZeroDivisionError: division by zero"),
        ({"evaluate": lambda model: None}, "evaluation failed: evaluate must return its metrics .* got None"),
        ({"callbacks": [lambda record: 1 / 0]}, "a callback failed: ZeroDivisionError: division by zero"),
    ],
)
@pytest.mark.parametrize("engine", ["local", "sim"])
def test_failures_beside_the_learners(changes: dict[str, Any], words: str, engine: str) -> None:
    with pytest.raises(sl.RunError) as caught:
        train(learners=2, engine=engine, **changes)
    first, empty, *rest = str(caught.value).splitlines()
    assert re.fullmatch(words, first) and not empty and rest[0].startswith("Traceback")


def test_loaders_that_differ_between_learners() -> None:
    def learner(session: sl.Session) -> None:
        session.loader(DATA, batch_size=4 + session.rank)

    with pytest.raises(sl.LearnerError, match=r"batches of 4.*batches of 5|batches of 5.*batches of 4"):
        sl.launch(learner, learners=2)


def test_learners_are_added_by_a_whole_number() -> None:
    run = train(learners=1, wait=False)
    for count in (0, -1, 1.5, "2"):
        with pytest.raises(UsageError, match="count must be a whole number of at least 1"):
            run.add_learners(count)
    assert run.wait(timeout=30).version == 10


@pytest.mark.parametrize("engine", ["local", "sim"])
def test_what_comes_after_the_end_of_a_run_says_so(engine: str) -> None:
    run = train(learners=1, engine=engine, wait=False)
    assert run.wait(timeout=30).throughput > 0
    with pytest.raises(UsageError, match="the run has ended: change comes too late; start another run"):
        run.change("async")
    with pytest.raises(UsageError, match="the run has ended: add_learners comes too late"):
        run.add_learners(1)
    run.stop()  # nothing is left to stop
    assert run.wait().version == 10


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"warmstart": -1}, "warmstart is a number of updates"),
        ({"warmstart": 1.5}, "warmstart is a number of updates"),
        ({"on_error": "ignore"}, 'on_error is "raise" or "continue"'),
        ({"patience": 0}, "patience is a number of seconds > 0"),
        ({"patience": None, "kill_hung": True}, "kill_hung=True needs patience="),
        ({"checkpoint_every": 5}, "checkpoint_every=5 needs run_dir="),
        ({"checkpoint_every": "5 minutes", "run_dir": "x"}, "seconds such as \"30s\", .* got '5 minutes'"),
        ({"checkpoint_every": "0s", "run_dir": "x"}, 'seconds such as "30s"'),
        ({"checkpoint_every": 0, "run_dir": "x"}, "checkpoint_every must be a whole number"),
        ({"keep_checkpoints": 0}, "keep_checkpoints must be a whole number"),
    ],
)
@pytest.mark.usefixtures("no_process")
def test_options_of_faults_and_checkpoints(
    changes: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=words):
        train(**changes)
    assert not list(tmp_path.iterdir())
