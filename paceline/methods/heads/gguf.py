"""Heads as draft models of llama.cpp (`draft-eagle3`, `draft-dflash`): what the architectures share, to read and write.

metadata      ARCH.*: the layers, and what is below; tokenizer.ggml.*: the target's
target_layers the states that are read: the input of layer s is state s
tensors       blk.i.*, fc, output_norm, and what the method names
              output: the rows of the draft vocabulary; token_embd; both absent where they are the target's, whole
              d2t: the target's id of each draft token; absent where the draft vocabulary is whole
              rope_freqs: factors of the frequencies
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from torch import Tensor, nn

from ...errors import ConfigError
from ...hf.gguf.config import LLAMA3, shortest_decimal
from ...hf.gguf.weights import rotary_order
from ...hf.gguf.writer import add_entries
from ...schema import checked
from .layers import LayersConfig, frequencies
from .parts import DraftHead, States, Width
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
MASK = "tokenizer.ggml.mask_token_id"
_TOKENS, _FACTORS = "tokenizer.ggml.tokens", "rope_freqs.weight"
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
_READ = "a head as llama.cpp runs it, without windows"


def _names(layers: int, modules: Mapping[str, str]) -> dict[str, str]:
    """The name in the file of each of our modules. modules: those of one architecture."""
    return {
        **_WHOLE,
        **modules,
        **{f"layers.{i}.{ours}": f"blk.{i}.{name}" for i in range(layers) for ours, name in _PARTS.items()},
    }


@checked
class Entries(PublishedLayers):
    """What the metadata says of any head, by our names."""

    _: KW_ONLY
    states: States
    value_dim: Width | None = None
    rotary_dim: Width | None = None
    target_hidden_size: Width | None = None


_E = TypeVar("_E", bound=Entries)
_M = TypeVar("_M", bound=nn.Module)


@dataclass(frozen=True)
class Parts(Generic[_E]):
    """A head that was read: what its metadata says, the fields of its configuration, and what is no weight of a layer.

    owns_embeddings: whether it has embeddings other than the target's. factors: of the frequencies, as they are stored.
    """

    published: Published
    entries: _E
    fields: Mapping[str, Any]
    draft_ids: Tensor
    owns_embeddings: bool
    factors: Tensor | None

    def build(self, kind: type[_M], config: LayersConfig) -> _M:
        """Our module. Raises as `Published.build`, and `IncompatibleModels` for other frequencies than the config's."""
        if self.factors is not None and not torch.allclose(_factors(config), self.factors, rtol=1e-4):
            raise self.lacks(_FACTORS, "the factors of Llama 3")
        return self.published.build(kind, config, self.draft_ids)

    def lacks(self, feature: str, expected: str) -> Exception:
        return lacks(self.published, self.published.architecture, feature, expected)


def read_parts(
    published: Published,
    kind: type[_E],
    modules: Mapping[str, str],
    target: TargetFacts,
    in_pairs: bool = False,
    more: Mapping[str, object] | None = None,
) -> Parts[_E]:
    """Read a file. Raises `IncompatibleModels` for what our modules lack, else `ConfigError`.

    modules: the name in the file of each module that this architecture alone has. in_pairs: whether rows of queries and
    keys lie in rotary pairs. more: entries whose names do not begin with the architecture's.
    """
    file, architecture = published.file, published.architecture
    assert file is not None
    prefix = f"{architecture}."
    about = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    config: dict[str, Any] = {_ENTRIES.get(key, key): shortest_decimal(value) for key, value in about.items()}
    vocabulary = len(file.metadata.get(_TOKENS, ())) or config.get("vocab_size")
    published.config = config = {"vocab_size": vocabulary, **(more or {}), **config}
    if config["vocab_size"] != vocabulary:
        raise contradicts(published, f"vocab_size {config['vocab_size']}", f"{vocabulary}, its tokens")
    entries = said(published, kind, architecture, _READ)
    fields = layer_fields(published, entries, architecture)
    for name in ("value_dim", "rotary_dim"):
        if getattr(entries, name) not in (None, fields["head_dim"]):
            expected = f"{fields['head_dim']}, as of keys"
            raise lacks(published, architecture, f"{name} {getattr(entries, name)}", expected)
    tensors = {tensor.name: tensor for tensor in file.tensors}
    ids, factors = tensors.pop("d2t", None), tensors.pop(_FACTORS, None)
    draft_ids = torch.arange(entries.vocab_size)
    if ids is not None:
        draft_ids = _ids(published, file.bytes_of(ids).view(np.int64).ravel() if ids.kind.name == "I64" else None)
    known = {f"{name}.weight": f"{ours}.weight" for ours, name in _names(entries.num_hidden_layers, modules).items()}
    if unknown := tensors.keys() - known.keys():
        raise lacks(published, architecture, f"a tensor {min(unknown)}", _READ)
    held = {name: file.whole(tensor) for name, tensor in tensors.items()}
    held = renamed(held, lambda name: known[name], published.folder)
    if in_pairs:
        held = {name: _paired(name, tensor, fields["head_dim"], False) for name, tensor in held.items()}
    whole = None if factors is None else file.whole(factors)
    if whole is not None:
        fields["rope_scaling"] = {"rope_type": "llama3", "factor": round(float(whole.max()), 3), **LLAMA3}
    published.tensors, owns = held, dict[str, bool]()
    rows = None if target.lm_head is None else target.lm_head[draft_ids.to(target.lm_head.device)]
    for name, table in {"lm_head": rows, "embed_tokens": target.embeddings}.items():
        tensor = held.get(f"{name}.weight")
        owns[name] = tensor is not None and not is_copy(tensor, table)
        if tensor is not None and not owns[name]:
            del held[f"{name}.weight"]
    if ids is not None and tensors.get("output.weight") is None:
        raise lacks(published, architecture, "d2t without output rows", "both, or neither")
    fields |= {"states": entries.states, "draft_vocab_size": len(draft_ids), "own_lm_head": owns["lm_head"]}
    return Parts(published, entries, fields, draft_ids, owns["embed_tokens"], whole)


def contradicts(published: Published, got: str, expected: str) -> ConfigError:
    """The error for a file that says two things."""
    return ConfigError(f"{published.name} contradicts itself", got=got, expected=expected)


def _ids(published: Published, ids: Any) -> Tensor:
    """The draft vocabulary, in the file's order."""
    rows = published.config["vocab_size"]
    if ids is None or len(np.unique(ids)) != len(ids) or ids.min() < 0 or ids.max() >= rows:
        raise contradicts(published, "a d2t that is no draft vocabulary", f"int64 ids below {rows}, each once")
    return torch.from_numpy(ids.copy())


def _paired(name: str, rows: Tensor, head_dim: int, to_file: bool) -> Tensor:
    """Rows of q and k in rotary pairs, or back in halves."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return rows
    order = rotary_order(len(rows), head_dim)
    return rows[order.argsort() if to_file else order]


def _factors(config: LayersConfig) -> Tensor:
    plain = config.rope_theta ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
    return plain / frequencies(config, torch.device("cpu"))[0]


def file_layout(
    architecture: str, head: DraftHead, facts: TargetFacts, modules: Mapping[str, str], more: Mapping[str, object],
    num_tokens: int, in_pairs: bool = False, scalings: tuple[str, ...] = (),
) -> Layout:  # fmt: skip
    """The file of a head. modules, in_pairs: as of `read_parts`. more: its own entries, or such with whole names.

    scalings: the types of scaled positions that it may have. num_tokens: to draft in a round. Raises `NotExportable`.
    """
    c: Any = head.config
    scaling = (c.rope_scaling or {}).get("rope_type")
    refuse_if(c.attention_bias, ENGINE, "biases", "train it without")
    refuse_if(max(c.states) >= facts.num_layers, ENGINE, f"state {max(c.states)}, behind the final norm here")
    refuse_if(scaling not in (None, *scalings), ENGINE, f"a head with {scaling} positions")
    refuse_if(facts.tokens is None, ENGINE, "a head without the tokenizer of its target", "name --model")
    tensors, ids = stored_weights(head), head.draft_ids.cpu()
    if len(ids) < c.vocab_size:
        if not c.own_lm_head:
            tensors["lm_head.weight"] = target_rows(ENGINE, facts, ids)
        tensors["d2t"] = ids
    names, written = _names(c.num_hidden_layers, modules), dict[str, Tensor]()
    for name, tensor in tensors.items():
        stem, _, leaf = name.rpartition(".")
        tensor = _paired(name, tensor, c.head_dim, True) if in_pairs else tensor
        written[f"{names[stem]}.{leaf}" if stem else name] = tensor
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
    whole = {key: value for key, value in more.items() if key.startswith("tokenizer.")}
    about |= {key: value for key, value in more.items() if key not in whole}
    notes = ["llama.cpp drafts a chain of the most probable tokens, not a tree."]
    if c.window is not None:
        notes.append(f"llama.cpp reads all states of a text, where Paceline reads the last {c.window}.")
    about = {f"{architecture}.{key}": value for key, value in about.items()}
    metadata = {"general.architecture": architecture, **about}
    flags = f"--spec-type draft-{architecture} -md {{folder}}/{FILE} --spec-draft-n-max {num_tokens}"
    serve = f"llama-server -m {{target}} {flags}"
    return Layout({**metadata, **(facts.tokens or {}), **whole}, written, serve, tuple(notes))


def write_gguf_head(path: Path, layout: Layout) -> None:
    """Write a layout of `layout`: matrices in 16 bits where they are, norms and factors in float32."""
    metadata = dict(layout.config)
    writer = GGUFWriter(None, metadata.pop("general.architecture"))
    add_entries(writer, metadata)
    for name, tensor in layout.tensors.items():
        if tensor.dim() > 1 and tensor.dtype is torch.bfloat16:
            writer.add_tensor(name, tensor.view(torch.uint8).numpy(), raw_dtype=GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, (tensor.float() if tensor.is_floating_point() else tensor).numpy())
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
