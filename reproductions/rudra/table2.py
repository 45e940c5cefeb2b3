"""Rudra's Table 2: test error and time over (σ, μ, λ), on the real CIFAR-10, simulated learners.

    python -m reproductions.rudra.table2 --data FOLDER [--rows first|all|"1,4,30;30,4,30"] [--seeds 0,1] [--jobs 4]
    python -m reproductions.rudra.table2 --print           the table of what is there

Every row is a process of its own that leaves one JSON file in `--out`; rows that are there already are not run again.
`--limit` ends after so many seconds and leaves the rest for the next call.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from reproductions.rudra.paper import BASELINE, ROWS, Row, find

HERE = Path(__file__).parent
GROUPS = (128, 256, 512, 1024)


def file_of(out: Path, row: Row, seed: int) -> Path:
    return out / f"table2-{row.name.replace(',', '-')}-seed{seed}.json"


def play(given: argparse.Namespace) -> int:
    """Run what is missing, the longest rows first; the number of rows that failed."""
    wanted = [(row, seed) for seed in seeds(given) for row in find(given.rows)]
    missing = [(row, seed) for row, seed in wanted if not file_of(given.out, row, seed).exists()]
    if given.longest_first:
        missing.sort(key=lambda pair: -pair[0].learners / pair[0].mu)
    given.out.mkdir(parents=True, exist_ok=True)
    running: dict[subprocess.Popen[bytes], Path] = {}
    failed, end = 0, time.monotonic() + given.limit
    while (missing or running) and time.monotonic() < end:
        while missing and len(running) < given.jobs:
            row, seed = missing.pop(0)
            running[start(given, row, seed)] = file_of(given.out, row, seed)
        time.sleep(0.5)
        for process in [process for process in running if process.poll() is not None]:
            failed += process.returncode != 0 or not running[process].exists()
            del running[process]
    for process in running:
        process.kill()
    return failed


def start(given: argparse.Namespace, row: Row, seed: int) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "reproductions.rudra.experiment",
        "--data",
        given.data,
        "--row",
        row.name,
    ]
    command += [
        "--seed",
        str(seed),
        "--epochs",
        str(given.epochs),
        "--json",
        str(file_of(given.out, row, seed)),
    ]
    for name in ("device", "commit"):
        if getattr(given, name):
            command += [f"--{name}", getattr(given, name)]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})


def seeds(given: argparse.Namespace) -> list[int]:
    return [int(seed) for seed in given.seeds.split(",")]


def outcomes(out: Path) -> dict[str, list[dict[str, Any]]]:
    """What was run to its end, by row, in the order of seeds."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(out.glob("table2-*-seed*.json")):
        outcome = json.loads(file.read_text())
        found.setdefault(outcome["row"], []).append(outcome)
    return found


def table(found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One line per row that was run, with the paper's figures beside ours."""
    lines = []
    for row in sorted(ROWS, key=lambda row: (row is not BASELINE, row.group)):
        ours = found.get(row.name)
        if not ours:
            continue
        errors = [outcome["error"] for outcome in ours]
        lines.append(
            {
                "group": row.group if row is not BASELINE else "",
                "sigma": row.sigma,
                "mu": row.mu,
                "learners": row.learners,
                "error": round(statistics.mean(errors), 2),
                "errors": " ".join(f"{error:.2f}" for error in errors),
                "paper_error": row.error,
                "difference": round(statistics.mean(errors) - row.error, 2),
                "mean_staleness": round(ours[0]["staleness"]["mean"], 2),
                "simulated_seconds": round(ours[0]["simulated_seconds"]),
                "paper_seconds": row.seconds,
                "gradients": ours[0]["gradients"],
                "seconds": round(ours[0]["seconds"]),
                "epochs": ours[0]["epochs"],
            }
        )
    return lines


def show(out: Path) -> None:
    """Print the table as Markdown, write it as CSV."""
    lines = table(outcomes(out))
    if not lines:
        raise SystemExit(f"no finished rows in {out}; run with --data first")
    print(
        "| μλ | (σ, μ, λ) | error, seeds | paper | difference | mean σ | simulated s | paper s | gradients | real s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for line in lines:
        print(
            f"| {line['group'] or 'baseline'} | ({line['sigma']}, {line['mu']}, {line['learners']}) "
            f"| {line['error']:.2f} ({line['errors']}) | {line['paper_error']:.2f} | {line['difference']:+.2f} "
            f"| {line['mean_staleness']} | {line['simulated_seconds']} | {line['paper_seconds']} "
            f"| {line['gradients']} | {line['seconds']} |"
        )
    with (out / "table2.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def picture(out: Path, file: Path) -> None:
    """Ours over the paper's errors, by μλ."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = table(outcomes(out))
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2))
    colours = dict(zip(GROUPS, ("C0", "C2", "C1", "C3"), strict=True))
    for line in lines:
        colour = colours.get(line["group"], "black")
        left.plot(line["paper_error"], line["error"], "o", color=colour)
        if line["sigma"] or line["learners"] == 1:
            right.plot(max(line["sigma"], 0.5), line["error"], "o", color=colour)
            right.plot(max(line["sigma"], 0.5), line["paper_error"], "x", color=colour, alpha=0.5)
    low, high = 16, 32
    left.plot([low, high], [low, high], color="0.6", lw=1)
    left.fill_between([low, high], [low - 1.5, high - 1.5], [low + 1.5, high + 1.5], color="0.9")
    left.set(xlabel="paper, test error %", ylabel="ours, test error %", title="±1.5 points shaded")
    right.set(xscale="log", xlabel="σ (baseline at the left)", ylabel="test error %", title="o ours, x paper")
    for group, colour in colours.items():
        right.plot([], [], "o", color=colour, label=f"μλ ≈ {group}")
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="a folder with CIFAR-10")
    parser.add_argument(
        "--rows", default="first", help='first, all, baseline, or for example "1,4,30;30,4,30"'
    )
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--epochs", type=int, default=140)
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time, on one GPU")
    parser.add_argument("--longest-first", action="store_true", help="not in the order of the table")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--device")
    parser.add_argument("--commit")
    parser.add_argument("--print", action="store_true", dest="only_print")
    parser.add_argument("--picture", type=Path)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    failed = 0
    if not given.only_print:
        if not given.data:
            raise SystemExit("--data is missing: a folder with CIFAR-10")
        failed = play(given)
    show(given.out)
    if given.picture:
        picture(given.out, given.picture)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
