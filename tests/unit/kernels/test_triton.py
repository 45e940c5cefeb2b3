"""Triton kernels on a machine without a graphics card: interpreted, and compiled ahead of time for three cards.

Each test starts a separate process. Triton decides at its first import whether it interprets, and `compiling.py` replaces what
torch reports of the card.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CAPABILITIES = (80, 90, 100)  # A100; H100 and H200, with the copy engine; B200
OLDEST_TRITON = "3.6.0"  # what the oldest supported torch, 2.11, brings


def run(*command: str, **environment: str) -> str:
    """Run Python on a command line in the root and return what it printed; fail with its output if it fails."""
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize("which", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_kernels_agree_with_the_reference_in_the_interpreter(which: str) -> None:
    pytest.importorskip("triton")
    tests = str(Path(__file__).with_name("interpreted.py"))
    printed = run(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, tests),
        TRITON_INTERPRET="1",
        CUDA_VISIBLE_DEVICES="",
    )
    assert " passed" in printed and "skipped" not in printed


def compile_kernels(cache: Path, capability: int, geometries: int, **environment: str) -> str:
    return run(
        *("-m", "tests.unit.kernels.compiling", str(capability), str(geometries)),
        TRITON_CACHE_DIR=str(cache),
        **environment,
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("geometries", [1, pytest.param(5, marks=pytest.mark.long)])
def test_every_kernel_compiles_ahead_of_time(tmp_path: Path, capability: int, geometries: int) -> None:
    pytest.importorskip("triton")
    printed = compile_kernels(tmp_path, capability, geometries)
    assert f"'weight_gradient_kernel': {10 * geometries}" in printed and "'window_kernel': 2" in printed


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_every_kernel_compiles_with_the_oldest_triton(tmp_path: Path) -> None:
    folder = tmp_path / "triton"
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    done = subprocess.run(
        [sys.executable, *install, f"triton=={OLDEST_TRITON}"], capture_output=True, text=True, timeout=900
    )
    if done.returncode:
        pytest.skip(
            f"triton {OLDEST_TRITON} cannot be installed here: {done.stderr.strip().splitlines()[-1]}"
        )
    for capability in CAPABILITIES:
        printed = compile_kernels(tmp_path / "cache", capability, 5, PYTHONPATH=str(folder))
        assert printed.startswith(f"triton {OLDEST_TRITON}")
