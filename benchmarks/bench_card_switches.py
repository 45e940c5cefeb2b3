"""What does it cost when two processes take turns on one GPU?

    python -m benchmarks.bench_card_switches [--rounds 2000]

A round: one process adds to a tensor on the card and records an event, another waits for that event on its stream and does the
same back; words in shared memory say when. Beside it the same turns between two streams of one process. Microseconds a turn.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.multiprocessing as mp

from benchmarks import machine


def take_turns(side: int, rounds: int, words: torch.Tensor, handles: Any, barrier: Any, found: Any) -> None:
    torch.set_num_threads(1)
    mine = torch.cuda.Event(interprocess=True)
    mine.record()
    handles[side].put(mine.ipc_handle())
    theirs = torch.cuda.Event.from_ipc_handle(torch.device("cuda", 0), handles[1 - side].get())
    value, turn = torch.zeros(1 << 16, device="cuda"), memoryview(words.numpy())
    stream = torch.cuda.current_stream()
    barrier.wait()
    began = time.perf_counter()
    for number in range(rounds):
        while turn[0] != 2 * number + side:
            pass
        stream.wait_event(theirs)
        value.add_(1.0)
        mine.record(stream)
        turn[0] = 2 * number + side + 1
    torch.cuda.synchronize()
    found.put((time.perf_counter() - began) / rounds / 2)


def two_processes(rounds: int) -> float:
    context = mp.get_context("spawn")
    words = torch.zeros(1, dtype=torch.int64).share_memory_()
    handles, barrier, found = [context.Queue(), context.Queue()], context.Barrier(2), context.Queue()
    given = (rounds, words, handles, barrier, found)
    processes = [context.Process(target=take_turns, args=(side, *given)) for side in (0, 1)]
    for process in processes:
        process.start()
    seconds = max(found.get() for _ in processes)
    for process in processes:
        process.join()
    return seconds


def two_streams(rounds: int) -> float:
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    events = [torch.cuda.Event(), torch.cuda.Event()]
    values = [torch.zeros(1 << 16, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    began = time.perf_counter()
    for number in range(2 * rounds):
        side = number % 2
        with torch.cuda.stream(streams[side]):
            streams[side].wait_event(events[1 - side])
            values[side].add_(1.0)
            events[side].record(streams[side])
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / rounds / 2


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    rounds = parser.parse_args().rounds
    machine.announce(" · ", gpu=torch.cuda.get_device_name())
    two_streams(100)
    print(f"two streams of one process: {1e6 * two_streams(rounds):.1f} µs a turn", flush=True)
    print(f"two processes: {1e6 * two_processes(rounds):.1f} µs a turn", flush=True)


if __name__ == "__main__":
    main()
