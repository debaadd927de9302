"""Kernels of a GPU in Triton's interpreter, on tensors of the CPU; `tests/gpu` runs the same laws on a device."""

import pytest

from paceline import kernels

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """The kernels of a GPU in the place of the native library."""
    from paceline.kernels import gpu

    monkeypatch.setattr(kernels, "kernels_for", lambda device: gpu)
    return gpu


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    from tests.kernels.gpu.interpreter import quicken

    quicken(monkeypatch)
