"""Writes a model of transformers as a GGUF file, which `gguf` reads back as the same model.

What a file cannot say, and would therefore change the model, is refused by name: the config is read back from the
metadata, and the tokenizer from the file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFValueType,
    GGUFWriter,
    LlamaFileType,
    get_tensor_name_map,
)
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..errors import ConfigError, IncompatibleModels
from ..kernels.library import BlockFormat
from ..quant.block_rounding import round_rows
from ..quant.mixes import BlockMix, head_format, layer_format
from ..schema import brief
from ..system.files import Progress, replacing
from .checkpoint import quietly
from .gguf_config import FORMS, config_of, head_dim_of
from .gguf_file import SUFFIX, GGUFFile, GGUFTensor, read_gguf
from .gguf_tokens import described, gguf_tokenizer, split_of
from .gguf_weights import rotary_order
from .load import eos_ids_of, open_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel
FileWeights: TypeAlias = BlockMix | Literal["bf16", "f16", "f32"]
"""How matrices are stored."""
WRITTEN = ("llama", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3")
"""The architectures that are written, by llama.cpp's name."""
_PLAIN = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
_TYPES = {"q5_k": "Q5_K_S", "q4_k": "Q4_K_S", "q3_k": "Q3_K_S", "q2_k": "Q2_K_S", "mxfp4": "MXFP4_MOE"}
_ALIASES = {"mistral": "llama"}
_PATTERN, _FACTORS = "attention.sliding_window_pattern", "rope_freqs.weight"
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_INERT = {
    "_name_or_path", "architectures", "attention_dropout", "bos_token_id", "chunk_size_feed_forward", "dtype",
    "embd_pdrop", "eos_token_id", "id2label", "initializer_range", "is_encoder_decoder", "label2id",
    "max_window_layers",
    "model_type", "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type",
    "resid_pdrop", "return_dict", "transformers_version", "use_cache",
}  # fmt: skip
"""Entries of configs that do not change what a model says."""
_SAMPLES = (
    "Hello, world!",
    " The  3rd\tof 12,345 — naïve 🦊 你好\n\n  if x_1 == 2:\r\n    don't",
    "ÀB\u0301c<|im_end|> 1.5e-3 ...",
)


@dataclass(frozen=True)
class Written:
    """A file that was written. formats: how many matrices have which format."""

    path: Path
    size_bytes: int
    formats: Mapping[str, int]


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the file. kind: its format. values: as they are stored, before they are rounded to it."""

    name: str
    kind: GGMLQuantizationType
    values: Tensor


@dataclass(frozen=True)
class _Planned(GGUFFile):
    """A file before it is written. The config reads no values but the factors of frequencies."""

    factors: Tensor | None = None

    def values(self, tensor: GGUFTensor) -> Iterator[Tensor]:
        assert self.factors is not None
        yield self.factors[None]


@quietly()
def write_gguf(name_or_path: str, out: Path, weights: str | None, progress: Progress = lambda *_: None) -> Written:
    """Write a folder or hub id, or a GGUF file that is not quantised, as one GGUF file.

    weights: see `FileWeights`; None: bf16, or what the model has.

    Raises `ConfigError` for an unreadable or quantised model and for a tokenizer that files cannot describe,
    `IncompatibleModels` for an architecture or a config that they cannot, and OSError when the disk refuses.
    """
    if name_or_path.endswith(SUFFIX) and (held := read_gguf(Path(name_or_path)).formats):
        raise _quantized(name_or_path, ", ".join(held))
    opened, tokenizer, processor = open_checkpoint(name_or_path, None, "cpu", False)
    model = cast("PreTrainedModel", opened)
    config: Any = model.config
    if getattr(config, "quantization_config", None):
        raise _quantized(name_or_path, "quantization_config")
    architecture = _architecture(name_or_path, config) if processor is None else None
    if architecture is None or tokenizer is None:
        raise IncompatibleModels(
            f"{name_or_path!r} cannot be written as a GGUF file", got=f"model type {config.model_type!r}",
            expected="a language model of " + ", ".join(FORMS[name].model_type for name in WRITTEN),
            fix="convert it with llama.cpp's convert_hf_to_gguf.py",
        )  # fmt: skip
    stored = weights or next((name for name, one in _PLAIN.items() if one is model.dtype), "bf16")
    tensors = list(_tensors(architecture, model, stored))
    metadata = {"general.name": Path(name_or_path).name, "general.quantization_version": 2}
    metadata["general.file_type"] = _file_type(stored)
    metadata |= _about(architecture, config) | _tokens(tokenizer, model)
    _check_config(name_or_path, config, {"general.architecture": architecture, **metadata}, tensors)
    with replacing(out) as part:
        _write(part, architecture, metadata, tensors, progress)
        _check_tokenizer(name_or_path, part, tokenizer)
    matrices = [one.kind.name for one in tensors if one.values.dim() > 1]
    return Written(out, out.stat().st_size, {name: matrices.count(name) for name in dict.fromkeys(matrices)})


def _quantized(name: str, got: str) -> ConfigError:
    return ConfigError(
        f"the weights of {name!r} are quantised already", got=got, expected="weights in bf16, f16 or f32",
        fix="give the original model: rounding twice adds both errors",
    )  # fmt: skip


def _architecture(name: str, config: Any) -> str | None:
    if config.model_type in _ALIASES:
        return _ALIASES[config.model_type]
    return next((name for name in WRITTEN if FORMS[name].model_type == config.model_type), None)


def _file_type(stored: str) -> int:
    name = "ALL_F32" if stored == "f32" else "MOSTLY_" + _TYPES.get(stored, stored.upper())
    return int(LlamaFileType[name])


def _tensors(architecture: str, model: "PreTrainedModel", stored: str) -> Iterator[_Tensor]:
    """All tensors under their names in files, matrices in the order of their rows there."""
    form, config = FORMS[architecture], cast("Any", model.config)
    (number,) = [number for number, name in MODEL_ARCH_NAMES.items() if name == architecture]
    names = get_tensor_name_map(number, config.num_hidden_layers)
    for name, values in model.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if (theirs := names.get_name(stem)) is None:
            raise IncompatibleModels(
                f"a GGUF file of {architecture} has no place for a tensor", got=name,
                fix="convert it with llama.cpp's convert_hf_to_gguf.py",
            )  # fmt: skip
        if form.interleaved and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = values[rotary_order(len(values), head_dim_of(config)).argsort()]
        if form.plus_one and stem.endswith("norm"):
            values = values.float() + 1
        kind = GGMLQuantizationType.F32
        if values.dim() > 1:
            kind = GGMLQuantizationType[_kind(name, stem, values, stored, config)]
        yield _Tensor(f"{theirs}.{leaf}", kind, values)
    rope = config.rope_parameters or {}
    if rope.get("rope_type") == "llama3":
        plain = rope["rope_theta"] ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        yield _Tensor(_FACTORS, GGMLQuantizationType.F32, plain / scaled)


def _kind(name: str, path: str, values: Tensor, stored: str, config: Any) -> str:
    if stored in _PLAIN:
        return stored.upper()
    inputs, layers = values.shape[1], config.num_hidden_layers
    is_head = name == "lm_head.weight" or (name.endswith("embed_tokens.weight") and config.tie_word_embeddings)
    form = head_format(stored, inputs) if is_head else layer_format(stored, path, layers, inputs)
    own = {dtype: name.upper() for name, dtype in _PLAIN.items()}
    return form.name if form is not None else own[values.dtype]


def _about(architecture: str, config: Any) -> dict[str, Any]:
    """What a file says of the layers: the entries that `config_of` reads."""
    form, head_dim = FORMS[architecture], getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    about: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": head_dim,
        "vocab_size": config.vocab_size,
    }
    for key, (name, _) in form.entries.items():
        if name and getattr(config, name, None) is not None:
            about[key] = getattr(config, name)
    if _PATTERN in form.entries and getattr(config, "layer_types", None):
        about[_PATTERN] = [kind == "sliding_attention" for kind in config.layer_types]
    ropes = config.rope_parameters or {}
    rope = ropes.get("full_attention", ropes)
    about["rope.freq_base"] = float(rope.get("rope_theta", 10_000.0))
    if "sliding_attention" in ropes:
        about["rope.freq_base_swa"] = float(ropes["sliding_attention"]["rope_theta"])
    if rope.get("rope_type") == "linear":
        about |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    return {f"{architecture}.{key}": value for key, value in about.items()}


def _tokens(tokenizer: PreTrainedTokenizerBase, model: "PreTrainedModel") -> dict[str, Any]:
    """The entries of a byte-level tokenizer. Raises `ConfigError` for another one."""
    split, rows = split_of(tokenizer), cast("Any", model.get_input_embeddings()).num_embeddings
    names, added = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))), tokenizer.added_tokens_decoder
    tokens = [*names, *(f"[PAD{i}]" for i in range(len(names), rows))]
    types = [_NORMAL] * len(names) + [_UNUSED] * (rows - len(names))
    for place, token in added.items():
        types[place] = _CONTROL if token.special else _USER_DEFINED
    ends = sorted(eos_ids_of(model), key=lambda one: one != tokenizer.eos_token_id)
    bare, whole = (tokenizer("a", add_special_tokens=one).input_ids for one in (False, True))
    pairs = described(tokenizer)["model"]["merges"]
    held: dict[str, Any] = {
        "model": "gpt2", "pre": split, "tokens": tokens, "token_type": types,
        "merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs],
        "bos_token_id": tokenizer.bos_token_id, "padding_token_id": tokenizer.pad_token_id,
        "unknown_token_id": tokenizer.unk_token_id,
        **dict(zip(("eos_token_id", "eot_token_id", "eom_token_id"), ends, strict=False)),
        "add_bos_token": whole[:1] != bare[:1],
    }  # fmt: skip
    template = tokenizer.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    return {f"tokenizer.ggml.{key}": one for key, one in held.items() if one is not None} | (
        {"tokenizer.chat_template": template} if template else {}
    )


def _check_config(name: str, config: Any, metadata: dict[str, Any], tensors: list[_Tensor]) -> None:
    """Raise `IncompatibleModels` where the file would be read as another model."""
    factors = next((one.values for one in tensors if one.name == _FACTORS), None)
    held = tuple(GGUFTensor(Path(name), one.name, tuple(one.values.shape), one.kind, 0, 0) for one in tensors)
    read, given = config_of(_Planned(Path(name), metadata, held, factors)).to_dict(), config.to_dict()
    if (given.get("rope_parameters") or {}).get("partial_rotary_factor") == 1:  # all of it, as without this entry
        given["rope_parameters"] = {k: v for k, v in given["rope_parameters"].items() if k != "partial_rotary_factor"}
    differing = [key for key in given.keys() & read.keys() - _INERT if given[key] != read[key]]
    differing += ["sliding_window"] if given.get("sliding_window") and "sliding_window" not in read else []
    if differing:
        key = min(differing)
        raise IncompatibleModels(
            f"a GGUF file cannot describe {name!r}", got=f"{key} {brief(given[key])}",
            expected=f"{brief(read.get(key))}, as the file would be read",
            fix="convert it with llama.cpp's convert_hf_to_gguf.py",
        )  # fmt: skip


def _check_tokenizer(name: str, path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `ConfigError` where the file's tokenizer reads texts in another way."""
    made = gguf_tokenizer(read_gguf(path))
    for text in _SAMPLES:
        given, read = tokenizer(text).input_ids, made(text).input_ids
        if given != read:
            raise ConfigError(
                f"a GGUF file cannot describe the tokenizer of {name!r}", got=f"{read} for {text!r}",
                expected=f"{given}", fix="convert it with llama.cpp's convert_hf_to_gguf.py",
            )  # fmt: skip


def _write(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: list[_Tensor], progress: Progress
) -> None:
    writer = GGUFWriter(None, architecture)
    for key, value in metadata.items():
        kind = GGUFValueType.UINT32 if type(value) is int else GGUFValueType.get_type(value)
        inner = GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
        writer.add_key_value(key, value, kind, inner)
    for one in tensors:
        per, num_bytes = GGML_QUANT_SIZES[one.kind]
        # The writer takes shapes in elements, but of uint8 in bytes: float32 here says "elements".
        shape, size = one.values.shape, one.values.numel() // per * num_bytes
        writer.add_tensor_info(one.name, shape, np.dtype(np.float32), size, one.kind)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for done, one in enumerate(tensors, start=1):
        writer.write_tensor_data(_bytes(one))
        progress("convert", done, len(tensors))
    writer.close()


def _bytes(one: _Tensor) -> Any:
    kind = one.kind.name.lower()
    if kind not in _PLAIN:
        return round_rows(BlockFormat[one.kind.name], one.values, one.name).numpy()
    stored = one.values.detach().to(_PLAIN[kind]).contiguous()
    if not stored.isfinite().all():
        raise ConfigError(
            f"the weights {one.name!r} cannot be stored in {kind}", got="numbers beyond its range, or not finite",
            fix="use another format",
        )  # fmt: skip
    return stored.view(torch.uint8).numpy()
