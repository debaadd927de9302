"""The laws of the kernels of a GPU: on a device with `-m gpu`; with `-m slow` at tiny sizes in Triton's interpreter."""

import os

import pytest
import torch
from transformers import PreTrainedModel

from paceline import kernels
from tests.tiny import tiny_model

HAS_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
INTERPRETED = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles here"),
]
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 2048}


@pytest.fixture(params=[pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=HAS_CUDA)])
def device(request, monkeypatch) -> torch.device:
    """Where the kernels run. On a CPU they are in the place of the native library."""
    if request.param == "cpu":
        pytest.importorskip("triton", reason="Triton is not installed")
        from paceline.kernels import gpu
        from tests.kernels.gpu.interpreter import quicken

        quicken(monkeypatch)
        monkeypatch.setattr(kernels, "kernels_for", lambda device: gpu)
    return torch.device(request.param)


@pytest.fixture
def sized(device):
    """One of two sizes: what a device takes, and what is enough in the interpreter."""
    return lambda real, tiny: real if device.type == "cuda" else tiny


@pytest.fixture
def model(device, sized):
    """Makes random models of an architecture."""

    def made(name: str = "llama", dtype: torch.dtype = torch.bfloat16, **options: object) -> PreTrainedModel:
        return tiny_model(name, dtype, **sized(WIDE, {}), **options).to(device)

    return made
