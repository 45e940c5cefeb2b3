"""The hunt: seeds × dials, on several processes, up to the first failure, which is shortened.

The same seeds give the same finding whatever the number of processes. A case is shortened to fewer faults, smaller sizes, a plainer
cluster, as long as it fails in the same way. Not responsible for what a case is, or how it is played.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from syncline.errors import RunError, UsageError
from syncline.studies.worker_pool import Pool, Work
from syncline.testing.hunt.case import Case, random_case
from syncline.testing.hunt.case_player import Failure, digest, play, run, scratch_place, sweep

TWICE = 25  # every so many seeds a case is played again, and must end with the same bits
SEEDS = 5  # of one dial in a batch

Progress = Callable[[int, int], None]  # (cases done, of all)
Fails = Callable[[Case], bool]
TRIES = 300
# What a case is better without: as usual, it is plainer.
EXTRAS: tuple[str, ...] = ("cluster", "clip", "warmstart", "policy", "replace", "checkpoint_every", "steps")
EXTRAS += ("loop", "shards", "fan_in")
SIZES = {"steps": 1, "epochs": 1, "learners": 1, "examples": 1, "batch_size": 1, "shards": 1, "warmstart": 0}


@dataclass(frozen=True, slots=True)
class Found:
    """The first failure, as it was drawn, and shortened."""

    drawn: Case
    case: Case
    failure: Failure


def hunt(
    seeds: Sequence[int],
    dials: Sequence[str],
    *,
    learners: int | None = None,
    shards: int | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
) -> Found | None:
    """None: nothing was found."""
    batches = [
        (list(seeds[start : start + SEEDS]), dial, learners, shards)
        for start in range(0, len(seeds), SEEDS)
        for dial in dials
    ]
    done, everything, found = 0, len(seeds) * len(dials), None
    with Pool(_prepare, jobs) as pool:
        for count, found in map(_play_batch, batches) if jobs == 1 else _in_order(pool, batches):
            done += count
            if progress is not None:
                progress(done, everything)
            if found is not None:
                break
    sweep(scratch_place())  # what workers that were cut off have left
    if found is None:
        return None
    drawn, failure = found

    def fails(case: Case) -> bool:
        again = play(case)
        return again is not None and again.kind == failure.kind

    case = shorten(drawn, fails) if fails(drawn) else drawn
    return Found(drawn, case, play(case) or failure)


Batch = tuple[list[int], str, int | None, int | None]
Result = tuple[int, tuple[Case, Failure] | None]


def _in_order(pool: Pool, batches: Sequence[Batch]) -> Iterator[Result]:
    """Of the batches, whichever ends first."""
    answers: dict[int, Result] = {}
    given = 0
    for news in pool.run(list(enumerate(batches))):
        for each in news:
            if each.kind == "died":
                raise RunError(f"the hunt cannot go on: {each.said}, with seeds {each.piece[1][0]}")
            if each.kind == "ended":
                answers[each.piece[0]] = each.said
        while given in answers:
            yield answers.pop(given)
            given += 1


def _prepare() -> Work:
    """In a worker."""
    return lambda piece, say: _play_batch(piece[1])


def _play_batch(batch: Batch) -> Result:
    torch.set_num_threads(1)
    seeds, dial, learners, shards = batch
    for count, seed in enumerate(seeds):
        case = random_case(seed, dial, learners=learners, shards=shards)
        failure = play(case) or (_repeats(case) if seed % TWICE == 0 else None)
        if failure is not None:
            return count + 1, (case, failure)
    return len(seeds), None


def _repeats(case: Case) -> Failure | None:
    """Played again, it ends with the same bits."""
    try:
        first, second = (digest(run(case, check=False)) for _ in range(2))
    except Exception:  # an end that the script brings about
        return None
    if first != second:
        return Failure("not the same twice", "the same case ends with other bits when it is played again")
    return None


# -- shortening --------------------------------------------------------------------------------------------


def shorten(case: Case, fails: Fails, tries: int = TRIES) -> Case:
    """The shortest that was found with so many runs."""
    left = tries
    shorter = True
    while shorter and left > 0:
        shorter = False
        for candidate in _candidates(case):
            left -= 1
            if left < 0:
                break
            if fails(candidate):
                case, shorter = candidate, True
                break
    return case


def _candidates(case: Case) -> Iterator[Case]:
    """Shorter ones, the boldest first."""
    for changes in (*_scripts(case), *_sizes(case), *_clusters(case), *_moments(case)):
        try:
            candidate = replace(case, **changes)
        except UsageError:  # too few learners for its dial, say
            continue
        if candidate != case:
            yield candidate


def _lines(case: Case) -> list[str]:
    return [line.strip() for line in case.script.split(";") if line.strip()]


def _scripts(case: Case) -> Iterator[dict[str, Any]]:
    """Without halves, quarters … of the lines, then without single ones (delta debugging)."""
    lines = _lines(case)
    size = len(lines)
    while size >= 1:
        for start in range(0, len(lines), size):
            yield {"script": "; ".join(lines[:start] + lines[start + size :])}
        size //= 2


def _sizes(case: Case) -> Iterator[dict[str, Any]]:
    """Plainer, then smaller."""
    usual = Case()
    for name in EXTRAS:
        yield {name: getattr(usual, name)}
    for name, least in SIZES.items():
        value = getattr(case, name)
        if value is None:
            continue
        for smaller in dict.fromkeys((least, (least + value) // 2, value - 1)):
            if least <= smaller < value:
                yield {name: smaller}


def _clusters(case: Case) -> Iterator[dict[str, Any]]:
    name, _, rest = case.cluster.partition(":")
    parts = [part for part in rest.split(",") if part]
    for index in range(len(parts)):
        kept = parts[:index] + parts[index + 1 :]
        yield {"cluster": f"{name}:{','.join(kept)}" if kept else name}


def _moments(case: Case) -> Iterator[dict[str, Any]]:
    """Rounder times, smaller counts."""
    lines = _lines(case)
    for index, line in enumerate(lines):
        found = re.search(r"at (\d+\.\d{3,}) s$", line)
        if found:
            for digits in (0, 1, 2):
                rounder = f"{line[: found.start(1)]}{round(float(found[1]), digits):g} s"
                yield {"script": "; ".join([*lines[:index], rounder, *lines[index + 1 :]])}
