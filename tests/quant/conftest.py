"""The kernels that quantised layers are tested with."""

import pytest

from paceline.kernels.library import library
from paceline.quant import packed


@pytest.fixture(params=["native", "aten"])
def kernel(request, monkeypatch) -> str:
    """Layers that are quantised in this test lie as these kernels read them."""
    if request.param == "aten":
        monkeypatch.setattr(packed, "library", lambda: None)
    elif library() is None:
        pytest.skip("no native kernels here")
    return request.param
