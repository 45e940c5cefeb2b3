"""One group: what is cut over its seats is updated by them, and travels for checkpoints and at the end (M16)."""

from __future__ import annotations

import os
import random
import signal
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
from torch.optim.lr_scheduler import LambdaLR

import syncline as sl
from syncline.errors import LostError, UsageError
from syncline.testing.leftovers import children

cloudpickle.register_pickle_by_value(sys.modules[__name__])

DRAW = torch.Generator().manual_seed(0)
X = torch.randn(48, 20, generator=DRAW, dtype=torch.float64)
Y = torch.randint(5, (48,), generator=DRAW)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
PLAN = {"0": "model", "2": "rows", "4": "data"}


def network() -> nn.Module:
    torch.manual_seed(1)
    layers = (nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 5))
    return nn.Sequential(*layers).double()


def halved(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda epoch: 0.5**epoch)


def trained(**options: Any) -> Any:
    settings: dict[str, Any] = {
        "learners": 1, "batch_size": 8, "epochs": 3, "sync": "hardsync", "optimizer": SGD, "schedule": halved
    }  # fmt: skip
    if options.get("engine") != "sim":
        settings |= {"group": 2, "plan": PLAN}
    return sl.train(network(), (X, Y), loss=F.cross_entropy, **{**settings, **options})


def alike(ours: Any, theirs: Any) -> None:
    assert ours.updates == theirs.updates
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], tensor, rtol=1e-10, atol=1e-10)


class Counted(LambdaLR):
    """Notes how many parameters the seats update, and how their state reads, after the first epoch."""

    def __init__(self, folder: Path, optimizer: Any) -> None:
        self.folder, self.of = folder, optimizer
        super().__init__(optimizer, lambda epoch: 0.5**epoch)

    def step(self, *args: Any) -> None:
        super().step(*args)
        if getattr(self, "last_epoch", 0) == 1 and hasattr(self.of, "bind"):
            state = self.of.state_dict()
            self.of.load_state_dict(state)
            again = self.of.state_dict()
            for number, entry in state["state"].items():
                for key, value in entry.items():
                    torch.testing.assert_close(again["state"][number][key], value, rtol=0.0, atol=0.0)
            shapes = [tuple(entry["exp_avg"].shape) for _, entry in sorted(state["state"].items())]
            (self.folder / str(os.getpid())).write_text(f"{len(self.of._own)} {shapes}")


WHOLE = [(16, 20), (16,), (12, 16), (12,), (5, 12), (5,)]
THROUGH: dict[str, dict[str, Any]] = {
    "switched off": {"local_update": False},
    "tested": {"evaluate": (X, Y)},
    "clipped": {"clip_norm": 100.0},
    "a reference": {"sync": "hardsync:reference_batch=2"},
}


@pytest.mark.parametrize("case", ["alone", *THROUGH])
def test_seats_update_what_is_cut_over_them_where_that_is_the_same(case: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": ADAM, **THROUGH.get(case, {})}
    ours = trained(group=3, schedule=partial(Counted, tmp_path), **options)
    options.pop("local_update", None)
    alike(ours, trained(engine="sim", **options))
    own = 4 if case == "alone" else 0
    assert [file.read_text() for file in tmp_path.iterdir()] == [f"{own} {WHOLE}"] * 3


@pytest.mark.parametrize("sync", ["softsync:1", "async", "ssp:2"])
def test_any_dial_that_takes_a_gradient_as_it_is_will_do(sync: str) -> None:
    alike(trained(sync=sync), trained(engine="sim", sync=sync))


def test_a_model_that_is_cut_everywhere_has_nothing_to_publish() -> None:
    alike(trained(plan={"0": "model", "2": "model", "4": "model"}), trained(engine="sim"))


# -- checkpoints ---------------------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize("optimizer", [SGD, ADAM])
@pytest.mark.parametrize("group", [1, 2, 3])
def test_a_checkpoint_has_the_whole_models_layout(optimizer: Any, group: int, tmp_path: Path) -> None:
    trained(optimizer=optimizer, epochs=1, run_dir=tmp_path / "run")
    plan = {"2": "model"} if group > 1 else None
    again = trained(optimizer=optimizer, group=group, plan=plan, resume=tmp_path / "run")
    alike(again, trained(engine="sim", optimizer=optimizer))


def begun(folder: Path, **options: Any) -> sl.Run:
    """An epoch is done."""
    one = threading.Event()
    run = trained(
        optimizer=ADAM, epochs=12, wait=False, run_dir=folder, callbacks=lambda _: one.set(), schedule=None, **options
    )  # fmt: skip
    assert one.wait(60)
    return run


def undisturbed() -> Any:
    return trained(engine="sim", optimizer=ADAM, epochs=12, schedule=None)


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    with begun(tmp_path / "run", checkpoint_every=5) as run:
        run.stop()
        assert run.wait().updates < 72
    again = trained(optimizer=ADAM, epochs=12, schedule=None, resume=tmp_path / "run")
    alike(again, undisturbed())


@pytest.mark.parametrize("victim", ["a shard", "the first seat", "another seat"])
def test_a_lost_seat_is_a_lost_shard_and_the_run_goes_back_to_its_checkpoint(
    victim: str, tmp_path: Path
) -> None:
    with begun(tmp_path / "run", checkpoint_every=5) as run:
        pids = run._handle.pids()
        (other,) = children(pids["learner 0"])
        found = {"a shard": pids["shard 0"], "the first seat": pids["learner 0"], "another seat": other}
        os.kill(found[victim], signal.SIGKILL)
        result = run.wait()
    assert "recovered" in {event.kind for event in result.events}
    alike(result, undisturbed())


def test_without_a_checkpoint_a_lost_seat_ends_the_run() -> None:
    one = threading.Event()
    run = trained(epochs=1000, wait=False, schedule=None, replace=True, callbacks=lambda _: one.set())
    assert one.wait(60)
    os.kill(run._handle.pids()["learner 0"], signal.SIGKILL)
    with pytest.raises(
        LostError, match=r"learner 0 is lost with its part of the table .*there is no checkpoint"
    ):
        run.wait()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_seats_and_shards_die_at_any_moment(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    with begun(tmp_path / "run", checkpoint_every=draw.randint(1, 4)) as run:
        for _ in range(2):
            threading.Event().wait(draw.uniform(0.0, 0.4))  # any moment
            pids = run._handle.pids()
            seats = [seat for pid in pids.values() for seat in (pid, *children(pid))]
            if seats and not run.done:
                os.kill(draw.choice(seats), signal.SIGKILL)
        alike(run.wait(100), undisturbed())


def puts(session: Any) -> list[float]:
    model = nn.Linear(2, 2, bias=False)
    optimizer = session.optimizer(model, SGD)
    found = model.weight.flatten().tolist()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model.weight.fill_(7.0)
    session.put(model)
    return found


@pytest.mark.parametrize("engine", ["local", "sim"])
def test_what_is_put_at_the_end_is_in_the_last_checkpoint(engine: str, tmp_path: Path) -> None:
    sl.launch(puts, learners=1, engine=engine, run_dir=tmp_path / "run")
    again = sl.launch(puts, learners=1, engine=engine, resume=tmp_path / "run")
    assert again.returned == [[7.0] * 4]


# -- refusals ------------------------------------------------------------------------------------------------


def test_neither_learners_nor_dials_join_a_group_that_updates_itself() -> None:
    with trained(epochs=200, wait=False, schedule=None) as run:
        for ask in (lambda: run.add_learners(1), lambda: run.change("softsync:1")):
            with pytest.raises(
                UsageError, match=r"one group updates what is cut over its seats .*local_update=False"
            ):
                ask()
        run.stop()
