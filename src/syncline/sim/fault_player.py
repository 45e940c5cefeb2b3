"""Playing a script in a simulated run: its moments are moments of virtual time, or versions as the leading shard makes them.

Not responsible for what a line may say (`engines.event_script`), nor for what happens to single learners and shards (`Simulation.play`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from syncline.cluster import Cluster
from syncline.dial import Course, as_sync
from syncline.engines.event_script import Fault, parse_script
from syncline.engines.run import RunSpec
from syncline.errors import DialError, NotYetError, UsageError
from syncline.topologies import Trees

if TYPE_CHECKING:
    from syncline.sim.simulation import Simulation


class Script:
    """What is still to happen; lines of the same moment happen in the order they stand."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = list(faults)
        self.timed = [fault for fault in self.faults if fault.version is None]
        self._versioned = [fault for fault in self.faults if fault.version is not None]

    @classmethod
    def of(cls, script: str | None) -> Script:
        return cls(parse_script(script or ""))

    def reached(self, version: int, play: Callable[[Fault], None]) -> None:
        """The first table has this version now."""
        if not self._versioned:
            return
        due = [fault for fault in self._versioned if fault.due(version, 0.0)]
        self._versioned = [fault for fault in self._versioned if fault not in due]
        for fault in due:
            play(fault)

    def rest(self, played: Iterable[str]) -> Script:
        """Without the lines that happened."""
        happened, left = list(played), []
        for fault in self.faults:
            if fault.text in happened:
                happened.remove(fault.text)
            else:
                left.append(fault)
        return Script(left)

    def after(self, version: int, seconds: float) -> Script:
        """Without those whose moment was before, in the run that goes on."""
        return Script(
            fault
            for fault in self.faults
            if (fault.seconds or 0.0) > seconds or (fault.version is not None and fault.version > version)
        )

    def missed(self, played: Iterable[str]) -> list[str]:
        """What a run that is over says of the lines whose moment has not come; a stop is not missed."""
        left = [fault.text for fault in self.rest(played).faults if fault.action != "stop"]
        return [f"not played, the run was over before: {text}" for text in left]


def check_script(script: Script, spec: RunSpec, cluster: Cluster) -> None:
    """Lines that this run could not play are refused before it starts."""
    for fault in script.faults:
        if spec.batch is not None:
            if fault.action in ("pause", "change", "cut") or fault.role == "node":
                raise NotYetError(
                    f"script, '{fault.text}': under sandblaster learners and shards can be killed, learners added and the run "
                    "stopped, no more yet"
                )
        elif spec.plan.topology.fixed_members:
            if fault.action not in ("kill", "stop") or fault.role in ("shard", "node"):
                raise NotYetError(
                    f"script, '{fault.text}': over all-reduce learners can be killed and the run stopped, no more yet"
                )
        else:
            _check_fault(fault, spec, cluster)


def _check_fault(fault: Fault, spec: RunSpec, cluster: Cluster) -> None:
    """Over servers: links that it does not have, dials that it could not change to."""
    topology = spec.plan.topology
    if isinstance(topology, Trees) and (
        fault.role == "link" or (fault.role == "node" and fault.action != "kill")
    ):
        raise UsageError(
            f"script, '{fault.text}': nodes are those of the tree, and can be killed; this run is over {topology}"
        )
    if fault.role == "link" and not cluster.beside:
        raise UsageError(
            f"script, '{fault.text}': in this cluster nothing goes from node to node, the shards have machines of their own; "
            "use one with beside=True"
        )
    if fault.action == "change":
        dial = as_sync(fault.dial)
        topology.check(Course.of(dial), spec.faults, clip_norm=spec.plan.clip_norm, warm=spec.plan.warm)
        dial.check(spec.plan.learners, spec.plan.batch_size)
        if dial.delay > spec.plan.delay:
            raise DialError(
                f"script, '{fault.text}': {dial} keeps {dial.delay + 1} versions, this run was started to keep "
                f"{spec.plan.delay + 1}"
            )


def strike(world: Simulation, fault: Fault) -> None:
    """A line that kills or pauses a learner, a shard, or all that is on a machine, or cuts a link, now."""
    if fault.action == "cut":
        what = f"the link between nodes {fault.rank} and {fault.other} is cut for {fault.length:g} s"
        world.recorder.event(what, kind="cut")
        world.network.cut(fault.rank, fault.other, world.clock.now + fault.length)
        return
    role, kills, why = fault.role, fault.action == "kill", "killed by the script"
    how = "killed" if kills else f"paused for {fault.length:g} s"
    learners = [each for each in world.live.values() if not each.dead]
    if role == "node" and not isinstance(world.spec.plan.topology, Trees):  # else they are the tree's
        learners = [each for each in learners if each.machine == fault.rank]
        servers = [each for each in world.servers if each.machine == fault.rank and not each.dead]
    else:
        learners = [each for each in learners if role == "learner" and each.rank == fault.rank][-1:]
        servers = world.servers[fault.rank : fault.rank + 1] if role == "shard" else []
    if not learners and not servers:
        world.recorder.event(f"not played, nobody is there: {fault.text}", kind="missed")
    elif role == "node":
        why = f"{why} with its node"
        world.recorder.event(f"node {fault.rank} is {how} by the script", kind=how.split()[0])
    elif learners and not kills:
        world.recorder.event(how, fault.rank, kind="paused")
    elif not kills:
        world.recorder.event(f"shard {fault.rank} is {how}", kind="paused", shard=fault.rank)
    for learner in learners:
        world.kill(learner, why) if kills else world.pause(learner, fault.length)
    for server in servers:
        world.lose_shard(server.shard) if kills else server.pause.begin(world.clock.now, fault.length)
