"""Which block format each matrix of a model takes, as llama.cpp's `llama-quantize` chooses it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ..kernels.library import BlockFormat

BlockMix: TypeAlias = Literal[
    "q8_0", "q6_k", "q5_k_m", "q5_k", "q5_1", "q5_0", "q4_k_m", "q4_k", "q4_1", "q4_0", "iq4_xs", "iq4_nl", "mxfp4",
    "q3_k_m", "q3_k", "q2_k",
]  # fmt: skip
"""A format, or a mix (_m), whose more sensitive matrices take a larger format."""
_Rule: TypeAlias = Callable[[int, int], BlockFormat | None]
"""The format of a matrix in a layer, of so many layers; None: that of most."""


@dataclass(frozen=True)
class _Mix:
    most: BlockFormat
    parts: Mapping[str, _Rule] = field(default_factory=dict[str, _Rule])


def _spread(layer: int, layers: int) -> BlockFormat | None:
    """Q6_K for the first and last eighth, and for every third layer between."""
    first = layers // 8
    return BlockFormat.Q6_K if layer < first or layer >= 7 * layers // 8 or (layer - first) % 3 == 2 else None


_MIXES: Mapping[str, _Mix] = {
    **{form.name.lower(): _Mix(form) for form in BlockFormat if form.is_in_files},
    "q5_k_m": _Mix(BlockFormat.Q5_K, {"v": _spread, "down": _spread, "qkv": lambda *_: BlockFormat.Q6_K}),
    "q4_k_m": _Mix(BlockFormat.Q4_K, {"v": _spread, "down": _spread, "qkv": lambda *_: BlockFormat.Q5_K}),
    "q3_k_m": _Mix(
        BlockFormat.Q3_K,
        {
            "v": lambda layer, _: BlockFormat.Q5_K if layer < 2 else BlockFormat.Q4_K,
            "down": lambda layer, layers: BlockFormat.Q5_K if layer < layers // 16 else BlockFormat.Q4_K,
            "o": lambda *_: BlockFormat.Q4_K,
            "qkv": lambda *_: BlockFormat.Q4_K,
        },
    ),
}
_PART = re.compile(r"\.(\d+)\.(?:.*\.)?(v|o|qkv|down)_proj$")
_FALLBACKS = {
    BlockFormat.Q2_K: BlockFormat.IQ4_NL,
    BlockFormat.Q3_K: BlockFormat.IQ4_NL,
    BlockFormat.IQ4_XS: BlockFormat.IQ4_NL,
    BlockFormat.Q4_K: BlockFormat.Q5_0,
    BlockFormat.Q5_K: BlockFormat.Q5_1,
    BlockFormat.Q6_K: BlockFormat.Q8_0,
}
"""Of matrices whose inputs are no multiple of 256."""


def is_block_weights(weights: str) -> bool:
    """Whether this names a block format or a mix of them."""
    return weights in _MIXES


def layer_format(weights: str, path: str, layers: int, inputs: int, is_mixture: bool = False) -> BlockFormat | None:
    """The format of a linear layer, or of embeddings that the output layer does not share.

    path: its name in transformers. layers: how many the model has. inputs: of the matrix, which decide what fits; None
    is returned where nothing does. is_mixture: whether the model has experts, which alone take MXFP4.
    """
    mix, match = _MIXES[weights], _PART.search(path)
    if mix.most is BlockFormat.MXFP4 and is_mixture and ".experts." not in path:
        return _fitting(BlockFormat.Q8_0, inputs)
    rule = mix.parts.get(match[2]) if match else None
    wanted = rule and match and rule(int(match[1]), layers)
    return _fitting(wanted or mix.most, inputs)


def head_format(weights: str, inputs: int) -> BlockFormat | None:
    """The format of the output layer, and of embeddings that it shares."""
    most = _MIXES[weights].most
    return _fitting(most if most is BlockFormat.Q8_0 else BlockFormat.Q6_K, inputs)


def _fitting(form: BlockFormat, inputs: int) -> BlockFormat | None:
    form = form if inputs % form.inputs == 0 else _FALLBACKS.get(form, form)
    return form if inputs % form.inputs == 0 else None
