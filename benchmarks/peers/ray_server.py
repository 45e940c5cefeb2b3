"""A parameter server of Ray actors, the pattern of Ray's own example: gradients and weights are objects of its store.

The caller is connected to a Ray cluster and on the server's node; so many workers are on every node. `actors`: a gradient is
applied as soon as it is there, and its worker goes on with the weights after it. `actors-sync`: all of a round, then one update.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import ray
import torch
from numpy.typing import NDArray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from benchmarks.cluster_learner import LEAST_STEPS, WARM_UP_STEPS, Pace, Window
from benchmarks.workload import backward, make_batch, make_model, make_optimizer

Arrays = list[NDArray[Any]]


class Server:
    def __init__(self, dims: tuple[int, ...]) -> None:
        settle()
        self._parameters = list(make_model(dims).parameters())
        self._optimizer = make_optimizer(self._parameters)

    def weights(self) -> Arrays:
        return [parameter.detach().numpy() for parameter in self._parameters]

    def apply(self, *gradients: Arrays) -> Arrays:
        """The mean of these as one update; the weights after it."""
        for index, parameter in enumerate(self._parameters):
            parts = [torch.from_numpy(gradient[index]) for gradient in gradients]
            parameter.grad = torch.stack(parts).mean(0) if len(parts) > 1 else parts[0]
        self._optimizer.step()
        return self.weights()


class Worker:
    def __init__(self, dims: tuple[int, ...], batch_size: int, rank: int) -> None:
        settle()
        self._model = make_model(dims)
        self._parameters = list(self._model.parameters())
        self._batch = make_batch(dims, batch_size, seed=rank)

    def gradient(self, weights: Arrays) -> Arrays:
        with torch.no_grad():
            for parameter, values in zip(self._parameters, weights, strict=True):
                parameter.copy_(torch.from_numpy(values))
        self._model.zero_grad()
        backward(self._model, self._batch)
        return [parameter.grad.numpy() for parameter in self._parameters if parameter.grad is not None]


def settle() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings(
        "ignore", "The given NumPy array is not writable"
    )  # nobody writes what the store has


def free(server: Any, workers: list[Any]) -> Iterator[int]:
    """One gradient at a time."""
    weights = server.weights.remote()
    computing = {worker.gradient.remote(weights): worker for worker in workers}
    while True:
        (gradient,), _ = ray.wait(list(computing), fetch_local=False)
        worker = computing.pop(gradient)
        weights = server.apply.remote(gradient)
        computing[worker.gradient.remote(weights)] = worker
        del gradient  # its memory is the store's again
        yield 1


def rounds(server: Any, workers: list[Any]) -> Iterator[int]:
    weights = server.weights.remote()
    while True:
        weights = server.apply.remote(*[worker.gradient.remote(weights) for worker in workers])
        ray.wait([weights], fetch_local=False)
        yield len(workers)


WAYS: dict[str, Callable[[Any, list[Any]], Iterator[int]]] = {"actors": free, "actors-sync": rounds}


def run(
    dims: tuple[int, ...], batch_size: int, workers: int, seconds: float, *, way: str, apart: bool = False
) -> Pace:
    """With `workers` on each node, the caller's left out if they are `apart`; the link as that one sees it."""
    here = ray.get_runtime_context().get_node_id()
    nodes = [
        node["NodeID"] for node in ray.nodes() if node["Alive"] and not (apart and node["NodeID"] == here)
    ]
    server = placed(Server, here, 0).remote(dims)
    team = [
        placed(Worker, node, 1).remote(dims, batch_size, rank)
        for rank, node in enumerate(node for node in nodes for _ in range(workers))
    ]
    try:
        return measured(WAYS[way](server, team), len(team), seconds)
    finally:
        for actor in (server, *team):
            ray.kill(actor)


def placed(actor: type, node: str, cores: int) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(actor).options(num_cpus=cores, scheduling_strategy=strategy)


def measured(gradients: Iterator[int], workers: int, seconds: float) -> Pace:
    count = 0
    while count < WARM_UP_STEPS * workers:
        count += next(gradients)
    window, count = Window(), 0
    while count < LEAST_STEPS * workers or window.seconds < seconds:
        count += next(gradients)
    return window.pace(count)
