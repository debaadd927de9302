"""The trained weights of a self-draft: codes of a few bits and their grids, for the linears of each decoder layer.

Everything else of the draft (embeddings, norms, output head, KV cache) is the target's.
"""

from typing import ClassVar, Literal, final

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ...schema import checked
from ..heads.parts import Count, Linears, Shapes


@checked
class Int4DraftConfig:
    """Shape of a trained self-draft.

    linears: which linear layers of a decoder layer, as transformers names them; shapes: (outputs, inputs) of each.
    """

    bits: Literal[2, 3, 4]
    group_size: Literal[32, 64, 128, 256]
    num_layers: Count
    linears: Linears
    shapes: Shapes
    method: ClassVar[str] = "self_int4"

    def __post_init__(self) -> None:
        wrong = [shape for shape in self.shapes if shape[1] % self.group_size]
        if len(self.linears) != len(self.shapes) or not self.linears or wrong:
            raise ConfigError(
                "the linear layers of this self-draft are not given clearly", got=wrong or len(self.shapes),
                expected=f"a shape (outputs, inputs) for each of {len(self.linears)} linears, inputs in whole groups",
            )  # fmt: skip


@final
class Int4Draft(nn.Module):
    """Planes of codes and bits of params for each layer and linear; see `to_planes` and `quant.int4`.

    Params are bfloat16 numbers kept as int16, so that no change of dtype rounds them.
    """

    Config = Int4DraftConfig

    def __init__(self, config: Int4DraftConfig):
        super().__init__()
        self.config = config
        for layer in range(config.num_layers):
            for name, (outputs, inputs) in zip(config.linears, config.shapes, strict=True):
                planes = torch.zeros(config.bits, outputs, inputs // 8, dtype=torch.uint8)
                params = torch.zeros(inputs // config.group_size, outputs, 2, dtype=torch.int16)
                self.register_buffer(_key(layer, name, "planes"), planes)
                self.register_buffer(_key(layer, name, "params"), params)

    def put(self, layer: int, linear: str, codes: Tensor, params: Tensor) -> None:
        """Take codes int32 [out, in] in 0..15 and params bfloat16 [in / group_size, out, 2] of `quant.int4`."""
        first = 8 - (1 << self.config.bits - 1)
        self._held(layer, linear, "planes").copy_(to_planes(codes - first, self.config.bits))
        self._held(layer, linear, "params").copy_(params.view(torch.int16))

    def packable(self, layer: int, linear: str) -> tuple[Tensor, Tensor]:
        first = 8 - (1 << self.config.bits - 1)
        codes = from_planes(self._held(layer, linear, "planes")) + first
        return codes, self._held(layer, linear, "params").view(torch.bfloat16)

    def _held(self, layer: int, linear: str, part: str) -> Tensor:
        return self.get_buffer(_key(layer, linear, part))


def _key(layer: int, linear: str, part: str) -> str:
    return f"layer{layer}_{linear.replace('.', '_')}_{part}"


def to_planes(codes: Tensor, bits: int) -> Tensor:
    """Codes [out, in] in 0..2^bits - 1 -> uint8 [bits, out, in / 8]; inputs are divisible by 8.

    One plane of bits follows another, eight codes a byte:

    codes 0..7 of a row    5 1 7 0 2 6 3 4      plane 0: 1 1 1 0 0 0 1 0    plane 1: 0 0 1 0 1 1 1 0    plane 2: ...
    """
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
