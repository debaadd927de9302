"""Rounded rows of a cache as torch makes and reads them."""

from typing import TypeAlias

import torch
from torch import Tensor

from paceline.kernels.library import NumberFormat

KvFormat: TypeAlias = NumberFormat
"""INT8 or FP8."""
ROUNDED = [NumberFormat.INT8, NumberFormat.FP8]


def row_width(form: KvFormat, width: int) -> int:
    """The bytes of a row."""
    return width + 2 * -(-width // 32) if form is NumberFormat.INT8 else width


def written(x: Tensor, form: KvFormat) -> Tensor:
    """Rows of float32 numbers as bytes [..., row_width]: a bfloat16 scale before each 32 codes, or e4m3."""
    if form is NumberFormat.FP8:
        code = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        return torch.where(x.isfinite(), code, (x.view(torch.int32) >> 24 & 0x80 | 0x7F).to(torch.uint8))
    parts = []
    for part in x.split(32, -1):
        top = part.abs().amax(-1, keepdim=True) / 127
        up = torch.where(top.isnan(), 0x7FC0, top.view(torch.int32) + 0xFFFF >> 16).to(torch.int16)
        scale = up.view(torch.bfloat16).float()
        codes = torch.where((scale > 0) & scale.isfinite(), part / scale, 0.0).round().to(torch.int8)
        parts += [up.view(torch.uint8), codes.view(torch.uint8)]
    return torch.cat(parts, -1)


def read_rows(rows: Tensor, form: KvFormat, width: int) -> Tensor:
    """The float32 numbers [..., width] of bytes."""
    if form is NumberFormat.FP8:
        return rows.view(torch.float8_e4m3fn).float()
    numbers = []
    for first in range(0, rows.shape[-1], 34):
        part = rows[..., first : first + 34]
        scale = part[..., :2].contiguous().view(torch.bfloat16).float()
        numbers.append(part[..., 2:].contiguous().view(torch.int8) * scale)
    assert sum(part.shape[-1] for part in numbers) == width
    return torch.cat(numbers, -1)


def is_rounded(held: Tensor, exact: Tensor, form: KvFormat) -> bool:
    """Whether numbers are the nearest ones that the format has, but for the last bits of what was rounded."""
    if form is NumberFormat.FP8:
        step = exact.abs().clamp(min=2.0**-6) / 8
    else:
        tops = [part.abs().amax(-1, keepdim=True).expand_as(part) for part in exact.split(32, -1)]
        step = torch.cat(tops, -1) / 127 * 1.01
    return bool(((held - exact).abs() <= step / 2 + 1e-5).all())
