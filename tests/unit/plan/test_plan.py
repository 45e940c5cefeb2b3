"""Plans of models: SINGA's counts, seconds on a cluster, limits, files, and what is refused."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncline.cluster.record import Cluster, Compute, Link
from syncline.errors import UsageError
from syncline.models import AlexNet
from syncline.parallel import Group, partition
from syncline.parallel.module import is_layer
from syncline.parallel.trace import skeleton, trace
from syncline.plan import Plan, best_group, data_parallel, graph, grouped, measure, model_parallel, plan
from syncline.plan.graph import LayerGraph

ETHERNET = Cluster.named("ethernet-1g")
BATCH = torch.empty(256, 3, 224, 224, device="meta")


@pytest.fixture(scope="module")
def alexnet() -> AlexNet:
    with torch.device("meta"):
        return AlexNet(dropout=0.0)


def mlp(*sizes: int) -> nn.Sequential:
    pairs = itertools.pairwise(sizes)
    return nn.Sequential(*(layer for a, b in pairs for layer in (nn.Linear(a, b), nn.ReLU())))


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


def test_floats_are_counted_as_singa_counts_them(alexnet: AlexNet) -> None:
    """2·P·M data-parallel, 2·P or nothing model-parallel, 2·D·M·b for each pair not both data-parallel; times groups."""
    group, workers, batch = 4, 16, 256
    share = batch * group // workers
    found = {row.layer: row for row in plan(alexnet, BATCH, group=group, workers=workers).rows}
    assert found["conv2"].bytes == 4 * (2 * 307_456 * group) * (workers // group)
    assert found["fc6"].bytes == 4 * (2 * 37_752_832 + 2 * 256 * 6 * 6 * group * share) * (workers // group)
    alone = {row.layer: row for row in plan(alexnet, BATCH, group=4).rows}
    assert alone["fc7"].bytes == 4 * 2 * 4096 * 4 * 256  # its own parameters are updated where they are
    through = {row.layer: row for row in plan(alexnet, BATCH, group=4, local_update=False).rows}
    assert through["fc7"].bytes - alone["fc7"].bytes == 4 * 2 * 16_781_312


def test_the_best_size_of_simple_groups_is_a_square_root() -> None:
    P, N, D, B = 62e6, 64, 1.2e6, 256
    M = best_group(P, N, D, B)
    assert pytest.approx((P * N / (D * B)) ** 0.5) == M
    assert grouped(P, N, D, B, M) == pytest.approx(4 * (P * N * D * B) ** 0.5)
    assert all(grouped(P, N, D, B, M) <= grouped(P, N, D, B, other) for other in (1, 2, 4, 8, 16, 32, 64))
    assert grouped(P, N, D, B, N) == 2 * P + model_parallel(D, N, B)
    assert data_parallel(P, N) == grouped(P, N, 0.0, B, 1)
    assert best_group(1e3, 4, 1e6, 256) == 1.0 and best_group(1e12, 4, 1.0, 1) == 4.0


def test_without_a_group_the_best_size_that_divides_the_workers_is_taken(alexnet: AlexNet) -> None:
    found = plan(alexnet, BATCH, workers=16)
    totals = {size: plan(alexnet, BATCH, group=size, workers=16).bytes for size in (1, 2, 4, 8, 16)}
    assert found.bytes == min(totals.values()) and found.group == min(totals, key=totals.__getitem__)


# -- the optimum of whole plans ----------------------------------------------------------------------------------


class Ways(nn.Module):
    """Ways that part and meet."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.one, self.two = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 5, padding=2)
        self.out = nn.Linear(8 * 64, 300)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = self.one(x) + F.relu(self.two(x)) + x
        return self.out(x.flatten(1))


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


def test_bytes_are_those_that_the_partitioned_model_moves() -> None:
    model, x = Ways(), torch.empty(8, 3, 8, 8)
    given = {
        "first": "spatial",
        "one": "model",
        "two": "spatial",
        "add": "spatial",
        "add_1": "spatial",
        "out": "model",
    }
    graph = LayerGraph(model, x, 4)
    graph.find_ways(("data", "model", "spatial"))
    names = [unit.name for unit in graph.units]
    moved = 0
    for link in graph.links:
        if link.target[0] >= 0:
            a, b = names[link.source[0]], names[link.target[0]]
            moved += sum(route.moved for route, _ in graph.routes(link, given[a], given[b]))
    group = Group()
    group.size = 4
    mine = partition(model, given, x, group)
    (program,) = mine._programs.values()
    assert program.moved <= moved  # a value that two layers read moves once
    assert program.moved >= 0.8 * moved


def test_slow_links_and_large_layers_change_the_choice() -> None:
    model, x = mlp(64, 2048, 2048), torch.empty(32, 64)
    fast = Cluster(compute=Compute(base=1.0), card=Link(latency=1e-6, bandwidth=1e12))
    slow = Cluster(compute=Compute(base=1.0), card=Link(latency=1e-6, bandwidth=1e6))
    assert plan(model, x, slow, 4).choices["2"] == "model"
    assert plan(model, x, fast, 4).seconds < plan(model, x, slow, 4).seconds
    given_seconds = plan(model, x, fast, 4, compute={"0": 8.0, "2": 4.0})
    assert [round(row.seconds, 2) for row in given_seconds.rows] == [2.0, 1.0]


def test_what_goes_to_servers_on_other_machines_takes_time_in_groups_of_one_too() -> None:
    model, x = mlp(64, 2048, 2048), torch.empty(32, 64)
    slow = Cluster(compute=Compute(base=0.0), card=Link(bandwidth=1e6), memory=Link(bandwidth=1e6))
    count = sum(p.numel() for p in model.parameters())
    assert plan(model, x, slow, 1, workers=4).seconds == pytest.approx(2 * 4 * count / 1e6)
    assert plan(model, x, slow, 1).seconds == 0.0


def test_layers_are_measured_by_running_them() -> None:
    model = mlp(30, 400, 20)
    found = measure(model, torch.zeros(64, 30))
    assert set(found) == {"0", "2"} and all(seconds > 0 for seconds in found.values())
    assert all(p.grad is None for p in model.parameters())
    assert plan(model, torch.zeros(64, 30), ETHERNET, 2, compute=found).seconds > 0


def test_moves_of_layers_that_are_alike_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    route = graph.route
    monkeypatch.setattr(graph, "route", lambda *args, **how: found.append(args) or route(*args, **how))
    for layers in (10, 40):
        found.clear()
        deep = plan(mlp(*[64] * layers), torch.empty(8, 64), ETHERNET, 4)
        assert len(deep.rows) == layers - 1 and len(found) <= 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_traced_results_are_like_torchs_own(dtype: torch.dtype) -> None:
    kinds = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU)
    model = nn.Sequential(nn.Linear(6, 8), *(kind() for kind in kinds), nn.Linear(8, 3, bias=False)).to(dtype)
    x = torch.empty(4, 5, 6, dtype=dtype, device="meta")
    traced = trace(skeleton(model), (x,), {}, leaf=is_layer)
    values = [node.meta["value"] for node in traced.graph.nodes if node.op == "call_module"]
    for layer, value in zip(skeleton(model), values, strict=True):
        x = layer(x)
        assert (value.shape, value.dtype, value.stride()) == (x.shape, x.dtype, x.stride())
    with pytest.raises(UsageError, match="cannot be traced"):
        trace(skeleton(model), (torch.empty(4, 7, dtype=dtype),), {}, leaf=is_layer)


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
