"""The quickened interpreter against Triton's own."""

import pytest
import torch

from paceline.kernels.gpu import products
from tests.kernels.gpu.test_formats import made


@pytest.mark.parametrize("form", ["INT4", "Q6_K"])
def test_it_computes_the_same(form, monkeypatch):
    matrix, _ = made(form)
    x = torch.randn(3, matrix.ins).bfloat16()
    quick = products.multiply(x, [matrix])
    monkeypatch.undo()
    assert torch.equal(products.multiply(x, [matrix]), quick)
