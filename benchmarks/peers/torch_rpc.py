"""A parameter server over torch.distributed.rpc in the manner of PyTorch's tutorials: asynchronous.

The server holds model and optimizer; a worker's call brings its gradients, which are applied under a lock, and
returns the live parameters. TensorPipe chooses its own transport (shared memory on one machine).
"""

import tempfile
import threading
import warnings
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch
import torch.distributed.rpc as rpc
from torch import Tensor

from benchmarks.peers.team import START_S, Team, command_line, free_rate
from benchmarks.workload import backward, make_batch, make_model, make_optimizer

SERVER = "server"


def run(dims: tuple[int, ...], batch_size: int, workers: int, seconds: float) -> float:
    with tempfile.TemporaryDirectory() as folder, Team(seconds) as team:
        meeting = Path(folder, "rendezvous").as_uri()
        team.start(serve, meeting, workers, dims)
        arguments = (meeting, workers, dims, batch_size, team.barrier(workers), seconds)
        members = [team.start(work, rank, *arguments) for rank in range(workers)]
        return sum(team.receive(member) for member in members)


class Server:
    def __init__(self, dims: tuple[int, ...]) -> None:
        self._parameters = list(make_model(dims).parameters())
        self._optimizer = make_optimizer(self._parameters)
        self._lock = threading.Lock()

    def pull(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self._parameters]

    def push(self, gradients: list[Tensor]) -> None:
        torch.set_num_threads(1)  # calls come in on threads of the agent
        with self._lock:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
            self._optimizer.step()


_server: list[Server] = []  # the server process's one; remote calls reach it by this name


def pull() -> list[Tensor]:
    return _server[0].pull()


def push_gradients_and_pull(gradients: list[Tensor]) -> list[Tensor]:
    _server[0].push(gradients)
    return _server[0].pull()


def serve(_: Connection, meeting: str, workers: int, dims: tuple[int, ...]) -> None:
    _server.append(Server(dims))
    join(SERVER, 0, workers, meeting)
    rpc.shutdown()  # returns when all workers have called it


def work(
    _: Connection,
    rank: int,
    meeting: str,
    workers: int,
    dims: tuple[int, ...],
    batch_size: int,
    barrier: Barrier,
    seconds: float,
) -> float:
    model = make_model(dims)
    parameters = list(model.parameters())
    weights = [parameter.detach() for parameter in parameters]
    batch = make_batch(dims, batch_size, seed=rank)
    join(f"worker{rank}", 1 + rank, workers, meeting)
    torch._foreach_copy_(weights, rpc.rpc_sync(SERVER, pull))

    def step() -> None:
        model.zero_grad()
        backward(model, batch)
        gradients = [parameter.grad for parameter in parameters]
        torch._foreach_copy_(weights, rpc.rpc_sync(SERVER, push_gradients_and_pull, args=(gradients,)))

    rate = free_rate(step, barrier, seconds)
    rpc.shutdown()
    return rate


def join(name: str, rank: int, workers: int, meeting: str) -> None:
    warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # rpc itself does
    options = rpc.TensorPipeRpcBackendOptions(init_method=meeting, rpc_timeout=START_S)
    rpc.init_rpc(name, rank=rank, world_size=1 + workers, rpc_backend_options=options)


if __name__ == "__main__":
    command_line(run)
