"""Worker processes: pieces in order, one lost with each that dies, none that stays behind or hears Ctrl-C."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest

from syncline.studies.worker_pool import News, Pool

DOUBLES = partial(eval, "lambda piece, say: (say(f'has {piece}'), 2 * piece)[1]")
DIES = partial(eval, "lambda piece, say: __import__('os').kill(__import__('os').getpid(), 9) if piece == 1 else piece")  # fmt: skip


def run(pool: Pool, pieces: list[int]) -> list[News]:
    return [each for news in pool.run(pieces) for each in news]


@pytest.mark.long
def test_every_piece_begins_moves_and_ends() -> None:
    with Pool(DOUBLES, 1) as pool:
        found = run(pool, [1, 2])
    first, second = (
        [News("started", n), News("moved", n, f"has {n}"), News("ended", n, 2 * n)] for n in (1, 2)
    )
    assert found == [*first, *second]


def test_a_worker_that_dies_costs_its_piece_only() -> None:
    with Pool(DIES, 1) as pool:
        found = run(pool, [0, 1, 2])
    ends = [each for each in found if each.kind in ("ended", "died")]
    lost = News("died", 1, "its process ended with SIGKILL")
    assert ends == [News("ended", 0, 0), lost, News("ended", 2, 2)]


@pytest.mark.long
def test_workers_are_no_part_of_the_terminals_session_and_end_with_the_pool() -> None:
    with Pool(DOUBLES, 2) as pool:
        run(pool, [1, 2, 3])
        workers = [worker.process for worker in pool._workers]
        assert len(workers) == 2
        assert all(os.getsid(worker.pid) == worker.pid != os.getsid(0) for worker in workers)
    assert [worker.poll() for worker in workers] == [-signal.SIGKILL] * 2
