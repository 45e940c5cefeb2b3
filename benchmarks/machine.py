"""What a table of results was measured on: machine, versions, commit and date."""

import os
import platform
import subprocess
from datetime import datetime
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]


def describe() -> dict[str, str]:
    """The head of a table, in the order in which it is printed."""
    return {
        "cpu": cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(),
        "date": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z"),
    }


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """The short commit, with '+dirty' where files differ from it; 'unknown' outside a repository, unless BENCH_COMMIT says it."""
    if said := os.environ.get("BENCH_COMMIT"):
        return said
    head = git("rev-parse", "--short", "HEAD")
    if head is None:
        return "unknown"
    return head + ("+dirty" if git("status", "--porcelain") else "")


def git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


if __name__ == "__main__":
    for name, value in describe().items():
        print(f"{name:8} {value}")
