"""The no-communication limit: plain loops with their own optimizer, as many processes at the same time."""

from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

from benchmarks.peers.team import Team, command_line, free_rate
from benchmarks.workload import make_batch, make_model, make_optimizer, stepping


def run(dims: tuple[int, ...], batch_size: int, workers: int, seconds: float) -> float:
    with Team(seconds) as team:
        barrier = team.barrier(workers)
        members = [team.start(work, rank, dims, batch_size, barrier, seconds) for rank in range(workers)]
        return sum(team.receive(member) for member in members)


def work(
    _: Connection, rank: int, dims: tuple[int, ...], batch_size: int, barrier: Barrier, seconds: float
) -> float:
    model = make_model(dims)
    batch = make_batch(dims, batch_size, seed=rank)
    step = stepping(model, batch, make_optimizer(model.parameters()))
    return free_rate(step, barrier, seconds)


if __name__ == "__main__":
    command_line(run)
