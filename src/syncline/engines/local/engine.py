"""The local engine's front door: checks that this machine can run it, then starts a supervisor."""

from __future__ import annotations

import sys

from syncline.engines.local.supervisor import LocalHandle
from syncline.engines.run import Engine, RunSpec
from syncline.errors import UsageError


class Local(Engine):
    """Processes and shared memory on this machine; needs no daemon."""

    def start(self, spec: RunSpec) -> LocalHandle:
        if not sys.platform.startswith("linux"):
            raise UsageError(
                f'engine="local" needs Linux (memfd, pidfd), this is {sys.platform}; use engine="sim"'
            )
        return LocalHandle(spec)
