"""Codes of a few bits as a file holds them: one plane of bits after another, eight codes a byte.

codes 0..7 of a row    5 1 7 0 2 6 3 4        plane 0: 1 1 1 0 0 0 1 0    plane 1: 0 0 1 0 1 1 1 0    plane 2: ...
"""

import torch
from torch import Tensor


def to_planes(codes: Tensor, bits: int) -> Tensor:
    """Codes [out, in] in 0..2^bits - 1 -> uint8 [bits, out, in / 8]; inputs are divisible by 8."""
    places = torch.arange(8, device=codes.device)
    planes = [((codes >> bit & 1).view(len(codes), -1, 8) << places).sum(-1) for bit in range(bits)]
    return torch.stack(planes).to(torch.uint8)


def from_planes(planes: Tensor) -> Tensor:
    """The codes, int32 [out, in]."""
    places = torch.arange(8, device=planes.device, dtype=torch.uint8)
    codes = torch.zeros(planes.shape[1], planes.shape[2] * 8, dtype=torch.int32, device=planes.device)
    for bit, plane in enumerate(planes):
        codes |= ((plane[..., None] >> places & 1).flatten(1)).int() << bit
    return codes
