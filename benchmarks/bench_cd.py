"""How fast is CD-1 of a 784-500 RBM, batches of 100, float32: one learner and two, a plain PyTorch loop, scikit-learn?

    python -m benchmarks.bench_cd [--examples 20000] [--repeats 3] [--threads 1] [--digits] [--json FILE]

Examples/s, medians over repeats that take turns; all have the same number of threads for each learner (one core each).
Images are random and binary. With `--digits` quality instead: exact pseudo-likelihood on scikit-learn's digits after the same epochs, RBM here (CD-1)
and BernoulliRBM (persistent chains), same rate, batches and hidden units. scikit-learn is needed for its columns alone (pip install scikit-learn).
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import syncline as sl
from benchmarks import machine
from syncline.data import digits
from syncline.nn import RBM

VISIBLE, HIDDEN, BATCH, RATE = 784, 500, 100, 0.05
WARM = 10  # batches before the clock


def images(count: int) -> Tensor:
    return torch.bernoulli(torch.full((count, VISIBLE), 0.2), generator=torch.Generator().manual_seed(0))


# -- who is measured: each gives examples/s ---------------------------------------------------------------------


def plain(data: Tensor) -> float:
    """CD-1 in a few lines of PyTorch."""
    weight = nn.Parameter(0.01 * torch.randn(HIDDEN, VISIBLE))
    hidden_bias, visible_bias = nn.Parameter(torch.zeros(HIDDEN)), nn.Parameter(torch.zeros(VISIBLE))
    optimizer = SGD([weight, hidden_bias, visible_bias], lr=RATE)
    began = 0.0
    with torch.no_grad():
        for number, v in enumerate(data.split(BATCH)):
            began = time.perf_counter() if number == WARM else began
            on = torch.sigmoid(torch.addmm(hidden_bias, v, weight.t()))
            back = torch.bernoulli(torch.sigmoid(torch.addmm(visible_bias, torch.bernoulli(on), weight)))
            then = torch.sigmoid(torch.addmm(hidden_bias, back, weight.t()))
            weight.grad = (then.t() @ back - on.t() @ v) / len(v)
            hidden_bias.grad, visible_bias.grad = (then - on).mean(0), (back - v).mean(0)
            float((v - back).square().sum())  # the loss, as train tells it
            optimizer.step()
    return (len(data) - WARM * BATCH) / (time.perf_counter() - began)


def learner(session: sl.Session, data: TensorDataset) -> tuple[float, float, int]:
    """`train`'s loop with a clock: when it began and ended, examples in between."""
    model = RBM(VISIBLE, HIDDEN)
    optimizer = session.optimizer(model, partial(SGD, lr=RATE))
    began, count = 0.0, 0
    for number, (v,) in enumerate(session.loader(data, batch_size=BATCH)):
        if number == WARM:
            began, count = time.monotonic(), 0
        optimizer.zero_grad()
        session.loss = model.contrastive_divergence(v).item()
        optimizer.step()
        count += len(v)
    return began, time.monotonic(), count


def syncline(data: Tensor, learners: int, threads: int) -> float:
    result = sl.launch(
        learner, TensorDataset(data), learners=learners, sync="softsync:1", threads=threads, seed=0
    )
    spans = result.returned
    return sum(count for *_, count in spans) / (max(end for _, end, _ in spans) - min(b for b, *_ in spans))


def scikit(data: Tensor, threads: int) -> float:
    from sklearn.neural_network import BernoulliRBM
    from threadpoolctl import threadpool_limits

    rbm = BernoulliRBM(HIDDEN, learning_rate=RATE, batch_size=BATCH, n_iter=1, random_state=0)
    array = data.numpy()
    with threadpool_limits(threads):
        rbm.fit(array[: WARM * BATCH])
        began = time.perf_counter()
        rbm.fit(array)
        return len(array) / (time.perf_counter() - began)


def speeds(given: argparse.Namespace) -> dict[str, list[float]]:
    torch.set_num_threads(given.threads)
    data = images(given.examples)
    columns: dict[str, Callable[[], float]] = {
        "plain PyTorch": lambda: plain(data),
        "one learner": lambda: syncline(data, 1, given.threads),
        "two learners": lambda: syncline(data, 2, given.threads),
    }
    if has_scikit():
        columns["scikit-learn"] = lambda: scikit(data, given.threads)
    found: dict[str, list[float]] = {name: [] for name in columns}
    for _ in range(given.repeats):
        for name, measure in columns.items():
            found[name].append(measure())
            print(f"{name:14} {found[name][-1]:10,.0f} examples/s", flush=True)
    return found


def has_scikit() -> bool:
    try:
        import sklearn  # noqa: F401
    except ImportError:
        print("scikit-learn is not here: pip install scikit-learn")
        return False
    return True


# -- quality ---------------------------------------------------------------------------------------------------


def qualities(epochs: int, hidden: int = 100, rate: float = 0.05, batch: int = 10) -> dict[str, float]:
    """Exact pseudo-likelihood of the training digits, by who trained."""
    data = (digits("train").tensors[0].flatten(1) > 0.5).float()
    common: dict[str, Any] = {"sync": "hardsync", "epochs": epochs, "threads": 1}
    found = {}
    for learners in (1, 2):
        torch.manual_seed(0)
        result = sl.train(
            RBM(64, hidden),
            TensorDataset(data),
            gradient="cd:1",
            optimizer=partial(SGD, lr=rate),
            learners=learners,
            global_batch_size=batch,
            **common,
        )
        assert isinstance(result.model, RBM)
        found[f"{learners} learner{'s' if learners > 1 else ''}"] = float(
            result.model.pseudo_likelihood(data)
        )
    if has_scikit():
        found["scikit-learn"] = float(from_scikit(data, hidden, rate, batch, epochs).pseudo_likelihood(data))
    return found


def from_scikit(data: Tensor, hidden: int, rate: float, batch: int, epochs: int) -> RBM:
    """What BernoulliRBM learns, as one of ours."""
    from sklearn.neural_network import BernoulliRBM

    theirs = BernoulliRBM(hidden, learning_rate=rate, batch_size=batch, n_iter=epochs, random_state=0)
    theirs.fit(data.numpy())
    rbm = RBM(data.shape[1], hidden)
    with torch.no_grad():
        rbm.weight.copy_(torch.as_tensor(theirs.components_))
        rbm.hidden_bias.copy_(torch.as_tensor(theirs.intercept_hidden_))
        rbm.visible_bias.copy_(torch.as_tensor(theirs.intercept_visible_))
    return rbm


def main(arguments: list[str]) -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--digits", action="store_true")
    parser.add_argument("--epochs", type=int, default=20, help="with --digits")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    head = machine.announce(" | ")
    found: dict[str, Any]
    if given.digits:
        found = qualities(given.epochs)
        for name, value in found.items():
            print(f"{name:14} pseudo-likelihood {value:.3f}")
    else:
        found = speeds(given)
        base = statistics.median(found["plain PyTorch"])
        for name, values in found.items():
            middle = statistics.median(values)
            print(f"{name:14} median {middle:10,.0f} examples/s, {middle / base:.2f} of plain PyTorch")
    machine.keep(given.json, {"machine": head, "found": found})


if __name__ == "__main__":
    main(sys.argv[1:])
