"""The hunt: seeds × dials, on several processes, up to the first failure, which is shortened.

The same seeds give the same finding whatever the number of processes. Not responsible for what a case is, or how it is
played.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from types import FrameType

import torch

from syncline.testing.hunt.case import Case, random_case
from syncline.testing.hunt.case_player import Failure, digest, play, run
from syncline.testing.hunt.shortener import shorten

TWICE = 25  # every so many seeds a case is played again, and must end with the same bits
AHEAD = 4  # batches of seeds per process that are under way
SEEDS = 5  # of one dial in a batch

Progress = Callable[[int, int], None]  # (cases done, of all)
Handler = signal.Handlers | Callable[[int, FrameType | None], None]


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
    done, everything = 0, len(seeds) * len(dials)
    with closing(_results(batches, jobs)) as results:  # workers end here, not when the interpreter does
        for count, found in results:
            done += count
            if progress is not None:
                progress(done, everything)
            if found is not None:
                return _shortened(*found)
    return None


Batch = tuple[list[int], str, int | None, int | None]
Result = tuple[int, tuple[Case, Failure] | None]


def _results(batches: Iterable[Batch], jobs: int) -> Generator[Result, None, None]:
    """In the order of the batches."""
    if jobs == 1:
        yield from map(_play_batch, batches)
        return
    left = iter(batches)
    context = multiprocessing.get_context("spawn")
    with _heard_once(), ProcessPoolExecutor(jobs, context, _end_with_the_hunt) as pool:
        with _unheard():
            first = islice(left, jobs * AHEAD)
            under_way: list[Future[Result]] = [pool.submit(_play_batch, batch) for batch in first]
        try:
            while under_way:
                yield under_way.pop(0).result()
                under_way += [pool.submit(_play_batch, batch) for batch in islice(left, 1)]
        finally:
            for future in under_way:
                future.cancel()


@contextmanager
def _unheard() -> Iterator[None]:
    """Processes that start meanwhile never hear Ctrl-C: it is for the hunt, which ends them."""
    with _at_interrupt(signal.SIG_IGN):
        yield


@contextmanager
def _heard_once() -> Iterator[None]:
    """A second Ctrl-C while workers end would leave them, and the hunt, waiting for ever."""

    def once(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    with _at_interrupt(once):
        yield


@contextmanager
def _at_interrupt(handler: Handler) -> Iterator[None]:
    """Only the main thread has handlers of signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end_with_the_hunt() -> None:
    """A worker whose parent was killed would wait for its next batch for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="syncline-hunt-parent", daemon=True).start()


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
