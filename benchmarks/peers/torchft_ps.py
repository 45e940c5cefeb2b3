"""torchft's ParameterServer: asynchronous, one session per worker kept open for all its steps.

As in torchft's own example a session is a Gloo group of server and client that exchange broadcasts. Parameters
and gradients travel as one flat buffer each, and the server sends its live weights without a copy: its fastest
use (a client may then read weights of two versions mixed).
"""

import contextlib
import io
import os
import threading
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import torch
from torch import Tensor, nn
from torchft.parameter_server import ParameterServer
from torchft.process_group import ProcessGroup, ProcessGroupGloo

from benchmarks.peers.team import Team, command_line, free_rate, wait_for_end
from benchmarks.workload import backward, make_batch, make_model, make_optimizer

SERVER, CLIENT = 0, 1  # ranks within a session, fixed by torchft


def run(dims: tuple[int, ...], batch_size: int, workers: int, seconds: float) -> float:
    with Team(seconds) as team:
        address = team.receive(team.start(serve, dims))
        arguments = (address, dims, batch_size, team.barrier(workers), seconds)
        members = [team.start(work, rank, *arguments) for rank in range(workers)]
        return sum(team.receive(member) for member in members)


class Server(ParameterServer):
    """Holds the weights; every session runs `forward` in a thread of its own."""

    def __init__(self, weights: Tensor) -> None:
        self._weights = nn.Parameter(weights)
        self._optimizer = make_optimizer([self._weights])
        self._lock = threading.Lock()
        super().__init__(port=0)

    @classmethod
    def new_process_group(cls) -> ProcessGroup:
        return ProcessGroupGloo()

    def forward(self, session_id: str, pg: ProcessGroup) -> None:
        torch.set_num_threads(1)
        weights = self._weights.detach()
        message = new_message(weights)
        while True:
            pg.broadcast_one(weights, root=SERVER).wait()
            pg.broadcast_one(message, root=CLIENT).wait()
            if message[-1]:
                return
            with self._lock:
                self._weights.grad = message[:-1]
                self._optimizer.step()


def serve(connection: Connection, dims: tuple[int, ...]) -> None:
    use_loopback()
    # torchft's HTTP handler prints every request, and a traceback when a session that took its thread ends.
    with contextlib.redirect_stderr(io.StringIO()):
        server = Server(flatten(make_model(dims)))
        connection.send(server.address())
        wait_for_end(connection)


def work(
    _: Connection,
    rank: int,
    address: str,
    dims: tuple[int, ...],
    batch_size: int,
    barrier: Barrier,
    seconds: float,
) -> float:
    use_loopback()
    model = make_model(dims)
    parameters = list(model.parameters())
    weights = flatten(model)
    message = new_message(weights)
    batch = make_batch(dims, batch_size, seed=rank)
    session = Server.new_session(address)
    session.broadcast_one(weights, root=SERVER).wait()

    def step() -> None:
        model.zero_grad()
        backward(model, batch)
        torch.cat([p.grad.view(-1) for p in parameters], out=message[:-1])  # type: ignore[union-attr]
        session.broadcast_one(message, root=CLIENT).wait()
        session.broadcast_one(weights, root=SERVER).wait()

    rate = free_rate(step, barrier, seconds)
    message[-1] = 1.0
    session.broadcast_one(message, root=CLIENT).wait()
    return rate


def flatten(model: nn.Module) -> Tensor:
    """One buffer with all weights, of which the model's parameters become views."""
    parameters = list(model.parameters())
    flat = torch.cat([p.detach().view(-1) for p in parameters])
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.data = part.view_as(parameter)
    return flat


def new_message(weights: Tensor) -> Tensor:
    """A gradient as it travels: with a last element that is set when the client leaves."""
    return weights.new_zeros(weights.numel() + 1)


def use_loopback() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["no_proxy"] = "*"  # sessions are opened by HTTP


if __name__ == "__main__":
    command_line(run)
