"""The MTP module inside a target's checkpoint as a head (see `hf.mtp`).

A module with a layer of Llama's or Qwen's form runs like a trained head. Any other layer, with experts or latent
attention, is transformers' own, which runs in torch on the head's cache.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from ...errors import IncompatibleModels
from ...hf.mtp import LAYOUTS, MtpFiles, MtpModule, in_folder, read_mtp
from ...target.loaded import LoadedModel
from ..heads.layers import Attend
from ..heads.parts import filled
from ..heads.published import is_copy
from .head import EagleConfig, EagleHead

_ATTENTION = "paceline_head"  # as transformers' layers look it up
_PLAIN, _GATED = ("llama", "mistral", "qwen2", "qwen3"), "qwen3_5_text"


def mtp_files(target: LoadedModel) -> MtpFiles | None:
    """The MTP modules in the files of a target; None where there are none, or no files."""
    return in_folder(Path(target.files)) if target.files else None


def mtp_head(target: LoadedModel) -> EagleHead:
    """The head in the checkpoint of a target. Raises as `read_mtp`, and `IncompatibleModels` for one without."""
    files = mtp_files(target)
    if files is None:
        raise _missing(target)
    first, *later = (head_of(one, target) for one in read_mtp(target.name, target.model.config, files, target.dtype))
    first.later.extend(later)
    return first


def _missing(target: LoadedModel) -> IncompatibleModels:
    first = target.num_layers
    sought = (f"{layout.names(0, first)['fc']} ({layout.family})" for layout in LAYOUTS)
    got = f"no such weights in {target.files!r}" if target.files else "a model without a folder of safetensors"
    if target.name.endswith(".gguf"):
        got = "a GGUF file, whose MTP layers are not read"
    return IncompatibleModels(
        f"{target.name} comes without a known MTP module", got=got, expected="one of " + ", ".join(sought),
        fix="use another drafter, or a trained head: head:PATH_OR_NAME",
    )  # fmt: skip


def head_of(module: MtpModule, target: LoadedModel) -> EagleHead:
    """A module that was read as a head for its target."""
    text = target.model.config.get_text_config()
    tensors = {"fc.weight": module.fc, "enorm.weight": module.enorm, "hnorm.weight": module.hnorm}
    norm: Any = target.model.base_model.norm
    tensors["norm.weight"] = norm.weight.detach() if module.norm is None else module.norm
    tables = {"embed_tokens": (module.embed_tokens, target.embeddings), "lm_head": (module.lm_head, _rows(target))}
    own = {
        name: table for name, (table, targets) in tables.items() if table is not None and not is_copy(table, targets)
    }
    tensors |= {f"{name}.weight": table for name, table in own.items()}
    sizes = {
        "hidden_size": target.hidden_size, "states": (target.num_layers,), "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size, "intermediate_size": 1, "version": "mtp",
        "target_hidden_size": target.hidden_size, "rms_norm_eps": text.rms_norm_eps, "norm_output": True,
        "own_embeddings": "embed_tokens" in own, "own_lm_head": "lm_head" in own,
    }  # fmt: skip
    tensors["draft_ids"] = torch.arange(target.vocab_size)
    described, layer = _described(text, module), module.layer
    make: Any = EagleHead
    if described is None:
        layer = TransformersLayer(module.layer)
        heads, d = layer.key_sizes(Rotation(module.rotary), torch.zeros(1, 1, target.hidden_size, dtype=target.dtype))
        described = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": d}
        make = partial(ModuleHead, layer=layer, rotary=module.rotary)
    tensors |= {f"layers.0.{name}": tensor for name, tensor in layer.state_dict().items()}
    if module.adds_one and make is EagleHead:
        tensors |= {
            name: tensor + 1 for name, tensor in tensors.items() if name.startswith("layers") and "norm" in name
        }
    return filled(make, EagleConfig(**{**sizes, **described}), tensors, Path(target.files))


def _rows(target: LoadedModel) -> Tensor | None:
    rows = getattr(target.model.get_output_embeddings(), "weight", None)
    return rows if isinstance(rows, Tensor) else None


def _described(text: Any, module: MtpModule) -> Mapping[str, Any] | None:
    """What `EagleConfig` says of a layer of Llama's, Qwen2's, Qwen3's or Qwen3.5's form; None for any other."""
    is_gated, rope = text.model_type == _GATED, getattr(text, "rope_parameters", None) or {}
    plain = is_gated or (text.model_type in _PLAIN and not getattr(text, "use_sliding_window", False))
    names = dict(module.layer.named_parameters())
    others = "self_attn.o_proj.bias" in names or any(name.startswith("mlp.") and "bias" in name for name in names)
    if not plain or others or rope.get("rope_type") != "default" or text.hidden_act != "silu":
        return None
    return {
        "num_attention_heads": text.num_attention_heads, "num_key_value_heads": text.num_key_value_heads,
        "head_dim": int(module.layer.self_attn.head_dim), "intermediate_size": text.intermediate_size,
        "rope_theta": rope["rope_theta"], "attention_bias": "self_attn.q_proj.bias" in names,
        "qk_norm": "self_attn.q_norm.weight" in names, "output_gate": is_gated,
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0) if is_gated else 1.0,
    }  # fmt: skip


class Rotation:
    """The rotary embedding of transformers that belongs to a layer; it stays in float32."""

    def __init__(self, rotary: nn.Module):
        self._rotary = rotary

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[B, N] -> cosines and sines as the layer takes them."""
        like = torch.empty(0, device=positions.device)
        return self._rotary.to(positions.device)(like, positions)


class TransformersLayer(nn.Module):
    """A decoder layer of transformers whose attention is the caller's `attend`."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        from transformers import AttentionInterface, PreTrainedConfig  # with all that models are made of

        AttentionInterface.register(_ATTENTION, _attention)
        self.layer = layer
        for part in layer.modules():
            if isinstance(config := getattr(part, "config", None), PreTrainedConfig):
                config._attn_implementation = _ATTENTION

    def forward(self, embeddings: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """As `EagleLayer` of an MTP head."""
        rotation = cos.to(hidden.dtype), sin.to(hidden.dtype)
        out = self.layer(hidden, attention_mask=None, position_embeddings=rotation, paceline_attend=attend)
        return out[0] if isinstance(out, tuple) else out

    @torch.inference_mode()
    def key_sizes(self, rotation: Rotation, rows: Tensor) -> tuple[int, int]:
        """How many heads of keys there are, and their size. rows: any input [1, 1, E]."""
        shapes = list[torch.Size]()

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            shapes.append(key.shape)
            return query

        self(rows, rows, *rotation(torch.zeros(1, 1, dtype=torch.long)), attend)
        if not shapes:
            expected = "one that calls the attention function of its config"
            raise IncompatibleModels("the MTP module has a layer with an attention of its own", expected=expected)
        return shapes[0][1], shapes[0][3]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    paceline_attend: Attend | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention of a `TransformersLayer`. Queries [B, Hq, N, d], keys and values [B, H, N, d] -> [B, N, Hq, dv].

    Raises `IncompatibleModels` for an attention that heads do not have.
    """
    if paceline_attend is None or any(one is not None for one in (sliding_window, softcap, s_aux)):
        got = "a window, a soft cap or sinks"
        raise IncompatibleModels("the MTP module has an attention that heads lack", got=got, expected="full attention")
    d, dv = query.shape[-1], value.shape[-1]
    scaled = query if scaling is None else query * (scaling * d**0.5)
    out = paceline_attend(scaled, key, nn.functional.pad(value, (0, d - dv)))  # the cache has one size for both
    return out[..., :dv].transpose(1, 2).contiguous(), None


@final
class ModuleHead(EagleHead):
    """An MTP head whose layer is of transformers."""

    runs_in_torch = True

    def __init__(self, config: EagleConfig, layer: TransformersLayer, rotary: nn.Module):
        super().__init__(config)
        self.layers = nn.ModuleList([layer])
        self.rotation: Any = Rotation(rotary)
