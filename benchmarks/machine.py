"""What every benchmark's command has: its options, the head of its table (machine, versions, commit, date), its file of results."""

import argparse
import json
import os
import platform
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]


def parser(words: str | None) -> argparse.ArgumentParser:
    """With a script's own words as its help."""
    return argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)


def announce(between: str = ", ", **more: str) -> dict[str, str]:
    """The head of a table, printed, with what else it was measured on."""
    head = describe() | more
    print(between.join(f"{key} {value}" for key, value in head.items()), flush=True)
    return head


def keep(file: Path | None, result: Any) -> None:
    """In the file, if one was named."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


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
