"""FP8 numbers by operations on integers against torch's."""

import torch
import triton
import triton.language as tl

from paceline.kernels.gpu.e4m3 import rounded, widened


@triton.jit
def _there_and_back(x, codes, back, count, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    code = rounded(tl.load(x + at, mask=at < count, other=0.0))
    tl.store(codes + at, code, mask=at < count)
    tl.store(back + at, widened(code, back.dtype.element_ty), mask=at < count)


def test_all_numbers_and_what_lies_between_them():
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = values[values.isfinite()].sort().values
    middles = (values[1:] + values[:-1]) / 2
    near = middles * (1 + 2e-7), middles * (1 - 2e-7)
    x = torch.cat([values, middles, *near, torch.randn(500) * 1e-2]).clamp(-448, 448)
    codes, back = torch.zeros(len(x), dtype=torch.uint8), torch.zeros(len(x))
    _there_and_back[(1,)](x, codes, back, len(x), 2048)
    assert torch.equal(back, x.to(torch.float8_e4m3fn).float())
    assert torch.equal(codes.view(torch.float8_e4m3fn).float(), back)
    _there_and_back[(1,)](torch.tensor([1e6, -torch.inf]), codes, back, 2, 2)
    assert back[:2].tolist() == [448.0, -448.0], "beyond the largest"
