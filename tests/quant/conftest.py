"""The kernels that quantised layers are tested with."""

import pytest

from paceline import kernels
from paceline.kernels.library import library


@pytest.fixture(params=["native", "torch"])
def kernel(request, monkeypatch) -> str:
    """Layers that are quantised in this test lie as these kernels read them."""
    if request.param == "torch":
        monkeypatch.setattr(kernels, "kernels_for", lambda device: None)
    elif library() is None:
        pytest.skip("no native kernels here")
    return request.param
