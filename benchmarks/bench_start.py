"""How long until the first update, and what does a waiting process cost?

    python -m benchmarks.bench_start [--learners 8] [--shards 2] [--repeats 5]

Each repeat starts a new fork server, as the first run of a program does, then a second run with it.
"""

import os
import statistics
import time

import torch
from torch import nn

import syncline as sl
from benchmarks import machine
from benchmarks.workload import make_optimizer
from syncline.engines.local import forkserver

IDLE_S = 3.0


def first_update(session: sl.Session) -> float:
    model = nn.Linear(20, 2)
    optimizer = session.optimizer(model, make_optimizer)
    model(torch.ones(4, 20)).sum().backward()
    optimizer.step()
    return time.time()


def sleeper(session: sl.Session) -> None:
    """Rank 0 sleeps inside its loop; everybody else waits for its gradient."""
    model = nn.Linear(20, 2)
    optimizer = session.optimizer(model, make_optimizer)
    if session.rank == 0:
        time.sleep(IDLE_S + 2)
    model(torch.ones(4, 20)).sum().backward()
    optimizer.step()


def seconds_to_first_update(learners: int, shards: int) -> float:
    start = time.time()
    result = sl.launch(first_update, learners=learners, topology=f"servers:{shards}")
    return max(result.returned) - start


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle_use(learners: int, shards: int) -> dict[str, float]:
    """Share of a core that each waiting process uses."""
    run = sl.launch(sleeper, learners=learners, topology=f"servers:{shards}", wait=False)
    time.sleep(1.0)
    pids = run._handle.pids()
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    time.sleep(IDLE_S)
    used = {name: (cpu_seconds(pids[name]) - before[name]) / IDLE_S for name in pids}
    run.wait()
    return used


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--learners", type=int, default=8)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    machine.announce()
    cold, warm = [], []
    for _ in range(given.repeats):
        forkserver.shutdown()
        cold.append(seconds_to_first_update(given.learners, given.shards))
        warm.append(seconds_to_first_update(given.learners, given.shards))
    for name, values in (("first run", cold), ("second run", warm)):
        spread = f"{min(values):.2f}..{max(values):.2f}"
        print(
            f"{name}: {statistics.median(values):.2f} s to the first update ({spread}), {given.learners} learners, {given.shards} shards"
        )
    use = idle_use(given.learners, given.shards)
    print(
        f"waiting processes use at most {100 * max(use.values()):.1f} % of a core, {100 * statistics.mean(use.values()):.2f} % on average"
    )


if __name__ == "__main__":
    main()
