"""The kernels that quantised layers are tested with."""

import pytest
import torch

from paceline.kernels.library import library
from paceline.quant import packed


@pytest.fixture(scope="module")
def one_thread():
    """Models this small only lose time to a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["native", "aten"])
def kernel(request, monkeypatch) -> str:
    """Layers that are quantised in this test lie as these kernels read them."""
    if request.param == "aten":
        monkeypatch.setattr(packed, "library", lambda: None)
    elif library() is None:
        pytest.skip("no native kernels here")
    return request.param
