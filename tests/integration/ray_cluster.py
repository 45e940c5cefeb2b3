"""A Ray cluster of several raylets on this machine, in a process that is nobody's child: it ends when its input does.

A line with a number is one more raylet, of so many cores.
"""

from __future__ import annotations

import os
import signal
import sys


def main(cpus: list[int]) -> None:
    if os.fork():
        os._exit(0)
    os.setsid()
    from ray.cluster_utils import Cluster

    said, quiet = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus[0], "include_dashboard": False})
    for count in cpus[1:]:
        cluster.add_node(num_cpus=count)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers look whether their raylet is there: no zombies
    os.write(said, f"{cluster.address}\n".encode())
    os.close(said)
    for line in sys.stdin:
        cluster.add_node(num_cpus=int(line))
    cluster.shutdown()


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]])
