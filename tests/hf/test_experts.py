"""Inner rows of experts in torch: their bits do not depend on the rows beside them."""

import pytest
import torch
from torch.nn.functional import gelu, sigmoid, silu

from paceline.hf.experts import gated_by_row

RULES = {
    "silu": lambda gate, up: silu(torch.cat([gate, up], -1).chunk(2, -1)[0]) * up,
    "gelu": lambda gate, up: gelu(torch.cat([gate, up], -1).chunk(2, -1)[0]) * up,
    "clamped": lambda gate, up: (up + 1) * gate * sigmoid(gate * 1.702),
    "no gate": lambda _, up: gelu(up),
}


def depends(gated, inner, dtype) -> bool:
    """Whether the bits of a row depend on the rows before and behind it."""
    gate, up = 3 * torch.randn(2, 150, inner, generator=torch.Generator().manual_seed(0)).to(dtype)
    alone = torch.cat([gated(gate[i : i + 1], up[i : i + 1]) for i in range(len(up))])
    cuts = (slice(first, last) for first in (0, 1, 2) for last in (3, 5, 8, 31, 150))
    return not all(torch.equal(gated(gate[cut], up[cut]), alone[cut]) for cut in cuts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inner", [8, 40, 41, 700])
@pytest.mark.parametrize("rule", RULES)
def test_inner_rows(rule, inner, dtype):
    assert not depends(lambda gate, up: gated_by_row(RULES[rule], gate, up), inner, dtype)


def test_what_torch_does_with_all_rows_at_once_is_seen():
    assert any(depends(gated, 41, torch.float32) for gated in RULES.values())
