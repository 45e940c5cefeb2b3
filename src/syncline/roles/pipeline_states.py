"""What a checkpoint of an all-reduce run holds beside tables, loaders and learners: pipelines, and the means in them (A3).

A mean on its way under delayed:k is as large as the model; they lie in a file of their own, everything else in the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor

FLIGHTS = "flights.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanInFlight:
    """One iteration's gradients, summed over all learners and not applied yet."""

    iteration: int
    stamp: int
    epochs: list[int]  # that end with it
    options: list[dict[str, Any]]  # of the groups, as they were with the gradient
    header: list[float]  # what all said with it
    factor: float  # from the sum to the mean
    losses: dict[int, tuple[float, int]] = field(
        default_factory=dict
    )  # rank -> (sum over examples, examples)
    gradients: dict[int, Tensor] = field(default_factory=dict)  # by entry


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineState:
    """How far the steps of one table are."""

    started: int  # iterations
    void: int = 0  # of them, without examples
    depth: int = 0
    groups: list[dict[str, Any]] = field(default_factory=list)  # what the optimizer keeps in its groups
    flights: list[MeanInFlight] = field(default_factory=list)

    def without_tensors(self) -> PipelineState:
        """For the manifest."""
        return replace(self, flights=[replace(flight, gradients={}) for flight in self.flights])


def flight_tensors(pipelines: Mapping[int, PipelineState]) -> dict[str, Tensor]:
    """By name."""
    return {
        f"{table}/{flight.iteration}/{entry}": gradient
        for table, pipeline in pipelines.items()
        for flight in pipeline.flights
        for entry, gradient in flight.gradients.items()
    }


def pipelines_json(
    pipelines: Mapping[int, PipelineState], losses: Mapping[int, Mapping[int, Sequence[tuple[float, int]]]]
) -> list[dict[str, Any]]:
    """For the manifest, with every rank's losses of the flights, by rank and table."""
    found = []
    for table, pipeline in pipelines.items():
        flights = [
            {
                **{key: value for key, value in asdict(flight).items() if key != "gradients"},
                "losses": {rank: list(each[table][number]) for rank, each in losses.items()},
            }
            for number, flight in enumerate(pipeline.flights)
        ]
        found.append({**asdict(pipeline), "table": table, "flights": flights})
    return found


def pipelines_of(
    records: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor]
) -> dict[int, PipelineState]:
    """The inverse, after a trip through JSON."""
    gradients: dict[tuple[int, int], dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        table, iteration, entry = map(int, name.split("/"))
        gradients.setdefault((table, iteration), {})[entry] = tensor
    return {record["table"]: _pipeline(record, gradients) for record in records}


def _pipeline(
    record: Mapping[str, Any], gradients: Mapping[tuple[int, int], dict[int, Tensor]]
) -> PipelineState:
    flights = [
        MeanInFlight(
            **{
                **each,
                "losses": {int(rank): (loss, count) for rank, (loss, count) in each["losses"].items()},
                "gradients": gradients.get((record["table"], each["iteration"]), {}),
            }
        )
        for each in record["flights"]
    ]
    return PipelineState(
        **{**{key: value for key, value in record.items() if key != "table"}, "flights": flights}
    )
