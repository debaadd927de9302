"""EAGLE-3 and DFlash heads as llama.cpp's draft models (`draft-eagle3`, `draft-dflash`), read and written.

metadata      ARCH.*: the layers, and what is below; tokenizer.ggml.*: the target's, with the mask token of DFlash
target_layers the states that are read: the input of layer s is state s
tensors       blk.i.*, fc, output_norm; of q and k of EAGLE-3 the rows of a head lie in rotary pairs
              enc.output_norm: of EAGLE-3 `input_norm` (norm_before_fc), of DFlash `hidden_norm`
              output: the rows of the draft vocabulary; token_embd; both absent where they are the target's, whole
              d2t: the target's id of each draft token; absent where the draft vocabulary is whole
              rope_freqs: factors of the frequencies, of EAGLE-3 alone
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from pydantic import Field
from torch import Tensor

from ...errors import ConfigError
from ...hf.gguf.config import LLAMA3, shortest_decimal
from ...hf.gguf.file import GGUFFile, read_gguf
from ...hf.gguf.weights import rotary_order
from ...hf.gguf.writer import add_entries
from ...schema import checked
from ..dflash.head import DFlashConfig, DFlashHead
from ..eagle.head import EagleConfig, EagleHead
from .layers import frequencies
from .parts import Count, States, Width
from .published import (
    CONTEXT,
    Layout,
    Published,
    TargetFacts,
    is_copy,
    lacks,
    refuse_if,
    renamed,
    stored_weights,
    target_rows,
)
from .published_options import PublishedLayers, layer_fields, said

ENGINE, FILE = "llama.cpp", "draft.gguf"
METHODS = "eagle3", "dflash"
"""The architectures, which have our names."""
_MASK, _TOKENS, _FACTORS = "tokenizer.ggml.mask_token_id", "tokenizer.ggml.tokens", "rope_freqs.weight"
_ENTRIES = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "value_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.dimension_count": "rotary_dim",
    "rope.freq_base": "rope_theta",
    "target_layers": "states",
}
"""What the entries are called here; others have the same name."""
_SIZES = tuple(_ENTRIES.values())[:3] + tuple(_ENTRIES.values())[4:7]  # written as the config has them
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WHOLE = {"fc": "fc", "norm": "output_norm", "lm_head": "output", "embed_tokens": "token_embd"}
_READ = "EAGLE-3 or DFlash as llama.cpp runs it, without windows"


def _names(architecture: str, layers: int) -> dict[str, str]:
    """Our name of a module for each name in the file."""
    names = {theirs: ours for ours, theirs in _WHOLE.items()}
    names["enc.output_norm"] = "input_norm" if architecture == "eagle3" else "hidden_norm"
    return names | {f"blk.{i}.{theirs}": f"layers.{i}.{ours}" for i in range(layers) for ours, theirs in _PARTS.items()}


@checked
class _Entries(PublishedLayers):
    """What the metadata says of a head, by our names."""

    _: KW_ONLY
    states: States
    value_dim: Width | None = None
    rotary_dim: Width | None = None
    target_hidden_size: Width | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    block_size: Count | None = None
    mask_token_id: Annotated[int, Field(ge=0)] | None = None


def _head_file(path: Path) -> GGUFFile:
    file = read_gguf(path)
    if file.architecture not in METHODS:
        raise ConfigError(
            f"{str(path)!r} is no head that Paceline reads", got=f"architecture {file.architecture!r}",
            expected=" or ".join(METHODS), fix="name a draft model as model:FILE.gguf",
        )  # fmt: skip
    return file


def read_gguf_head(path: Path, target: TargetFacts) -> EagleHead | DFlashHead:
    """The head of a GGUF file. Raises `IncompatibleModels` for what our modules lack, else `ConfigError`."""
    file = _head_file(path)
    kind, prefix = file.architecture, f"{file.architecture}."
    about = {key.removeprefix(prefix): one for key, one in file.metadata.items() if key.startswith(prefix)}
    given: dict[str, Any] = {_ENTRIES.get(key, key): shortest_decimal(one) for key, one in about.items()}
    vocabulary = len(file.metadata.get(_TOKENS, ())) or given.get("vocab_size")
    given = {"vocab_size": vocabulary, "mask_token_id": file.metadata.get(_MASK), **given}
    if kind == "eagle3":
        given["mask_token_id"] = None  # the target's own
    published = Published(path, given, {})
    if given["vocab_size"] != vocabulary:
        raise _contradicts(published, f"vocab_size {given['vocab_size']}", f"{vocabulary}, its tokens")
    options = said(published, _Entries, kind, _READ)
    fields = layer_fields(published, options, kind)
    for name in ("value_dim", "rotary_dim"):
        if getattr(options, name) not in (None, fields["head_dim"]):
            raise lacks(published, kind, f"{name} {getattr(options, name)}", f"{fields['head_dim']}, as of keys")
    tensors = {one.name: one for one in file.tensors}
    ids, factors = tensors.pop("d2t", None), tensors.pop(_FACTORS, None)
    draft_ids = torch.arange(options.vocab_size)
    if ids is not None:
        draft_ids = _ids(published, file.bytes_of(ids).view(np.int64).ravel() if ids.kind.name == "I64" else None)
    known = _names(kind, options.num_hidden_layers)
    if unknown := [name for name in tensors if name.removesuffix(".weight") not in known]:
        raise lacks(published, kind, f"a tensor {min(unknown)}", _READ)
    held = {name: file.whole(one) for name, one in tensors.items()}
    held = renamed(held, lambda name: known[name.removesuffix(".weight")] + ".weight", path)
    if kind == "eagle3":
        held = {name: _paired(name, one, fields["head_dim"], False) for name, one in held.items()}
    expected = None if factors is None else file.whole(factors)
    if expected is not None:
        fields["rope_scaling"] = {"rope_type": "llama3", "factor": round(float(expected.max()), 3), **LLAMA3}
    published.tensors, owns = held, dict[str, bool]()
    rows = None if target.lm_head is None else target.lm_head[draft_ids.to(target.lm_head.device)]
    for name, table in {"lm_head": rows, "embed_tokens": target.embeddings}.items():
        one = held.get(f"{name}.weight")
        owns[name] = one is not None and not is_copy(one, table)
        if one is not None and not owns[name]:
            del held[f"{name}.weight"]
    if ids is not None and tensors.get("output.weight") is None:
        raise lacks(published, kind, "d2t without output rows", "both, or neither")
    fields |= {"states": options.states, "draft_vocab_size": len(draft_ids), "own_lm_head": owns["lm_head"]}
    if kind == "eagle3":
        width = options.target_hidden_size or options.hidden_size
        fields |= {name: getattr(options, name) for name in ("norm_before_residual", "norm_before_fc")}
        config = EagleConfig(version=3, target_hidden_size=width, own_embeddings=owns["embed_tokens"], **fields)
    else:
        if owns["embed_tokens"] or options.target_hidden_size not in (None, options.hidden_size):
            raise lacks(published, kind, "embeddings, or a width, of its own", "the target's")
        if options.block_size is None or options.mask_token_id is None:
            raise _contradicts(published, f"no block_size or no {_MASK}", "both")
        more = {"block_size": options.block_size, "mask_token_id": options.mask_token_id}
        config = DFlashConfig(qk_norm=True, **more, **fields)
    if expected is not None and not torch.allclose(_factors(config), expected, rtol=1e-4):
        raise lacks(published, kind, _FACTORS, "the factors of Llama 3")
    return published.build(EagleHead if kind == "eagle3" else DFlashHead, config, draft_ids)


def _contradicts(published: Published, got: str, expected: str) -> ConfigError:
    return ConfigError(f"{published.name} contradicts itself", got=got, expected=expected)


def _ids(published: Published, ids: Any) -> Tensor:
    """The draft vocabulary, in the file's order."""
    rows = published.config["vocab_size"]
    if ids is None or len(np.unique(ids)) != len(ids) or ids.min() < 0 or ids.max() >= rows:
        raise _contradicts(published, "a d2t that is no draft vocabulary", f"int64 ids below {rows}, each once")
    return torch.from_numpy(ids.copy())


def _paired(name: str, rows: Tensor, head_dim: int, to_file: bool) -> Tensor:
    """Rows of q and k in rotary pairs, or back in halves."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return rows
    order = rotary_order(len(rows), head_dim)
    return rows[order.argsort() if to_file else order]


def _factors(config: EagleConfig | DFlashConfig) -> Tensor:
    plain = config.rope_theta ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
    return plain / frequencies(config, torch.device("cpu"))[0]


# ----------------------------------------------------------------------------------------------------------- writing


def gguf_layout(
    head: EagleHead | DFlashHead, facts: TargetFacts, tokens: Mapping[str, Any] | None, num_tokens: int
) -> Layout:
    """The export of a head. tokens: the entries of the target's tokenizer in a GGUF file. Raises `NotExportable`."""
    c, kind = head.config, "dflash" if isinstance(head, DFlashHead) else "eagle3"
    what, is_eagle = "a DFlash head" if kind == "dflash" else "an EAGLE-3 head", isinstance(c, EagleConfig)
    if isinstance(c, EagleConfig):
        refuse_if(c.version != 3, ENGINE, "an EAGLE-1 head", "train an eagle3 or dflash head")
        refuse_if(c.num_speculative_tokens is not None, ENGINE, "a P-EAGLE head", "train an eagle3 head")
        refuse_if(c.fc_norm or c.norm_output, ENGINE, f"{what} with fc_norm or norm_output (EAGLE-3.1)")
        refuse_if(c.num_hidden_layers > 1, ENGINE, f"{what} of {c.num_hidden_layers} layers")
        refuse_if(c.fc_bias, ENGINE, f"{what} with a bias of fc", "train it without")
        refuse_if(len(c.states) != 3, ENGINE, f"{what} that reads {len(c.states)} states", "train one that reads three")
    refuse_if(c.attention_bias, ENGINE, f"{what} with biases", "train it without")
    refuse_if(c.qk_norm == is_eagle, ENGINE, f"{what} with{'' if is_eagle else 'out'} norms of queries and keys")
    refuse_if(max(c.states) >= facts.num_layers, ENGINE, f"state {max(c.states)}, behind the final norm here")
    scaling = (c.rope_scaling or {}).get("rope_type")
    refuse_if(scaling not in (("llama3", None) if is_eagle else (None,)), ENGINE, f"{what} with {scaling} positions")
    refuse_if(tokens is None, ENGINE, "a head without the tokenizer of its target", "name --model")
    assert tokens is not None
    tensors, ids = stored_weights(head), head.draft_ids.cpu()
    if len(ids) < c.vocab_size:
        if not c.own_lm_head:
            tensors["lm_head.weight"] = target_rows(ENGINE, facts, ids)
        tensors["d2t"] = ids
    names = {ours: theirs for theirs, ours in _names(kind, c.num_hidden_layers).items()}
    written: dict[str, Tensor] = {}
    for name, one in tensors.items():
        stem, _, leaf = name.rpartition(".")
        theirs = f"{names[stem]}.{leaf}" if stem else name
        written[theirs] = _paired(name, one, c.head_dim, True) if is_eagle else one
    if scaling:
        written[_FACTORS] = _factors(c)
    about: dict[str, Any] = {key: getattr(c, name) for key, name in _ENTRIES.items() if name in _SIZES}
    about |= {
        "context_length": facts.context or CONTEXT,
        "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": float(c.rms_norm_eps),
        "rope.dimension_count": c.head_dim,
        "rope.freq_base": float(c.rope_theta),
        "vocab_size": c.vocab_size,
        "target_layers": list(c.states),
        "target_hidden_size": c.target_hidden_size,
    }
    notes = ["llama.cpp drafts a chain of the most probable tokens, not a tree."]
    if isinstance(c, EagleConfig):
        about |= {name: getattr(c, name) for name in ("norm_before_residual", "norm_before_fc")}
    else:
        about["block_size"], tokens = c.block_size, {**tokens, _MASK: c.mask_token_id}
        num_tokens = c.num_speculative_tokens
    if c.window is not None:
        notes.append(f"llama.cpp reads all states of a text, where Paceline reads the last {c.window}.")
    metadata = {"general.architecture": kind, **{f"{kind}.{key}": one for key, one in about.items()}, **tokens}
    serve = f"llama-server -m {{target}} {llama_cpp_head(kind, f'{{folder}}/{FILE}', num_tokens)}"
    return Layout(metadata, written, serve, tuple(notes))


def llama_cpp_head(method: str, path: str, num_tokens: int) -> str:
    """The options of llama.cpp for a head."""
    return f"--spec-type draft-{method} -md {path} --spec-draft-n-max {num_tokens}"


def write_gguf_head(path: Path, layout: Layout) -> None:
    """Write a layout of `gguf_layout`: matrices in 16 bits where they are, norms and factors in float32."""
    metadata = dict(layout.config)
    writer = GGUFWriter(None, metadata.pop("general.architecture"))
    add_entries(writer, metadata)
    for name, one in layout.tensors.items():
        if one.dim() > 1 and one.dtype is torch.bfloat16:
            writer.add_tensor(name, one.view(torch.uint8).numpy(), raw_dtype=GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, (one.float() if one.is_floating_point() else one).numpy())
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
