"""Checkpoints that name experts differently, or hold those of a layer in one tensor, read as if each lay by itself.

    family      gate, up [inner, hidden] and down [hidden, inner] of an expert e
Mixtral     block_sparse_moe.experts.e.w1, w3, w2
Granite     input_linear [experts, 2 inner, hidden], gates first; output_linear [experts, hidden, inner]
gpt-oss     gate_up_proj [experts, hidden, 2 inner], gates at even places; down_proj [experts, inner, hidden]
... MXFP4   gate_up_proj_blocks [experts, 2 inner, hidden / 32, 16] and _scales, without 16; down_proj alike

A byte of MXFP4 holds two neighbours, the low bits first; in blocks of llama.cpp's format it holds numbers i and i + 16.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..errors import ConfigError
from ..kernels.library import BlockFormat
from ..kernels.packing import Blocks
from .checkpoint import Stored
from .described_experts import BLOCKS
from .experts import num_experts_of

_MIXTRAL = {
    r"\.block_sparse_moe\.": ".mlp.", r"(\.experts\.\d+)\.w1\.": r"\1.gate_proj.",
    r"(\.experts\.\d+)\.w3\.": r"\1.up_proj.", r"(\.experts\.\d+)\.w2\.": r"\1.down_proj.",
}  # fmt: skip
_NAMES: dict[str, dict[str, str]] = {
    **dict.fromkeys(("mixtral", "minimax_m2"), _MIXTRAL),
    "granitemoe": {r"\.router\.layer\.": ".router."},
    "ernie4_5_moe": {r"\.mlp\.moe_statics\.": ".mlp.gate.moe_statics."},
    "exaone_moe": {r"\.mlp\.e_score_": ".mlp.gate.e_score_"},
    "hy_v3": {
        r"\.mlp\.router\.gate\.": ".mlp.gate.", r"\.mlp\.expert_bias": ".mlp.e_score_correction_bias",
        r"\.mlp\.shared_mlp\.": ".mlp.shared_experts.",
    },
}  # fmt: skip
"""By the type of the model: what is replaced in names, by what transformers calls it."""
_NAN = 255  # among scales, which are exponents
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")
_STACKS = ("granitemoe", "gpt_oss")
_STACKED = re.compile(
    r"(?P<path>.*\.(?:block_sparse_moe|mlp))(?:\.experts)?"
    r"\.(?P<name>input_linear|output_linear|gate_up_proj|down_proj)(?P<end>\.weight|_bias|_blocks|_scales|)"
)


@dataclass(frozen=True)
class Part(Stored):
    """What an expert has of stacked tensors. of: these. cut: makes it of what the expert has of each."""

    of: tuple[Stored, ...] = ()
    expert: int = 0
    cut: Callable[..., Any] = torch.clone

    def read(self) -> Any:
        held = list[Tensor]()
        for tensor in self.of:
            with safe_open(tensor.path, framework="pt") as file:
                held.append(file.get_slice(tensor.name)[self.expert])
        return self.cut(*held)


def by_expert(model_type: str, stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors of a checkpoint as if each expert had its own, by transformers' names.

    Raises `ConfigError` for blocks without scales.
    """
    renamed = dict[str, Stored]()
    for name, tensor in stored.items():
        for pattern, by in _NAMES.get(model_type, {}).items():
            name = re.sub(pattern, by, name)
        renamed[name] = tensor
    if model_type not in _STACKS:
        return renamed
    apart = dict[str, Stored]()
    for name, tensor in renamed.items():
        found = _STACKED.fullmatch(name)
        if found is None:
            apart[name] = tensor
        elif found["end"] == "_blocks":
            scales = renamed.get(name.replace("_blocks", "_scales"), tensor)
            if scales.shape != tensor.shape[:-1]:
                raise ConfigError(f"{name} has no scales of its shape", fix="fetch the model again")
            apart.update(_parts(found["path"], found["name"], found["end"], (tensor, scales)))
        elif found["end"] != "_scales":
            apart.update(_parts(found["path"], found["name"], found["end"], (tensor,)))
    return apart


def check_experts(name: str, config: Any, stored: Mapping[str, Stored]) -> None:
    """Raise `ConfigError` where layers do not have the experts that config.json tells.

    Files of other families may number experts of several kinds, or of several models.
    """
    count, held = num_experts_of(config) if config.model_type in BLOCKS else 0, dict[tuple[str, str], set[int]]()
    for key in stored:
        if (found := _EXPERT.fullmatch(key)) is not None:
            held.setdefault((found[1], found[3]), set()).add(int(found[2]))
    for (path, leaf), have in held.items() if isinstance(count, int) and count else ():
        if wrong := sorted(have.symmetric_difference(range(count))):
            fault = "without" if wrong[0] < count else "with"
            raise ConfigError(
                f"{name!r} does not hold the experts that its config.json tells",
                got=f"{len(have)} {path}, {fault} {path}.{wrong[0]}.{leaf}", expected=f"{count} in each layer",
                fix="fetch the model again",
            )  # fmt: skip


def holds_blocks(stored: Mapping[str, Stored]) -> bool:
    """Whether some experts are in blocks."""
    return any(isinstance(tensor, Part) and len(tensor.of) > 1 for tensor in stored.values())


def _parts(path: str, name: str, end: str, of: tuple[Stored, ...]) -> Iterator[tuple[str, Part]]:
    count, *shape = of[0].shape
    turns = name in ("gate_up_proj", "down_proj") and not end  # [in, out]
    outs = shape[1] if turns else shape[0]
    ins = [] if end == "_bias" else [32 * shape[1]] if end == "_blocks" else [shape[0] if turns else shape[1]]
    rows = {"down_proj": slice(outs)}
    if name == "gate_up_proj":
        rows = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
    elif name == "input_linear":
        rows = {"gate_proj": slice(outs // 2), "up_proj": slice(outs // 2, outs)}
    for own, some in rows.items():

        def cut(held: Tensor, scales: Tensor | None = None, some: slice = some) -> Any:
            held = (held.T if turns else held)[some].contiguous()
            return held if scales is None else _blocks(held, scales[some])

        leaf, size = "bias" if end == "_bias" else "weight", len(range(outs)[some])
        for expert in range(count):
            kind = of[0].dtype if len(of) == 1 else "BF16"
            yield f"{path}.experts.{expert}.{own}.{leaf}", Part(kind, (size, *ins), of=of, expert=expert, cut=cut)


def _blocks(codes: Tensor, scales: Tensor) -> Blocks:
    """Blocks from codes [out, in / 32, 16] and scales [out, in / 32]. Raises `ValueError` for scales of NaN."""
    numbers = torch.stack((codes & 15, codes >> 4), -1).flatten(2)
    packed = torch.cat((scales[..., None], numbers[..., :16] | numbers[..., 16:] << 4), -1).flatten(1)
    if bool((scales == _NAN).any()):
        raise ValueError("scales are not finite")
    return Blocks.of(BlockFormat.MXFP4, (len(codes), 32 * codes.shape[1]), lambda some: packed[some])
