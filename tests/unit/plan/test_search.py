"""Plans of models: SINGA's counts, seconds on a cluster, limits, files, and what is refused."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncline.cluster import Cluster, Compute, Link
from syncline.errors import UsageError
from syncline.models import AlexNet
from syncline.nn.layers import Dense
from syncline.parallel import Group, partition
from syncline.plan import Plan, plan
from tests.unit.plan.planned_networks import BATCH, ETHERNET, Ways, mlp


@pytest.fixture(scope="module")
def alexnet() -> AlexNet:
    with torch.device("meta"):
        return AlexNet(dropout=0.0)


# -- SINGA (S3, S4) --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("costs", ["singa", "measured"])
def test_alexnets_convolutions_are_data_parallel_and_its_dense_layers_model_parallel(
    alexnet: AlexNet, costs: str
) -> None:
    found = plan(alexnet, BATCH, ETHERNET, 4, costs=costs)
    for name, way in found.choices.items():
        assert way == ("model" if name.startswith("fc") else "data"), name
    rows = {row.layer: (row.parameters, row.features) for row in found.rows}
    assert rows["conv1"] == (34_944, 290_400)
    assert rows["pool"] == (0, 69_984)
    assert rows["fc6"] == (37_752_832, 4_096)
    assert list(rows) == [
        "conv1", "norm", "pool", "conv2", "norm#2", "pool#2", "conv3", "conv4", "conv5", "pool#3", "fc6", "fc7", "fc8"
    ]  # fmt: skip


def test_without_a_group_the_best_size_that_divides_the_workers_is_taken(alexnet: AlexNet) -> None:
    found = plan(alexnet, BATCH, workers=16)
    totals = {size: plan(alexnet, BATCH, group=size, workers=16).bytes for size in (1, 2, 4, 8, 16)}
    assert found.bytes == min(totals.values()) and found.group == min(totals, key=totals.__getitem__)


# -- all parameters ----------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """Parameters that functions read, that two layers share, and that nothing reads; a layer that flattens."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(3, 6))
        self.words, self.deep, self.out = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        self.out.weight, self.own = self.words.weight, Doubled(6, 6)
        self.unused, self.flat = nn.Linear(2, 2), Dense(18, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.own(self.deep(self.words(tokens) + self.place))
        return self.flat(x) + torch.special.xlogy(self.out(x).mean((1, 2)).exp(), 2.0)[:, None]


class Doubled(nn.Linear):
    """A dense layer that overrides `forward`, so that no rule fits."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("costs", ["singa", "measured"])
@pytest.mark.parametrize("group", [1, 2, None])
def test_a_plan_has_all_parameters_or_names_those_of_no_layer(
    costs: str, group: int | None, tmp_path: Path
) -> None:
    model, tokens = Tokens(), torch.zeros(8, 3, dtype=torch.int64)
    found = plan(model, tokens, ETHERNET, group, workers=4, costs=costs)
    assert sum(row.parameters for row in found.rows) == sum(p.numel() for p in model.parameters())
    rest = {"place": 18, "own.weight": 36, "own.bias": 6, "unused.weight": 4, "unused.bias": 2}
    assert found.whole == rest and rest.keys().isdisjoint(found.choices)
    foot = str(found).splitlines()[-1]
    assert foot.startswith("66 parameters are read by no layer") and foot.endswith(", ".join(rest))
    assert all(row.bytes > 0 and row.memory > 0 for row in found.rows if row.layer in rest)
    found.save(tmp_path / "plan.json")
    mine = Group()
    mine.size = found.group
    made = partition(model, Plan.load(tmp_path / "plan.json"), tokens, mine)
    assert all(made.parts[name].replicated for name in rest)
    model.place = nn.Parameter(torch.zeros(3, 4))
    with pytest.raises(UsageError, match=r"its layer 'place' has 18 parameters, here it has 12"):
        partition(model, found, tokens, mine)


def test_parameters_of_no_layer_count_against_the_limit_on_memory() -> None:
    model, tokens = Tokens(), torch.zeros(8, 3, dtype=torch.int64)
    least = plan(model, tokens, group=2, memory=1e9).memory
    smaller = Tokens()
    smaller.unused = nn.Identity()
    assert plan(smaller, tokens, group=2, memory=1e9).memory == least - 3 * 4 * 6
    with pytest.raises(UsageError, match=r"a process needs at least [\d,]+ bytes"):
        plan(model, tokens, group=2, memory=100)


# -- the optimum of whole plans ----------------------------------------------------------------------------------


@pytest.mark.parametrize("costs", ["singa", "measured"])
def test_no_other_choice_is_cheaper_than_the_plan(costs: str) -> None:
    model, x = Ways(), torch.empty(8, 3, 8, 8)
    free = plan(model, x, ETHERNET, 4, costs=costs)
    names, best = list(free.choices), _cost(free)
    ways = ("data", "model") if costs == "singa" else ("data", "model", "spatial")
    every = list(itertools.product(*(("data", "model") if name == "out" else ways for name in names)))
    for choice in every[:: 1 + len(every) // 100]:
        given = dict(zip(names, choice, strict=True))
        assert _cost(plan(model, x, ETHERNET, 4, costs=costs, given=given)) >= best * (1 - 1e-9)
    assert set(names) == {"first", "one", "two", "add", "add_1", "out"}


def _cost(found: Plan) -> float:
    return found.seconds if found.costs == "measured" else found.bytes


def test_memory_limits_what_a_process_holds_and_says_when_nothing_fits() -> None:
    model, x = mlp(10, 1000, 100, 100), torch.empty(300, 10)
    slow = Cluster(compute=Compute(base=0.1), card=Link(bandwidth=1e6))
    free = plan(model, x, slow, 2, states=8)
    assert free.choices["2"] == "data"
    tight = plan(model, x, slow, 2, states=8, memory=free.memory * 0.9)
    assert tight.memory <= free.memory * 0.9 and tight.seconds > free.seconds
    assert tight.choices["2"] == "model"
    with pytest.raises(
        UsageError, match=r"a process needs at least [\d,]+ bytes with 2 in the group, the limit is 1,000"
    ):
        plan(model, x, slow, 2, memory=1000)


def test_planning_leaves_the_garbage_collector_as_it_was() -> None:
    assert gc.isenabled()
    plan(mlp(6, 8), torch.empty(4, 6), group=2)
    with pytest.raises(UsageError):
        plan(mlp(6, 8), torch.empty(4, 7), group=2)
    assert gc.isenabled()


# -- records -----------------------------------------------------------------------------------------------------


def test_a_plan_is_a_table_a_file_and_can_be_edited(tmp_path: Path) -> None:
    model, x = mlp(30, 400, 20), torch.zeros(8, 30)
    found = plan(model, x, ETHERNET, 2)
    lines = str(found).splitlines()
    assert lines[0] == "a group of 2, 8 examples each, costs measured"
    assert lines[1].split() == ["layer", "choice", "parameters", "bytes", "seconds", "memory"]
    assert [line.split()[0] for line in lines[2:]] == ["0", "2", "all"] and "12,400" in lines[2]
    found.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == found and str(again) == str(found)
    again.choices["0"] = "data"
    assert str(again).splitlines()[2].split()[1] == "data"


def test_a_plan_knows_what_its_model_reads(tmp_path: Path) -> None:
    model, x = mlp(30, 400, 20), torch.zeros(8, 30)
    plan(model, x, ETHERNET, 1).save(tmp_path / "plan.json")
    found = Plan.load(tmp_path / "plan.json")
    assert [(t.shape, t.dtype, t.is_meta) for t in found.example] == [((8, 30), torch.float32, True)]
    with torch.inference_mode():
        assert torch.equal(partition(model, found)(x), model(x))
    with pytest.raises(UsageError, match=r"give an example of the model's input, or a Plan"):
        partition(model, {"0": "model"})


def test_a_machine_of_two_cores_is_planned_for_two() -> None:
    model, x = mlp(30, 400, 20), torch.zeros(8, 30)
    machine = Cluster(learners_per_machine=None, cores=2, memory=Link(bandwidth=1e9))
    assert plan(model, x, machine).workers == 2


def test_a_plan_by_hand_is_kept_and_priced() -> None:
    model, x = mlp(30, 400, 400, 20), torch.zeros(8, 30)
    found = plan(model, x, ETHERNET, 2, given={"*": "data", "4": "model"})
    assert found.choices == {"0": "data", "2": "data", "4": "model"}


def test_models_are_planned_as_shapes_and_stay_as_they_are() -> None:
    model = mlp(30, 400, 20)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    plan(model, torch.zeros(8, 30), ETHERNET, 2)
    with torch.device("meta"):
        shapes = mlp(30, 400, 20)
    assert plan(shapes, torch.empty(8, 30, device="meta"), ETHERNET, 2) == plan(
        model, torch.zeros(8, 30), ETHERNET, 2
    )
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


# -- refusals ----------------------------------------------------------------------------------------------------


class Peeking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


X = torch.zeros(8, 30)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no group": (lambda: plan(mlp(30, 4), X, ETHERNET), r"say group= .* or workers="),
    "a cluster's name": (lambda: plan(mlp(30, 4), X, "ethernet-1g", 2), r"the cluster is a record: Cluster.parse\('ethernet-1g'\)"),
    "odd group": (lambda: plan(mlp(30, 4), X, ETHERNET, 3, workers=8), r"group is a whole number that divides the 8 workers, got 3"),
    "no such costs": (lambda: plan(mlp(30, 4), X, None, 2, costs="measured"), r"costs are 'singa', or 'measured' with a cluster"),
    "no such layer": (lambda: plan(mlp(30, 4), X, ETHERNET, 2, given={"fc": "model"}), r"no layer is called 'fc'; the model has 0"),
    "no such way": (lambda: plan(mlp(30, 4), X, ETHERNET, 2, given={"0": "modal"}), r"cut as 'modal', did you mean 'model'"),
    "not that way": (lambda: plan(mlp(30, 4), X, ETHERNET, 2, given={"0": "spatial"}), r"'0' \(Linear\) cannot be cut as 'spatial'"),
    "seats without work": (lambda: plan(nn.Sequential(nn.GRU(30, 4, bidirectional=True)), torch.zeros(2, 3, 30), ETHERNET, 4), r"layer '0' is cut by examples alone: 2 of them are less than a group of 4"),
    "batches that do not divide": (lambda: plan(mlp(30, 4), X, group=2, workers=6), r"a mini-batch of 8 cannot be dealt to 3 groups"),
    "values decide": (lambda: plan(Peeking(), X, ETHERNET, 2), r"Peeking cannot be traced"),
    "seconds missing": (lambda: plan(mlp(30, 4, 5), X, ETHERNET, 2, compute={"0": 1.0}), r"compute: no seconds for '2'; give them too"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_gets_one_clear_line(case: str) -> None:
    call, words = REFUSED[case]
    with pytest.raises(UsageError, match=words) as refused:
        call()
    assert "\n" not in str(refused.value)


def test_a_plan_for_another_model_or_group_is_refused(tmp_path: Path) -> None:
    found = plan(mlp(30, 400, 20), X, ETHERNET, 1)
    with pytest.raises(
        UsageError,
        match=r"the plan is for another model: its layer '0' has 12,400 parameters, here it has 3,100",
    ):
        partition(mlp(30, 100, 20), found, X)
    with pytest.raises(UsageError, match=r"the plan is for a group of 2, this one has 1"):
        partition(mlp(30, 400, 20), plan(mlp(30, 400, 20), X, ETHERNET, 2), X)
    (tmp_path / "plan.json").write_text('{"choices": {}}')
    with pytest.raises(UsageError, match=r"plan.json is no plan: 'rows'"):
        Plan.load(tmp_path / "plan.json")
