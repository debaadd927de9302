"""What the tests of the kernels share."""

import pytest

from paceline.kernels import load
from paceline.kernels.compiler import BROKEN
from paceline.kernels.library import library

assert BROKEN not in load().reason, load().reason  # else every test would be skipped


@pytest.fixture(params=load().isas)
def isa(request):
    """Each instruction set that this processor has."""
    assert library().paceline_select(request.param.encode())
    yield request.param
    library().paceline_select(load().isa.encode())
