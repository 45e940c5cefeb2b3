"""The engine that a command's options ask for: the simulator on a cluster, with a script of events."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from syncline.cluster.record import Cluster
from syncline.engines.event_script import parse_script
from syncline.errors import UsageError
from syncline.jobs import Job, Named
from syncline.jobs.toml import override, parse_override

SETS = ("engine.name=sim",)  # before the user's own, so that --set engine.batched=true finds the simulator
CLUSTER = "p775"  # where neither the job nor the command names one: its times grow with the batch


@dataclass(frozen=True, kw_only=True)
class SimulatedEngine:
    """What a command line says about the simulator; None where it says nothing."""

    cluster: str | None = None
    script: str | None = None
    timing: bool = False

    def __post_init__(self) -> None:
        """Refused here, the option is named."""
        for option, value, check in (
            ("--cluster", self.cluster, Cluster.parse),
            ("--script", self.script, parse_script),
        ):
            if value is not None:
                try:
                    check(value)
                except UsageError as error:
                    raise UsageError(f"{option} {value}: {error}") from None

    def words(self) -> list[tuple[str, str]]:
        """The options that were given."""
        given = (("--cluster", self.cluster), ("--script", self.script))
        return [(option, value) for option, value in given if value is not None]

    def apply(self, job: Job) -> Job:
        """The job on the simulator; what its own [engine] says about one stays where the command says nothing.

        Shards that the job does not count are one: their number must not depend on the machine that simulates.
        """
        arguments: dict[str, Any] = dict(job.engine.arguments) if job.engine.name == "sim" else {}
        if self.cluster is not None:
            arguments["cluster"] = self.cluster
        if self.script is not None:
            arguments["script"] = self.script
        if not {"cluster", "compute", "transfer", "latency"} & arguments.keys():
            arguments["cluster"] = CLUSTER
        topology = "servers:1" if job.topology == "servers" else job.topology
        return replace(job, engine=Named(name="sim", arguments=arguments), topology=topology)


def refuse_other_engine(sets: Iterable[str]) -> None:
    """The job's own engine gives way to the simulator; what the same command line says must not."""
    for text in sets:
        table: dict[str, Any] = {}
        with suppress(UsageError):  # what is no override is refused with the job
            override(table, *parse_override(text))
        engine = table.get("engine", "sim")
        name = engine.get("name", "sim") if isinstance(engine, dict) else engine
        if name != "sim":
            raise UsageError(
                f"--set {text}: this command simulates; real processes are with syncline train, or tradeoff --engine local"
            )
