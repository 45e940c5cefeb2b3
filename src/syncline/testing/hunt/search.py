"""The hunt: seeds × dials, on several processes, up to the first failure, which is shortened.

The same seeds give the same finding whatever the number of processes. Not responsible for what a case is, or how it is
played.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from syncline.errors import RunError
from syncline.studies.worker_pool import Pool, Work
from syncline.testing.hunt.case import Case, random_case
from syncline.testing.hunt.case_player import Failure, digest, play, run
from syncline.testing.hunt.scratch_folders import scratch_place, sweep
from syncline.testing.hunt.shortener import shorten

TWICE = 25  # every so many seeds a case is played again, and must end with the same bits
SEEDS = 5  # of one dial in a batch

Progress = Callable[[int, int], None]  # (cases done, of all)


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
    return _shortened(*found) if found is not None else None


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
        failure = play(case)
        if failure is None and seed % TWICE == 0:
            failure = _repeats(case)
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


def _shortened(drawn: Case, failure: Failure) -> Found:
    def fails(case: Case) -> bool:
        again = play(case)
        return again is not None and again.kind == failure.kind

    case = shorten(drawn, fails) if fails(drawn) else drawn
    return Found(drawn, case, play(case) or failure)
