"""How many simulated gradients per second does one GPU compute, and which way is the fastest?

    python -m benchmarks.bench_sim_gpu [--device cuda] [--only joined stacked …] [--seconds 6] [--json FILE]

cifar10_full on random images; the settings are Rudra's (σ, μ, λ). `plain` computes one gradient after another by autograd,
`joined` those of one version in one pass (hardsync, softsync:1), `stacked` those of 30 versions at once (async); each with and without
CUDA graphs, convolutions as products of unfolded windows or as vmap's grouped ones. `step` is the
optimizer's step, `run` whole simulated runs. Every way is first compared with the plain one. Each case has its own limit of time.
"""

import argparse
import copy
import cProfile
import pstats
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

import syncline as sl
from benchmarks import machine
from syncline.learn.gradient_ways import Supervised
from syncline.models import Cifar10Full, cifar10_full_sgd
from syncline.sim.batched.cuda_graphs import repeatable
from syncline.sim.batched.deferred_steps import DeferredSteps
from syncline.sim.batched.objective import Rows, SimTask, rows_of
from syncline.sim.batched.shared_model import Ways
from syncline.sim.batched.vmap_gradients import Joined, Stacked
from syncline.sim.simulation import Simulation
from syncline.table.flat_sgd import FlatSGD
from syncline.table.layout import lay_out
from syncline.table.optimizer_template import OptimizerTemplate, bare_step

EXAMPLES = 50_000
PLACES = 4096
TOLERANCE = 1e-3  # of the norm: where two windows are all but equal, rounding chooses


class Bench:
    """The network, its data and its results so far."""

    def __init__(self, device: str, seconds: float, file: Path | None) -> None:
        self.device, self.seconds, self.file = torch.device(device), seconds, file
        self.results: dict[str, Any] = {
            "machine": machine.describe(),
            "torch": torch.__version__,
            "cases": {},
        }
        torch.manual_seed(0)
        self.model = Cifar10Full()
        with (
            torch.no_grad()
        ):  # outputs of the start are all but zero: larger weights make comparisons mean something
            for parameter in self.model.parameters():
                parameter.mul_(3.0)
        self.optimizer = cifar10_full_sgd(self.model)
        groups = [group["params"] for group in self.optimizer.param_groups]
        self.layout, self.tensors = lay_out(self.model, groups, cuttable=True, shards=1)
        examples = EXAMPLES if self.device.type == "cuda" else 2000
        data = TensorDataset(30 * torch.randn(examples, 3, 32, 32), torch.randint(10, (examples,)))
        self.task = SimTask(self.model, Supervised(F.cross_entropy), self.layout, data, device=self.device)
        self.losses = torch.zeros(PLACES + 1, dtype=torch.float64, device=self.device)
        self.generator = torch.Generator().manual_seed(1)
        self.examples = examples

    def weights(self, versions: int) -> list[list[Tensor]]:
        """Versions near each other."""
        made = []
        for version in range(versions):
            segments = self.task.segments()
            for view, parameter in zip(self.task.views(segments), self.tensors.parameters, strict=True):
                view.copy_(parameter.detach().to(self.device) * (1 + 0.01 * version))
            made.append(segments)
        return made

    def batches(self, count: int, size: int) -> list[Tensor]:
        return [torch.randint(self.examples, (size,), generator=self.generator) for _ in range(count)]

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def rate(self, work: Callable[[], object], gradients: int) -> dict[str, float]:
        """Gradients per second, and milliseconds of one call: of the host alone, and until the device has done it."""
        for _ in range(3):
            work()
        self.sync()
        calls, hosts, whole = 0, 0.0, []
        end = time.perf_counter() + self.seconds / 3
        while time.perf_counter() < end or len(whole) < 3:
            begin = time.perf_counter()
            for _ in range(5):
                work()
            hosts += time.perf_counter() - begin
            self.sync()
            whole.append((time.perf_counter() - begin) / 5)
            calls += 5
        milliseconds = statistics.median(whole) * 1e3
        return {
            "per_second": gradients / (milliseconds / 1e3),
            "milliseconds": milliseconds,
            "host_milliseconds": hosts / calls * 1e3,
            "fastest_milliseconds": min(whole) * 1e3,
        }

    def case(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """Run it, print it, keep it; a failure is a result too."""
        begin = time.perf_counter()
        try:
            result = work()
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        result["took_seconds"] = time.perf_counter() - begin
        self.results["cases"][name] = result
        shown = "  ".join(
            f"{key} {value:,.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in result.items()
        )
        print(f"{name:44} {shown}", flush=True)
        machine.keep(self.file, self.results)


def plain_rows(bench: Bench, weights: list[list[Tensor]], batches: list[Tensor]) -> Tensor:
    """The reference: one after another, on the whole model."""
    task, rows = bench.task, []
    for segments, indices in zip(weights, batches, strict=True):
        leaves = task.leaves(segments)
        batch = [part[0] for part in task.examples.stack(indices[None].to(bench.device), [])]
        made = task.segments()
        with repeatable(bench.device):
            gradients = task.gradients(task.loss(leaves, batch), leaves)
        for view, gradient in zip(task.views(made), gradients, strict=True):
            view.copy_(gradient)  # type: ignore[arg-type]
        rows.append(made[0])
    return torch.stack(rows)


def difference(mine: Tensor, reference: Tensor) -> float:
    apart = float((mine - reference).norm() / reference.norm())
    if not apart <= TOLERANCE:
        raise AssertionError(f"differs from the plain gradient by {apart:.2e} of its norm")
    return apart


def plain(bench: Bench, size: int) -> dict[str, Any]:
    weights, batches = bench.weights(1), bench.batches(1, size)
    return bench.rate(lambda: plain_rows(bench, weights, batches), 1)


def joined(bench: Bench, size: int, count: int, *, graphs: bool) -> dict[str, Any]:
    """A fold of `count` gradients of one version."""
    (weights,), batches = bench.weights(1), bench.batches(count, size)
    way = Joined(bench.task, bench.losses, rows_of(bench.task, [weights]), graphs=graphs)
    shares, places = [1 / count] * count, list(range(count))

    def fold() -> None:
        way.zero()
        way.add(0, batches, shares, places)

    way.program(batches)
    fold()
    reference = plain_rows(bench, [weights] * count, batches).mean(0)
    worst = difference(way.total[0], reference)
    return {**bench.rate(fold, count), "difference": worst}


def stacked_way(bench: Bench, weights: list[list[Tensor]], **ways: Any) -> Stacked:
    versions, gradients = rows_of(bench.task, weights), Rows(bench.task, 2 * len(weights))
    return Stacked(bench.task, bench.losses, versions, gradients, **ways)


def stacked(bench: Bench, size: int, count: int, *, graphs: bool, convolutions: str) -> dict[str, Any]:
    """All outstanding gradients of `count` learners, each of its own version."""
    weights, batches = bench.weights(count), bench.batches(count, size)
    way = stacked_way(bench, weights, graphs=graphs, convolutions=convolutions)
    every = list(range(count))  # versions, rows and places
    made = way.rows.stacks[0][:count]
    way.fill(every, batches, every, every)
    worst = difference(made, plain_rows(bench, weights, batches))
    first = made.clone()
    way.fill(every, batches, every, every)
    same = bool(torch.equal(first, made))
    rated = bench.rate(lambda: way.fill(every, batches, every, every), count)
    return {**rated, "difference": worst, "same_bits_again": same}


class Table:
    """A shard's optimizer with a gradient, for the step alone."""

    def __init__(self, bench: Bench) -> None:
        (self.weights,), part = bench.weights(1), bench.layout.parts[0]
        self.gradient = [torch.randn_like(segment) * 1e-3 for segment in self.weights]
        entries = bench.layout.parameters.entries
        views = part.views(self.weights, entries)
        self.optimizer, self.parameters = OptimizerTemplate.of(bench.optimizer).build(
            part, bench.layout, views
        )
        for parameter, view in zip(self.parameters, part.views(self.gradient, entries), strict=True):
            parameter.grad = view
        self.plain = bare_step(self.optimizer)
        self.flat = FlatSGD(self.optimizer, part, self.weights)


def step(bench: Bench, way: str) -> dict[str, Any]:
    reference, table = Table(bench), Table(bench)
    for gradient, other in zip(table.gradient, reference.gradient, strict=True):
        gradient.copy_(other)
    for _ in range(5):
        reference.plain()
        if not table.flat.step(table.parameters, table.gradient):
            table.plain()
    worst = float((reference.weights[0] - table.weights[0]).abs().max() / reference.weights[0].abs().max())
    assert worst < 1e-6, worst
    work: Callable[[], object] = table.plain
    if way != "plain":
        work = lambda: table.flat.step(table.parameters, table.gradient)  # noqa: E731
    if way == "captured":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        work = graph.replay
    return {**bench.rate(work, 1), "difference": worst}


def later(bench: Bench, count: int, *, graphs: bool) -> dict[str, Any]:
    """So many steps at once, each with a gradient of its own, against as many one by one."""
    reference, table = Table(bench), Table(bench)
    for gradient, other in zip(table.gradient, reference.gradient, strict=True):
        gradient.copy_(other)
    for each in (reference, table):
        each.plain()  # from here on there is momentum
    versions, gradients = Rows(bench.task, count), Rows(bench.task, count)
    for stack, gradient in zip(gradients.stacks, table.gradient, strict=True):
        stack[:] = gradient
    steps = DeferredSteps(gradients, versions, lambda version: version, together=graphs)

    def work() -> None:
        plan = table.flat.plan(table.parameters)
        assert plan is not None
        for number in range(count):
            steps.add(table.flat, plan, number, number)
        steps.settle()

    for _ in range(4):
        work()
        for _ in range(count):
            assert reference.flat.step(reference.parameters, reference.gradient)
    same = bool(torch.equal(reference.weights[0], table.weights[0]))
    assert same and torch.equal(versions.stacks[0][count - 1], table.weights[0])
    return {**bench.rate(work, count), "same_bits": same}


def copies(bench: Bench) -> dict[str, Any]:
    """A new version's copy, as each update makes one where learners do not wait."""
    (weights,) = bench.weights(1)
    return bench.rate(lambda: [torch.empty_like(segment).copy_(segment) for segment in weights], 1)


def run(bench: Bench, sync: str, size: int, learners: int, *, graphs: bool = True) -> dict[str, Any]:
    """A whole simulated run, protocol and all, after a shorter one that captures what there is to capture."""
    data = TensorDataset(*(tensor.cpu() for tensor in bench.task.examples._tensors))  # type: ignore[union-attr]
    epochs = (1, 3 if size < 32 else 10) if bench.device.type == "cuda" else (1, 1)
    shown: dict[str, Any] = {}
    for count in epochs:
        begin = time.perf_counter()
        result = sl.train(
            copy.deepcopy(bench.model),
            data,
            loss=F.cross_entropy,
            optimizer=cifar10_full_sgd,
            sync=sync,
            learners=learners,
            batch_size=size,
            epochs=count,
            engine=sl.Sim(batched=Ways(graphs=graphs)),
            device=str(bench.device),
        )
        seconds = time.perf_counter() - begin
        events = [event.what for event in result.events]
        shown[f"seconds_{count}"], shown[f"gradients_{count}"] = seconds, result.gradients
    if epochs[0] != epochs[1]:  # without what a run costs however long it is
        first, last = (f"_{count}" for count in epochs)
        more = shown[f"gradients{last}"] - shown[f"gradients{first}"]
        shown["per_second"] = more / (shown[f"seconds{last}"] - shown[f"seconds{first}"])
    return {**shown, "staleness": result.staleness.mean, "events": events}


def profile_run(bench: Bench, sync: str) -> dict[str, Any]:
    """Where the host's time goes in a whole run."""
    found = cProfile.Profile()
    whole = Simulation.run

    def run_profiled(world: Simulation) -> Any:
        return found.runcall(whole, world)

    Simulation.run = run_profiled  # type: ignore[method-assign]
    try:
        shown = run(bench, sync, 4, 30)
    finally:
        Simulation.run = whole  # type: ignore[method-assign]
    pstats.Stats(found).sort_stats("tottime").print_stats(30)
    return shown


def profiled(bench: Bench, work: Callable[[], object]) -> None:
    """The kernels that take the time."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.device.type == "cuda" else [])]
    work()
    bench.sync()
    with profile(activities=kinds) as found:
        for _ in range(5):
            work()
        bench.sync()
    key = "cuda_time_total" if bench.device.type == "cuda" else "cpu_time_total"
    print(found.key_averages().table(sort_by=key, row_limit=20, max_name_column_width=70), flush=True)


def profile_joined(bench: Bench, *, graphs: bool) -> dict[str, Any]:
    """Without graphs the names of the operations are seen, with them the kernels alone."""
    (weights,), batches = bench.weights(1), bench.batches(30, 4)
    way = Joined(bench.task, bench.losses, rows_of(bench.task, [weights]), graphs=graphs)
    profiled(bench, lambda: way.add(0, batches, [1 / 30] * 30, list(range(30))))
    return {}


def profile_stacked(bench: Bench, *, graphs: bool) -> dict[str, Any]:
    every, batches = list(range(30)), bench.batches(30, 4)
    way = stacked_way(bench, bench.weights(30), graphs=graphs)
    profiled(bench, lambda: way.fill(every, batches, every, every))
    return {}


def cases(bench: Bench) -> dict[str, Callable[[], dict[str, Any]]]:
    """By name, the most telling first."""
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    modes = (True, False) if bench.device.type == "cuda" else (False,)
    tag = {True: "graphs", False: "no graphs"}
    for graphs in modes:
        found[f"joined (1,4,30) {tag[graphs]}"] = lambda g=graphs: joined(bench, 4, 30, graphs=g)
        found[f"stacked (30,4,30) unfolded {tag[graphs]}"] = lambda g=graphs: stacked(
            bench, 4, 30, graphs=g, convolutions="unfolded"
        )
        found[f"stacked (30,4,30) grouped {tag[graphs]}"] = lambda g=graphs: stacked(
            bench, 4, 30, graphs=g, convolutions="grouped"
        )
    if modes[0]:
        found["run (1,4,30) softsync:1"] = lambda: run(bench, "softsync:1", 4, 30)
        found["run (30,4,30) softsync:30"] = lambda: run(bench, "softsync:30", 4, 30)
        found["run (0,128,1) hardsync"] = lambda: run(bench, "hardsync", 128, 1)
        found["run (1,128,10) softsync:1"] = lambda: run(bench, "softsync:1", 128, 10)
        found["profile run (1,4,30)"] = lambda: profile_run(bench, "softsync:1")
        found["profile run (30,4,30)"] = lambda: profile_run(bench, "softsync:30")
    for way in ("plain", "flat", *(("captured",) if modes[0] else ())):
        found[f"step {way}"] = lambda w=way: step(bench, w)
    for graphs in modes:
        found[f"step 30 later {tag[graphs]}"] = lambda g=graphs: later(bench, 30, graphs=g)
    found["step copy of a version"] = lambda: copies(bench)
    found["plain (·,4,·)"] = lambda: plain(bench, 4)
    found["plain (·,128,·)"] = lambda: plain(bench, 128)
    for size, count in ((4, 1), (4, 8), (128, 1), (128, 10), (16, 8)):
        found[f"joined {count} of {size}"] = lambda s=size, c=count: joined(bench, s, c, graphs=modes[0])
    for size, count in ((4, 1), (4, 8), (4, 16), (4, 64), (16, 8), (128, 10)):
        for way in ("unfolded", "grouped"):
            found[f"stacked {count} of {size} {way}"] = lambda s=size, c=count, w=way: stacked(
                bench, s, c, graphs=modes[0], convolutions=w
            )
    for graphs in modes:
        found[f"profile joined {tag[graphs]}"] = lambda g=graphs: profile_joined(bench, graphs=g)
        found[f"profile stacked {tag[graphs]}"] = lambda g=graphs: profile_stacked(bench, graphs=g)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", default=[], help="words, one of which a case's name must hold")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each case")
    parser.add_argument("--limit", type=float, default=210.0, help="seconds after which no case is started")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    bench = Bench(chosen.device, chosen.seconds, chosen.json)
    print(bench.results["machine"], torch.__version__, bench.device, flush=True)
    begin = time.perf_counter()
    for name, work in cases(bench).items():
        if chosen.only and not any(word in name for word in chosen.only):
            continue
        if time.perf_counter() - begin > chosen.limit:
            print(f"{name:44} left out: {chosen.limit:g} s are over", flush=True)
            continue
        bench.case(name, work)


if __name__ == "__main__":
    main()
