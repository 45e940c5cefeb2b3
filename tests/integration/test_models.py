"""Models, states and data as users have them, with real processes (M5, M6, M7)."""

from __future__ import annotations

import copy
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import syncline as sl
from syncline.errors import LayoutError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

launch = partial(sl.launch, threads=1)
train = partial(sl.train, threads=1)


def numbers(size: int) -> TensorDataset:
    """Each example says which one it is."""
    return TensorDataset(torch.arange(size))


def step(opt: torch.optim.Optimizer, loss: Tensor) -> None:
    opt.zero_grad()
    loss.backward()
    opt.step()


# -- buffers and several models --------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["hardsync", "async"])
def test_buffers_stay_with_the_learner_and_are_averaged_in_the_result(sync: str) -> None:
    """M6: the mean of float buffers over learners, the maximum of integer ones."""

    def learner(session: sl.Session) -> dict[str, Tensor]:
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
        model[0].running_mean.fill_(float(session.rank))  # overwritten by the lowest rank's
        opt = session.optimizer(model, partial(SGD, lr=0.01))
        assert model[0].running_mean.eq(0).all()
        for _ in range(3 + 2 * session.rank):
            step(opt, model(torch.randn(16, 3) + 10 * session.rank).sum())
        return {name: value.clone() for name, value in model[0].named_buffers()}

    result = launch(learner, learners=2, sync=sync)
    own, state = result.returned, result.state_dict()
    assert (own[1]["running_mean"] > own[0]["running_mean"] + 1).all()
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(state[f"0.{name}"], (own[0][name] + own[1][name]) / 2)
    assert [learner["num_batches_tracked"].item() for learner in own] == [3, 5]
    assert state["0.num_batches_tracked"].item() == 5


def test_a_trained_model_keeps_its_own_buffers_and_loads_strictly() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    data = TensorDataset(torch.randn(64, 4) + 3, torch.randint(2, (64,)))
    result = train(
        model, data, loss=F.cross_entropy, optimizer=partial(SGD, lr=0.1), learners=2, batch_size=8, epochs=2
    )
    copy.deepcopy(model).load_state_dict(result.state_dict(), strict=True)
    assert (result.model[0].running_mean > 0.5).all()
    assert model[0].running_mean.eq(0).all()  # the caller's model is not touched


@pytest.mark.parametrize("sync", ["hardsync", "softsync:1", "async"])
def test_two_optimizers_in_one_session(sync: str) -> None:
    """M6: a GAN; each table has its own versions, and equals plain PyTorch with one learner."""

    def gan(make: Any, draws: torch.Generator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        torch.manual_seed(1)
        maker = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        judge = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        adam, sgd = make(maker, partial(Adam, lr=0.01)), make(judge, partial(SGD, lr=0.05, momentum=0.5))
        for turn in range(12):
            real = torch.randn(8, 2, generator=draws) + 2
            fake = maker(torch.randn(8, 4, generator=draws))
            step(sgd, F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean())
            if turn % 3 == 0:
                step(adam, F.softplus(-judge(fake)).mean())
        return maker.state_dict(), judge.state_dict()

    def learner(session: sl.Session) -> Any:
        return gan(session.optimizer, torch.Generator().manual_seed(session.rank))

    wanted = gan(lambda model, factory: factory(model.parameters()), torch.Generator().manual_seed(0))
    alone = launch(learner, learners=1, sync=sync)
    for table in (0, 1):
        for name, value in wanted[table].items():
            assert torch.equal(alone.returned[0][table][name], value)
            assert torch.equal(alone.state_dict(table)[name], value)
    both = launch(learner, learners=2, sync=sync).statistics.tables
    assert (both[0].gradients, both[1].gradients) == (2 * 4, 2 * 12)
    if sync == "hardsync":
        assert (both[0].version, both[1].version) == (4, 12)


# -- writes, means, metrics ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["hardsync", "async"])
def test_put_makes_writes_global(sync: str) -> None:
    """M6: a write lasts until the next read, unless it was put."""

    def learner(session: sl.Session) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        opt = session.optimizer(model, partial(SGD, lr=0.0))
        seen = []
        for value, put in ((7.0, False), (9.0, True)):
            if session.rank == 0:
                with torch.no_grad():
                    model.weight.fill_(value)
                if put:
                    session.put(model)
            session.mean(0.0)  # everybody steps after the write
            step(opt, model(torch.ones(1, 1)).sum())
            session.mean(0.0)
            step(opt, model(torch.ones(1, 1)).sum())
            seen.append(model.weight.item())
        return seen

    with pytest.warns(sl.errors.SynclineWarning, match="'weight' was changed in place"):
        result = launch(learner, learners=2, sync=sync, seed=3)
    torch.manual_seed(3)
    first = nn.Linear(1, 1, bias=False).weight.item()
    if sync == "hardsync":
        assert result.returned == [[first, 9.0], [first, 9.0]]
    assert [seen[1] for seen in result.returned] == [9.0, 9.0]
    assert result.state_dict()["weight"].item() == 9.0


def test_put_without_a_table_is_refused() -> None:
    def learner(session: sl.Session) -> None:
        session.put(nn.Linear(1, 1))

    with pytest.raises(sl.LearnerError, match="no optimizer of this session holds") as caught:
        launch(learner, learners=1)
    assert isinstance(caught.value.__cause__, sl.UsageError)


def test_mean_and_log() -> None:
    """`mean` is over all live learners, for numbers and tensors; `log` goes to the run's record."""

    def learner(session: sl.Session) -> tuple[float, Tensor, float]:
        session.log(loss=torch.tensor(float(session.rank)), step=1)
        number = session.mean(session.rank)
        tensor = session.mean(torch.tensor([1.0, float(session.rank)]))
        return number, tensor, session.mean(5.0) if session.rank < 2 else -1.0  # rank 2 leaves before

    result = launch(learner, learners=3)
    for rank, (number, tensor, last) in enumerate(result.returned):
        assert number == 1.0
        assert tensor.dtype == torch.float32 and tensor.tolist() == [1.0, 1.0]
        assert last == (5.0 if rank < 2 else -1.0)
    logged = sorted((rank, metrics) for rank, _, metrics in result.logs)
    assert logged == [(rank, {"loss": float(rank), "step": 1}) for rank in range(3)]


# -- optimizer states ------------------------------------------------------------------------------------------


def adam_steps(model: nn.Module, opt: torch.optim.Optimizer, start: int, stop: int) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(20, 4, 30, generator=generator)
    for index in range(start, stop):
        step(opt, model(inputs[index]).square().mean())


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 3))


FACTORY = partial(Adam, lr=0.01, amsgrad=True)


def steps_in_session(
    session: sl.Session, weights: Any, state: Any, start: int, stop: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    model = wide()
    if weights is not None:
        model.load_state_dict(weights)
    opt = session.optimizer(model, FACTORY)
    if state is not None:
        opt.load_state_dict(state)
    adam_steps(model, opt, start, stop)
    return model.state_dict(), opt.state_dict()


def assert_states_equal(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert got["state"].keys() == wanted["state"].keys()
    for number, entry in wanted["state"].items():
        assert got["state"][number].keys() == entry.keys()
        for key, value in entry.items():
            assert torch.equal(got["state"][number][key], value), (number, key)
    for mine, theirs in zip(got["param_groups"], wanted["param_groups"], strict=True):
        assert {k: v for k, v in mine.items() if k != "betas"} == {
            k: v for k, v in theirs.items() if k != "betas"
        }
        assert tuple(mine["betas"]) == tuple(theirs["betas"])


@pytest.mark.parametrize("before, after", [(1, 3), (3, 2)])
def test_states_go_both_ways_and_to_another_number_of_shards(before: int, after: int) -> None:
    """M5: session → session with other shards, session → plain, plain → session; all the bits of one run."""
    model = wide()
    opt = FACTORY(model.parameters())
    adam_steps(model, opt, 0, 6)
    middle, middle_state = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())
    adam_steps(model, opt, 6, 12)

    first = launch(steps_in_session, None, None, 0, 6, learners=1, topology=f"servers:{before}")
    weights, state = first.returned[0]
    assert_states_equal(state, middle_state)
    assert all(torch.equal(weights[name], value) for name, value in middle.items())

    resumed = wide()  # session -> plain
    resumed.load_state_dict(weights)
    plain = FACTORY(resumed.parameters())
    plain.load_state_dict(copy.deepcopy(state))  # torch takes the tensors over as they are
    adam_steps(resumed, plain, 6, 12)
    further = [resumed.state_dict()]
    for source in ((weights, state), (middle, middle_state)):  # session -> session, plain -> session
        run = launch(steps_in_session, *source, 6, 12, learners=1, topology=f"servers:{after}")
        further.append(run.returned[0][0])
        assert_states_equal(run.returned[0][1], opt.state_dict())
    for weights in further:
        assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_every_learner_may_load_the_same_state() -> None:
    """M5: with two learners, under hardsync; the steps count on."""
    model = wide()
    opt = FACTORY(model.parameters())
    adam_steps(model, opt, 0, 6)
    result = launch(
        steps_in_session, model.state_dict(), opt.state_dict(), 6, 10, learners=2, topology="servers:2"
    )
    adam_steps(model, opt, 6, 10)  # both learners compute the same gradient: its mean is that gradient
    for weights, state in result.returned:
        torch.testing.assert_close(weights["0.weight"], model[0].weight.detach())
        assert {entry["step"].item() for entry in state["state"].values()} == {10.0}


# -- refusals --------------------------------------------------------------------------------------------------


def one_loss(session: sl.Session, model: nn.Module, factory: Any) -> None:
    session.optimizer(model, factory)


@pytest.mark.parametrize(
    "model, factory, words",
    [
        (nn.Embedding(4, 2, sparse=True), partial(SGD, lr=0.1), "sparse=False"),
        (nn.Linear(2, 2), LBFGS, "LBFGS .* first-order optimizer"),
        (nn.ReLU(), partial(SGD, lr=0.1), "ReLU has no parameters"),
        (nn.Linear(2, 2), lambda params: None, "factory returned NoneType"),
    ],
)
def test_models_that_cannot_make_a_table_are_refused(model: nn.Module, factory: Any, words: str) -> None:
    with pytest.raises(sl.LearnerError, match=words) as caught:
        launch(one_loss, model, factory, learners=1)
    assert isinstance(caught.value.__cause__, sl.UsageError)
    with pytest.raises(sl.UsageError, match=words):  # train finds it before a process starts
        train(model, numbers(8), objective=lambda m, b: m(b[0]).sum(), optimizer=factory, batch_size=4)


def test_a_sparse_gradient_is_refused_where_it_appears() -> None:
    def learner(session: sl.Session) -> None:
        model = nn.Linear(3, 1)
        opt = session.optimizer(model, partial(SGD, lr=0.1))
        model.weight.grad = torch.ones(1, 3).to_sparse()
        opt.step()

    with pytest.raises(sl.LearnerError, match="sparse gradient"):
        launch(learner, learners=1)


def test_a_parameter_in_two_optimizers_is_refused() -> None:
    """M6."""

    def learner(session: sl.Session) -> None:
        body, head = nn.Linear(2, 2), nn.Linear(2, 2)
        session.optimizer(nn.Sequential(body, head), partial(SGD, lr=0.1))
        session.optimizer(nn.ModuleDict({"mine": head}), partial(SGD, lr=0.1))

    with pytest.raises(sl.LearnerError, match=r"'mine.weight' is in two optimizers .*'1.weight'") as caught:
        launch(learner, learners=2)
    assert isinstance(caught.value.__cause__, LayoutError)


@pytest.mark.parametrize(
    "widths, words",
    [((3, 4), (r"weight float32\[1, 3\]", r"weight float32\[1, 4\]")), ((3, 0), ("weight", "only"))],
)
def test_layouts_that_differ_are_refused_with_both_shown(
    widths: tuple[int, int], words: tuple[str, str]
) -> None:
    """M6."""

    def learner(session: sl.Session) -> None:
        width = widths[session.rank]
        model = nn.Linear(width, 1) if width else nn.ParameterDict({"only": torch.zeros(1)})
        session.optimizer(model, partial(SGD, lr=0.1))

    with pytest.raises(sl.LearnerError, match="built another layout") as caught:
        launch(learner, learners=2)
    for each in words:
        assert caught.match(each)


def test_groups_cannot_be_added_to_an_open_table() -> None:
    def learner(session: sl.Session) -> None:
        opt = session.optimizer(nn.Linear(2, 2), partial(SGD, lr=0.1))
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})

    with pytest.raises(sl.LearnerError, match="cannot be added to a table that is open"):
        launch(learner, learners=1)


# -- data --------------------------------------------------------------------------------------------------------


class Squares(Dataset[dict[str, Tensor]]):
    """Own Dataset: dictionaries, one by one; a thread reads ahead."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"index": torch.tensor(index), "x": torch.tensor([index / self.size])}


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(23))


def test_dict_batches_through_an_objective() -> None:
    def objective(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"]) - 2 * batch["x"]).square().mean()

    result = train(
        nn.Linear(1, 1),
        Squares(60),
        objective=objective,
        optimizer=partial(SGD, lr=0.3),
        sync="hardsync",
        learners=2,
        batch_size=6,
        epochs=20,
        evaluate=Squares(30),
    )
    assert [record.epoch for record in result.history] == list(range(20))
    losses = [record["loss"] for record in result.history]  # the evaluation's
    assert losses[-1] < 0.1 * losses[0]
    assert "accuracy" not in result.history[0].metrics


def seen_by(
    session: sl.Session, data: Any, epochs: int, policy: str = "ledger", ahead: int | None = None
) -> list[list[int]]:
    """Indices of every batch that this learner took, by epoch, with a step for each."""
    model = nn.Linear(1, 1)
    opt = session.optimizer(model, partial(SGD, lr=0.0))
    loader = session.loader(data, batch_size=4, policy=policy, ahead=ahead)
    seen: list[list[int]] = [[] for _ in range(epochs)]
    while loader.epoch < epochs:
        epoch = loader.epoch
        for batch in loader:
            indices = batch["index"] if isinstance(batch, dict) else batch[0]
            seen[epoch] += indices.tolist()
            step(opt, model(indices.float()[:, None]).mean())
    return seen


def joined(returned: list[list[list[int]]], epoch: int) -> Counter[int]:
    return Counter(index for learner in returned for index in learner[epoch])


@pytest.mark.sweep(5)
@pytest.mark.parametrize("sync", ["hardsync", "softsync:1", "async", "delayed:1"])
@pytest.mark.parametrize(
    "data, policy", [(numbers(50), "ledger"), (Squares(50), "ledger"), (numbers(50), "partition")]
)
def test_every_example_once_in_every_epoch(sync: str, data: Any, policy: str) -> None:
    """M7: ledger and partition, for tensors in memory and for a data set that a thread reads ahead."""
    result = launch(seen_by, data, 3, policy, learners=3, sync=sync)
    for epoch in range(3):
        assert joined(result.returned, epoch) == Counter(range(50))
    assert result.statistics.tables[0].examples == 150
    order = sl.epoch_order(50, seed=0, epoch=1, policy=policy, parts=3).tolist()
    if sync == "hardsync" and policy == "ledger":  # joint batch t is the t-th slice of λμ
        for rank, learner in enumerate(result.returned):
            starts = range(4 * rank, 50, 12)
            assert learner[1] == [index for start in starts for index in order[start : start + 4]]


@pytest.mark.parametrize("sync", ["hardsync", "softsync:1", "async"])
def test_a_loop_over_epochs_makes_that_many(sync: str) -> None:
    """M7: also for an initial learner that opens its loader when the others are through already."""

    def learner(session: sl.Session) -> None:
        model = nn.Linear(1, 1)
        opt = session.optimizer(model, partial(SGD, lr=0.0))
        if session.rank == 1:
            time.sleep(0.3)
        for _ in range(3):
            for (indices,) in session.loader(data, batch_size=5):
                step(opt, model(indices.float()[:, None]).mean())

    data = numbers(20)
    assert launch(learner, learners=2, sync=sync).statistics.tables[0].examples == 3 * 20


def test_partitions_are_the_same_subsets_every_epoch() -> None:
    """M7 (D2, A5): fixed and disjoint, in a new order each epoch."""
    result = launch(seen_by, numbers(48), 3, "partition", learners=3, sync="hardsync")
    for learner in result.returned:
        assert len(set(learner[0])) == 16
        assert set(learner[0]) == set(learner[1]) == set(learner[2])
        assert learner[0] != learner[1]


def test_sampling_draws_with_replacement() -> None:
    """M7 (R5): as many as the data set has, by the published rule."""
    result = launch(seen_by, numbers(64), 2, "sample", learners=2, sync="hardsync")
    for epoch in range(2):
        drawn = joined(result.returned, epoch)
        assert drawn.total() == 64 and len(drawn) < 64
        assert drawn == Counter(sl.epoch_order(64, seed=0, epoch=epoch, policy="sample").tolist())


@pytest.mark.parametrize("sync", ["hardsync", "async"])
def test_iterable_data_is_split_by_rank(sync: str) -> None:
    """M7: and counted: 23 examples in each of two epochs."""

    def learner(session: sl.Session) -> list[int]:
        model = nn.Linear(1, 1)
        opt = session.optimizer(model, partial(SGD, lr=0.0))
        seen = []
        for _ in range(2):
            for batch in session.loader(Stream(), batch_size=4):
                seen += batch.tolist()
                step(opt, model(batch.float()[:, None]).mean())
        return seen

    result = launch(learner, learners=2, sync=sync)
    assert result.returned[0] == [*range(0, 23, 2)] * 2
    assert result.returned[1] == [*range(1, 23, 2)] * 2
    assert result.statistics.tables[0].examples == 46


def test_train_takes_an_iterable() -> None:
    result = train(
        nn.Linear(1, 1),
        Stream(),
        objective=lambda model, batch: model(batch.float()[:, None]).square().mean(),
        optimizer=partial(SGD, lr=1e-4),
        sync="hardsync",
        learners=2,
        batch_size=4,
        epochs=2,
    )
    assert (result.version, result.gradients) == (6, 12)


@pytest.mark.parametrize("sync", ["hardsync", "softsync:1", "async"])
@pytest.mark.parametrize("data", [numbers(60), Squares(60)])
def test_leaving_a_loader_early(sync: str, data: Any) -> None:
    """M7: break, then a whole epoch; nothing hangs, nothing unread is counted as folded."""

    def learner(session: sl.Session) -> list[int]:
        model = nn.Linear(1, 1)
        opt = session.optimizer(model, partial(SGD, lr=0.0))
        loader = session.loader(data, batch_size=5)
        counts = []
        for limit in (2, 0, 100):
            taken = 0
            for batch in loader:
                if taken == limit:
                    break
                taken += 1
                step(opt, model(torch.ones(1, 1)).mean() + 0 * len(batch))
            counts.append(taken)
        session.mean(0.0)
        return counts

    result = launch(learner, learners=2, sync=sync)
    assert [counts[1] for counts in result.returned] == [0, 0]
    assert all(counts[0] <= 2 for counts in result.returned)
    assert sum(counts[0] + counts[2] for counts in result.returned) == result.gradients
    assert sum(counts[2] for counts in result.returned) >= 12  # the last epoch is whole


@pytest.mark.parametrize("sync", ["hardsync", "async"])
def test_several_loaders(sync: str) -> None:
    """M7: two data sets side by side, batches of both in one gradient."""

    def learner(session: sl.Session) -> list[list[int]]:
        model = nn.Linear(1, 1)
        opt = session.optimizer(model, partial(SGD, lr=0.0))
        large, small = session.loader(forty, batch_size=4), session.loader(Squares(20), batch_size=2)
        assert session.loader(forty, batch_size=4) is large
        assert len({id(session.loader(numbers(8), batch_size=4)) for _ in range(5)}) == 5  # five data sets
        seen: list[list[int]] = [[], []]
        for (first,), second in zip(large, small, strict=False):
            seen[0] += first.tolist()
            seen[1] += second["index"].tolist()
            step(opt, model(first.float()[:, None]).mean() + model(second["x"]).mean())
        return seen

    forty = numbers(40)
    result = launch(learner, learners=2, sync=sync)
    for number, size in ((0, 40), (1, 20)):
        seen = Counter(index for learner in result.returned for index in learner[number])
        assert max(seen.values()) == 1
        if sync == "hardsync":
            assert len(seen) == size
    assert result.statistics.tables[0].examples == sum(len(part) for own in result.returned for part in own)
