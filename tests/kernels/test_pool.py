"""The threads of passes, and processes that fork."""

import ctypes
import os
import signal
import time
from collections.abc import Callable

import pytest
import torch

from paceline.kernels import load
from paceline.kernels.compiler import HOST
from paceline.kernels.packing import pack
from paceline.quant.packed import PackedMatrix
from tests.kernels.expert_layers import Layer, Rules, run
from tests.kernels.test_experts import rows_of

pytestmark = pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}")


def in_a_fork(holds: Callable[[], bool], seconds: float) -> bool:
    """Whether something holds in a fork of this process; False too if it takes longer."""
    if not (child := os.fork()):
        try:
            os._exit(not holds())
        finally:
            os._exit(1)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.02)
        if (done := os.waitpid(child, os.WNOHANG))[0]:
            return done[1] == 0
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def keeps_time(threads: int) -> bool:
    """Whether passes over layers of one group and of many have the bits of one thread."""
    layers, rows = [Layer(Rules(count, 1, 32, 8)) for count in (1, 40, 1)], rows_of(20, Rules(hidden=32))[None]
    before, want = torch.get_num_threads(), run(layers, rows)[0]
    try:
        torch.set_num_threads(threads)
        return all(torch.equal(run(layers, rows)[0], want) for _ in range(5))
    finally:
        torch.set_num_threads(before)


def rounds_to_nearest() -> bool:
    """Whether products have the same bits where the thread that asks for them rounds upwards."""
    set_rounding, upward = ctypes.CDLL(None).fesetround, {"x86_64": 0x800, "aarch64": 0x400000}[HOST.machine]
    weight, row = torch.randn(33, 64, generator=torch.Generator().manual_seed(3)).split((32, 1))
    matrix = PackedMatrix(32, 64, pack(weight), None)
    want = matrix(row)
    assert not set_rounding(upward)
    try:
        got = matrix(row)
    finally:
        set_rounding(0)
    return torch.equal(got, want)


def test_the_callers_rounding_does_not_matter():
    assert rounds_to_nearest()


def test_a_fork_has_threads_of_its_own():
    """Whatever the threads of the process before were waiting for."""

    def wakes() -> bool:
        return all(keeps_time(threads) and time.sleep(0.005) is None for threads in (8, 4, 3, 2))

    assert wakes()
    assert in_a_fork(wakes, 60)
