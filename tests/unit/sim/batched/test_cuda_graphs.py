"""Computations that are repeated: on the CPU as they are, with their inputs where they expect them."""

from __future__ import annotations

import torch

from syncline.sim.batched.cuda_graphs import RepeatedProgram, repeatable


def test_a_program_is_run_with_its_inputs_as_they_are_now() -> None:
    total = torch.zeros(2)
    program = RepeatedProgram(lambda a, b: total.add_(a * b), [torch.ones(2), torch.ones(2)])
    program.run()
    program.inputs[1].copy_(torch.tensor([2.0, 3.0]))
    program.run()
    assert total.tolist() == [3.0, 4.0]


def test_torchs_settings_for_gpus_hold_only_inside_and_only_there() -> None:
    library, products = torch.backends.cudnn, torch.backends.cuda.matmul

    def settings() -> tuple[bool, ...]:
        return library.deterministic, library.benchmark, library.allow_tf32, products.allow_tf32

    before = settings()
    library.benchmark = True
    try:
        with repeatable(torch.device("cpu")):
            assert library.benchmark
        with repeatable(torch.device("cuda")):
            assert settings() == (True, False, False, False)
        assert settings() == (before[0], True, *before[2:])
    finally:
        library.benchmark = before[1]
