"""A learner's allocator: blocks that tensors free are used again without the system's help."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from syncline.engines.malloc_tuning import keep_freed_memory

torch.set_num_threads(1)
if sys.argv[1] == "keep":
    print(keep_freed_memory())


def step():
    a, b = torch.zeros(20_000_000), torch.ones(10_000_000)
    del a, b


for _ in range(3):
    step()
counts = []
for _ in range(11):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sorted(counts)[5])  # a step or two may fault: the system takes a page back, or joins pages into large ones
"""


def faults(mode: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.skipif(sys.platform != "linux", reason="the switch is glibc's")
def test_freed_blocks_are_kept() -> None:
    possible, count = faults("keep")
    if possible == "False":
        pytest.skip("this C library has no mallopt")
    assert int(count) < 100  # of 30,000 pages a step without it, fewer where pages are large


def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    from syncline.engines import malloc_tuning as allocator

    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda _: object())
    assert not allocator.keep_freed_memory()
