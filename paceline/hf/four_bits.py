"""Linear layers that GPTQ, AutoAWQ or compressed-tensors rounded to 4 bits, read into blocks without their packages.

    tensors of a layer, beside its bias                                    a word of 32 bits holds codes of
gptq    qweight [in / 8, out], qzeros [groups, out / 8], scales [groups, out]     eight inputs; zeros of eight outputs
awq     qweight [in, out / 8], qzeros and scales as gptq                          outputs 0, 2, 4, 6, 1, 3, 5, 7
packed  weight_packed [out, in / 8], weight_scale [out, groups], and where        eight inputs; zeros of eight outputs
        weights are not symmetric weight_zero_point [out / 8, groups]

A weight is (code - zero) * scale. With all zeros at 8 these are blocks of Q4_0; else of Q4_1, whose minimum,
-zero * scale, is rounded to float16. GPTQ's first format (`checkpoint_format` "gptq") stores zeros less one.
Sources: AutoAWQ's packing_utils, gptqmodel's and compressed-tensors' compressors.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..errors import ConfigError
from ..kernels.library import BlockFormat
from ..kernels.packing import Blocks
from .checkpoint import Stored

_Parts: TypeAlias = Mapping[str, Tensor]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class UnlikeBlocks(ConfigError):
    """Sound layers that blocks cannot hold; the packages of their tool may read them."""


@dataclass(frozen=True)
class FourBits:
    """How a checkpoint holds its rounded layers.

    suffixes: of the tensors of a layer, the codes first and the scales last; the optional ones may be missing.
    codes: [out, in] and zeros [out, groups], None for 8, from a layer's tensors.
    sizes: (out, in) by the shape of the codes' tensor.
    """

    suffixes: tuple[str, ...]
    optional: tuple[str, ...]
    codes: Callable[[_Parts], tuple[Tensor, Tensor | None]]
    sizes: Callable[[tuple[int, ...]], tuple[int, int]]

    def fits(self, stored: Mapping[str, Stored]) -> bool:
        """Whether blocks can hold the layers, as far as shapes tell."""
        for path in self._paths(stored):
            codes, scales = (stored.get(f"{path}.{self.suffixes[place]}") for place in (0, -1))
            if codes is None or scales is None:  # damaged, which reading says
                continue
            by_output = scales.shape if self is _PACKED else scales.shape[::-1]
            if len(codes.shape) != 2 or not _in_groups(self.sizes(codes.shape), by_output):
                return False
        return True

    def outline(self, stored: Mapping[str, Stored]) -> dict[str, Stored]:
        """The tensors as if no layer were rounded."""
        rounded = {path: stored[f"{path}.{self.suffixes[0]}"] for path in self._paths(stored)}
        kept = {name: tensor for name, tensor in stored.items() if not self._is_part(name, rounded)}
        return kept | {f"{path}.weight": Stored("F16", self.sizes(tensor.shape)) for path, tensor in rounded.items()}

    def weights(
        self,
        stored: Mapping[str, Stored],
        read: Callable[[Iterable[str]], Iterator[tuple[str, Tensor]]],
        known: Container[str],
    ) -> Iterator[tuple[str, Tensor | Blocks]]:
        """All weights, one after another. Raises `ValueError` for a bias that the model does not know and is not 0.

        read: gives tensors of the files. known: the weights of the model.
        """
        rounded = dict.fromkeys(self._paths(stored))  # in the order of the files, as passes read them
        for name, tensor in read(name for name in stored if not self._is_part(name, rounded)):
            if name in known:
                yield name, tensor
            elif bool(tensor.any()):
                raise ValueError(f"{name} is a bias, which this model does not have")
        for path in rounded:
            names = [name for end in (*self.suffixes, *self.optional) if (name := f"{path}.{end}") in stored]
            yield f"{path}.weight", self.blocks({name.rpartition(".")[2]: tensor for name, tensor in read(names)})

    def blocks(self, parts: _Parts) -> Blocks:
        """One layer. Raises `UnlikeBlocks`, and `ValueError` for damaged tensors."""
        codes, zeros = self.codes(parts)
        exact = parts[self.suffixes[-1]]
        exact = exact if self is _PACKED else exact.t()
        outs, ins = codes.shape
        if not _in_groups((outs, ins), exact.shape) or (zeros is not None and zeros.shape != exact.shape):
            raise ValueError(f"codes {outs} x {ins} with scales {tuple(exact.shape)}: groups are not multiples of 32")
        order = next((tensor for end, tensor in parts.items() if end.endswith("g_idx")), None)
        if order is not None and not torch.equal(order.long(), torch.arange(ins) // (ins // exact.shape[1])):
            raise UnlikeBlocks("groups that are not of adjacent inputs (desc_act, actorder)")
        scales = exact.half()
        if not bool(exact.isfinite().all()):
            raise ValueError("scales are not finite")
        if not torch.equal(scales.double(), exact.double()):
            raise UnlikeBlocks(f"scales in {str(exact.dtype).removeprefix('torch.')} that float16 does not hold")
        if zeros is None or bool((zeros == 8).all()):
            return Blocks.of_codes(BlockFormat.Q4_0, codes, scales.t()[..., None])
        lowest = -(zeros.float() * scales.float()).half()
        blocks = Blocks.of_codes(BlockFormat.Q4_1, codes, torch.stack([scales, lowest], -1).transpose(0, 1))
        if not blocks.is_finite:
            raise UnlikeBlocks("zero points times scales that float16 does not hold")
        return blocks

    def _paths(self, stored: Mapping[str, Stored]) -> list[str]:
        return [name.rpartition(".")[0] for name in stored if name.endswith("." + self.suffixes[0])]

    def _is_part(self, name: str, paths: Iterable[str]) -> bool:
        path, _, end = name.rpartition(".")
        return end in (*self.suffixes, *self.optional) and path in paths


def four_bits(about: Mapping[str, Any]) -> FourBits | None:
    """How the layers lie by `quantization_config` of config.json; None where these are not 4 bits, or lie otherwise."""
    method = about.get("quant_method")
    if about.get("desc_act") or about.get("transform_config"):  # inputs in another order, or rotated
        return None
    if method == "gptq" and about.get("bits") == 4 and about.get("checkpoint_format", "gptq") in ("gptq", "gptq_v2"):
        return _gptq(0 if about.get("checkpoint_format") == "gptq_v2" else 1)
    if method == "awq" and about.get("bits") == 4 and str(about.get("version", "gemm")).lower() == "gemm":
        return _AWQ
    if method == "compressed-tensors" and about.get("format") == "pack-quantized":
        groups = [group.get("weights") or {} for group in about.get("config_groups", {}).values()]
        plain = all(group.get("num_bits") == 4 and group.get("type") == "int" for group in groups)
        plain = plain and all(group.get("actorder") in (None, "weight", "static") for group in groups)
        alone = all(not group.get("input_activations") for group in about.get("config_groups", {}).values())
        return _PACKED if groups and plain and alone and not about.get("kv_cache_scheme") else None
    return None


def _in_groups(sizes: tuple[int, int], scales: tuple[int, ...]) -> bool:
    """Whether scales [out, groups] are of groups that blocks hold. sizes: (out, in)."""
    if len(scales) != 2 or scales[0] != sizes[0] or not scales[1]:
        return False
    group, rest = divmod(sizes[1], scales[1])
    return group > 0 and rest == group % 32 == 0


def _nibbles(words: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 [R, W] -> uint8 [R, 8 W]; bits 4 i hold number order[i] of eight."""
    eights = torch.empty(*words.shape, 8, dtype=torch.uint8)
    for bits, place in enumerate(order):
        eights[..., place] = (words >> 4 * bits & 15).to(torch.uint8)
    return eights.flatten(1)


def _gptq(less: int) -> FourBits:
    def codes(parts: _Parts) -> tuple[Tensor, Tensor]:
        return _nibbles(parts["qweight"].t()), (_nibbles(parts["qzeros"]) + less).t()

    return FourBits(("qweight", "qzeros", "scales"), ("g_idx",), codes, lambda shape: (shape[1], 8 * shape[0]))


def _awq_codes(parts: _Parts) -> tuple[Tensor, Tensor]:
    return _nibbles(parts["qweight"], _AWQ_ORDER).t(), _nibbles(parts["qzeros"], _AWQ_ORDER).t()


def _packed_codes(parts: _Parts) -> tuple[Tensor, Tensor | None]:
    zeros, outs = parts.get("weight_zero_point"), len(parts["weight_packed"])
    return _nibbles(parts["weight_packed"]), None if zeros is None else _nibbles(zeros.t()).t()[:outs]


_AWQ = FourBits(("qweight", "qzeros", "scales"), (), _awq_codes, lambda shape: (8 * shape[1], shape[0]))
_PACKED = FourBits(
    ("weight_packed", "weight_scale"),
    ("weight_zero_point", "weight_g_idx", "weight_shape"),
    _packed_codes,
    lambda shape: (shape[0], 8 * shape[1]),
)
