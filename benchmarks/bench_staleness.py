"""Does the measured staleness agree with (λ−1)/c, on real processes and in the twin (R2)?

python -m benchmarks.bench_staleness [--gradients 3000]
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import syncline as sl
from benchmarks import machine


def run(engine: str, sync: str, learners: int, gradients: int) -> sl.Result:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(gradients, 32), torch.randint(10, (gradients,)))
    return sl.train(
        nn.Linear(32, 10),
        data,
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        sync=sync,
        learners=learners,
        batch_size=1,
        epochs=1,
        engine=engine,
        threads=1,
    )


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--gradients", type=int, default=3000)
    given = parser.parse_args()
    machine.announce()
    print("engine  dial         λ   (λ−1)/c   mean σ   max σ   share beyond 2λ/c")
    for engine in ("local", "sim"):
        for learners in (4, 30):
            for sync in ("softsync:1", "softsync:2", "async"):
                quorum = sl.Sync.parse(sync).quorum(learners)
                staleness = run(engine, sync, learners, given.gradients).staleness
                bound = 2 * learners / quorum
                beyond = (
                    sum(n for sigma, n in staleness.histogram.items() if sigma > bound) / staleness.gradients
                )
                print(
                    f"{engine:<7} {sync:<11} {learners:>2}   {(learners - 1) / quorum:>7.3f}   {staleness.mean:>6.3f}"
                    f"   {staleness.max:>5}   {beyond:.4f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
