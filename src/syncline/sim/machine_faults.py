"""What a script does to whole machines of a simulated cluster, and to the links between them. Lines say `node` for a machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncline.engines.fault_script import Fault

if TYPE_CHECKING:
    from syncline.sim.simulation import Simulation


def happens_to_machines(world: Simulation, fault: Fault) -> bool:
    """One line, now; False if nobody is there."""
    if fault.action == "cut":
        what = f"the link between nodes {fault.rank} and {fault.other} is cut for {fault.length:g} s"
        world.recorder.event(what, kind="cut")
        world.network.cut(fault.rank, fault.other, world.clock.now + fault.length)
        return True
    learners = [each for each in world.live.values() if each.machine == fault.rank and not each.dead]
    servers = [each for each in world.servers if each.machine == fault.rank and not each.dead]
    done = "killed" if fault.action == "kill" else f"paused for {fault.length:g} s"
    if learners or servers:
        world.recorder.event(f"node {fault.rank} is {done} by the script", kind=done.split()[0])
    for learner in learners:
        if fault.action == "kill":
            world.kill(learner, "killed by the script with its node")
        else:
            world.pause(learner, fault.length)
    for server in servers:
        if fault.action == "kill":
            world.lose_shard(server.shard)
        else:
            server.pause.begin(world.clock.now, fault.length)
    return bool(learners or servers)
