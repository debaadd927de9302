"""Reads a GGUF file as a transformers model and tokenizer, as if from a Hugging Face folder.

Matrices in blocks stay as they are where kernels read them; other quantised weights become bfloat16. An unknown tensor,
or an unknown entry about the layers, is an error, since ignoring it would give another model.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from pydantic import Field
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..errors import ConfigError, IncompatibleModels
from ..kernels.library import BlockFormat
from ..kernels.packing import Blocks
from ..quant.packed import Place, WeightArena
from ..schema import Positive, brief, validate
from ..system.files import Progress, read_json, to_json, write_text
from .block_model import block_model, has_kernels
from .checkpoint import Stored, check_config, check_loaded_weights, check_model_size, quietly, refused
from .gguf_file import GGUFFile, GGUFTensor, read_gguf
from .gguf_tokens import check_tokens, ends_of_answers, gguf_tokenizer

_LOG = logging.getLogger("paceline")


_Entry = tuple[str | None, Any]
"""The name of an entry in the config, None if it has none, and what it may hold."""
_SIZE = Annotated[int, Field(ge=1, le=1 << 40)]


@dataclass(frozen=True)
class _Form:
    """How files of an architecture differ from the model in transformers.

    entries: of the metadata, beside those that all have.
    interleaved: the rows of q and k lie in rotary pairs. plus_one: norms hold 1 + their weight.
    """

    model_type: str
    entries: Mapping[str, _Entry] = field(default_factory=dict[str, _Entry])
    interleaved: bool = False
    plus_one: bool = False


_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
_WINDOWS: Mapping[str, _Entry] = {
    _WINDOW: ("sliding_window", _SIZE), _PATTERN: (None, Annotated[int, Field(ge=1)] | list[bool]),
}  # fmt: skip
_CAPS: Mapping[str, _Entry] = {name: (name, Positive) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
_LOCAL_BASE = "rope.freq_base_swa"
FORMS: Mapping[str, _Form] = {
    "llama": _Form("llama", interleaved=True),
    "qwen2": _Form("qwen2"),
    "qwen3": _Form("qwen3"),
    "phi3": _Form("phi3", {_WINDOW: ("sliding_window", Annotated[int, Field(ge=0)])}),
    "gemma": _Form("gemma", plus_one=True),
    "gemma2": _Form("gemma2", {**_WINDOWS, **_CAPS}, plus_one=True),
    "gemma3": _Form("gemma3_text", {**_WINDOWS, _LOCAL_BASE: (None, Positive)}, plus_one=True),
}
"""The architectures that are read, by llama.cpp's name."""
_ENTRIES: Mapping[str, _Entry] = {
    "context_length": ("max_position_embeddings", _SIZE),
    "block_count": ("num_hidden_layers", _SIZE),
    "embedding_length": ("hidden_size", _SIZE),
    "feed_forward_length": ("intermediate_size", _SIZE),
    "attention.head_count": ("num_attention_heads", _SIZE),
    "attention.head_count_kv": ("num_key_value_heads", _SIZE),
    "attention.key_length": ("head_dim", _SIZE),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", Positive),
    "attention.value_length": (None, _SIZE),
    "vocab_size": (None, _SIZE),
    "rope.dimension_count": (None, _SIZE),
    "rope.freq_base": (None, Positive),
    "rope.scaling.type": (None, str),
    "rope.scaling.factor": (None, Positive),
    "rope.scaling.original_context_length": (None, _SIZE),
    "rope.scaling.finetuned": (None, bool),
}
_REQUIRED = {key for key, (name, _) in _ENTRIES.items() if name} - {"attention.head_count_kv", "attention.key_length"}
_WIDEST = {("gemma2", 46), ("gemma3", 62)}  # those of 27B scale attention by the hidden size of a head, not by its own
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_ROPE_FACTORS = "rope_freqs.weight"


def open_gguf(
    path: Path,
    dtype: Callable[[PretrainedConfig], torch.dtype | None],
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress = lambda *_: None,
    packs: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of a GGUF file on the CPU, and its tokenizer.

    dtype: what the model is made in, None: the file's own dtype, or bfloat16 where it is quantised.
    tokenizer: in place of the file's.
    packs: keep the blocks of quantised matrices, where there are kernels for them.

    Raises `ConfigError` for what is no whole GGUF file of a language model, and for entries that are not understood;
    `IncompatibleModels` for other architectures.
    """
    file = read_gguf(path)
    _check_kind(file)
    check_tokens(file)
    with refused(f"{str(path)!r} does not describe a model", "the metadata of a language model", "fetch it again"):
        config = config_of(file)
    check_config(str(path), config)
    kind = _class_of(config)
    check_model_size(
        str(path), AutoModelForCausalLM, config, False, {one.name: Stored("F32", one.shape) for one in file.tensors}
    )
    tokenizer = tokenizer or gguf_tokenizer(file)
    wanted = dtype(config) or file.dtype
    kept = BlockFormat.__members__ if packs and has_kernels(config) else {}
    if changed := [one for one in file.formats if one not in kept]:
        _LOG.warning("%s: %s weights become %s.", path.name, ", ".join(changed), str(wanted).split(".")[1])
    with refused(f"the weights in {str(path)!r} cannot be read", fix="fetch it again"):
        weights = _weights(file, kind, config, wanted, progress, kept)
        if any(isinstance(one, Blocks) for one in weights.values()):
            model, loaded = block_model(config, weights, wanted)
        else:
            told = {"ignore_mismatched_sizes": True, "output_loading_info": True}
            model, loaded = kind.from_pretrained(None, config=config, state_dict=weights, dtype=wanted, **told)
    check_loaded_weights(str(path), model, loaded, {})
    return model, tokenizer


@quietly()
def convert_gguf(path: Path, folder: Path, progress: Progress = lambda *_: None) -> None:
    """Write config, weights and tokenizer of a GGUF file into `folder`, from which transformers loads them unaided.

    Raises as `open_gguf`, and OSError when the disk refuses.
    """
    model, tokenizer = open_gguf(path, lambda _: None, progress=progress)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # What readers older than transformers 5 look for: without rope_theta they assume 10000.
    old: dict[str, dict[str, Any]] = {"tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"}}
    if "rope_theta" in (rope := model.config.rope_parameters):
        old["config.json"] = {"rope_theta": rope["rope_theta"]}
    for name, more in old.items():
        write_text(folder / name, to_json(read_json(folder / name) | more, indent=2) + "\n")


def _check_kind(file: GGUFFile) -> None:
    """Raise an error for files that hold something else than a whole language model that is known here."""
    name, metadata = str(file.path), file.metadata
    if (parts := metadata.get("split.count", 1)) != 1:
        raise ConfigError(
            f"{name!r} is one part of a file", got=f"{parts} parts", expected="a whole file",
            fix="join them: llama-gguf-split --merge FIRST-PART.gguf OUT.gguf",
        )  # fmt: skip
    kind = metadata.get("general.type", "model")
    if file.architecture == "clip" or kind != "model":
        what = "a vision projector" if file.architecture == "clip" else f"of type {kind!r}"
        raise ConfigError(
            f"{name!r} is {what}", expected="a language model",
            fix="name the file of the language model; for images give the Hugging Face folder of the whole model",
        )  # fmt: skip
    if file.architecture not in FORMS:
        raise IncompatibleModels(
            f"{name!r} is of an architecture that is not read from GGUF", got=file.architecture,
            expected="one of " + ", ".join(FORMS), fix="give the Hugging Face folder or hub id of the same model",
        )  # fmt: skip


def _unknown(file: GGUFFile, got: str, expected: str | None = None) -> NoReturn:
    raise ConfigError(
        f"{str(file.path)!r} describes its model in a way that is not understood", got=got, expected=expected,
        fix="give the Hugging Face folder or hub id of the same model",
    )  # fmt: skip


def config_of(file: GGUFFile) -> PretrainedConfig:
    """The config of a file's model. Raises `ConfigError` for what is not understood."""
    form, about = FORMS[file.architecture], _about(file)
    given: dict[str, Any] = {name: about[key] for key, (name, _) in _entries(file).items() if name and key in about}
    names = {tensor.name: tensor for tensor in file.tensors}
    heads, layers = given["num_attention_heads"], given["num_hidden_layers"]
    if layers > len(names):
        _unknown(file, f"{layers:,} layers", f"at most {len(names):,}, the number of tensors")
    plain = AutoConfig.for_model(form.model_type)
    given.setdefault("num_key_value_heads", heads)
    head_dim = given.setdefault("head_dim", given["hidden_size"] // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if about.get(key, head_dim) != head_dim:
            _unknown(file, f"{file.architecture}.{key} {about[key]}", f"{head_dim}, as of keys")
    rows = names["token_embd.weight"].shape[0]  # some files pad it beyond their tokens
    tokens = len(file.metadata.get("tokenizer.ggml.tokens", []))
    if about.get("vocab_size", rows) != rows or tokens > rows:
        got = f"vocab_size {about.get('vocab_size')}, {tokens:,} tokens, and {rows:,} rows of token_embd.weight"
        _unknown(file, got, "as many rows as vocab_size, and at least as many as tokens")
    if given.get("sliding_window") == 0:  # for none
        given["sliding_window"] = None
    if (pattern := about.get(_PATTERN)) is not None:
        slides = [bool((i + 1) % pattern) for i in range(layers)] if isinstance(pattern, int) else pattern
        given["layer_types"] = ["sliding_attention" if one else "full_attention" for one in slides]
    if file.architecture == "gemma3" and _WINDOW not in about:
        _unknown(file, f"no gemma3.{_WINDOW}", "the length of its windows")
    if file.architecture in ("gemma2", "gemma3"):
        wide = (file.architecture, layers) in _WIDEST
        given["query_pre_attn_scalar"] = given["hidden_size"] // heads if wide else head_dim
    if not hasattr(plain, "head_dim") and head_dim == given["hidden_size"] // heads:
        del given["head_dim"]  # as in the checkpoints of these families
    config = AutoConfig.for_model(
        form.model_type,
        **given,
        vocab_size=rows,
        tie_word_embeddings="output.weight" not in names,
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=ends_of_answers(file.metadata),
        pad_token_id=file.metadata.get("tokenizer.ggml.padding_token_id"),
        dtype=file.dtype,
        architectures=[_class_of(plain).__name__],
    )
    _set_rope(file, config, about, names.get(_ROPE_FACTORS))
    return config


def _entries(file: GGUFFile) -> dict[str, _Entry]:
    return {**_ENTRIES, **FORMS[file.architecture].entries}


def _about(file: GGUFFile) -> dict[str, Any]:
    """What the metadata says of the layers. Raises `ConfigError` for an entry that is unknown, missing or wrong."""
    prefix, entries = f"{file.architecture}.", _entries(file)
    about = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    others = [key for key in file.metadata if not key.startswith(prefix) and key.partition(".")[2] in entries]
    if unknown := [f"{prefix}{key}" for key in about.keys() - entries.keys()] + others:
        _unknown(file, f"{min(unknown)} {brief(file.metadata[min(unknown)])}")
    if missing := _REQUIRED - about.keys():
        _unknown(file, f"no {prefix}{min(missing)}")
    return {
        key: validate(entries[key][1], _decimal(value), f"{prefix}{key} of {str(file.path)!r}")
        for key, value in about.items()
    }


def _class_of(config: PretrainedConfig) -> Any:
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def _decimal(value: Any) -> Any:
    """Kept in 32 bits, 1e-5 reads back as 9.9999997e-06: the shortest decimal is the one that was meant."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _set_rope(file: GGUFFile, config: Any, about: Mapping[str, Any], factors: GGUFTensor | None) -> None:
    base, factor = about.get("rope.freq_base", 10_000.0), about.get("rope.scaling.factor")
    scales = factor not in (None, 1.0)
    kind = about.get("rope.scaling.type", "linear" if scales else "none")  # as llama.cpp reads it
    sound = {"none": not scales, "linear": factor is not None and factors is None}
    if not sound.get(kind, False):
        got = f"rope.scaling.type {kind!r}, factor {factor}, {'no' if factors is None else 'and'} {_ROPE_FACTORS}"
        _unknown(file, got, f"none or linear; linear with a factor and without {_ROPE_FACTORS}")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if factors is not None:  # of each frequency: how Llama 3.1 and its successors reach further
        (expected,) = file.values(factors)
        longest = round(float(expected.max()), 3)
        config.rope_parameters = rope = rope | _LLAMA3 | {"rope_type": "llama3", "factor": longest}
        plain = base ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        if factors.shape != scaled.shape or not torch.allclose(plain / scaled, expected[0], rtol=1e-4):
            _unknown(file, _ROPE_FACTORS, "the factors of Llama 3")
    elif kind == "linear":
        rope |= {"rope_type": "linear", "factor": factor}
    if file.architecture == "gemma3":
        local = {"rope_type": "default", "rope_theta": about.get(_LOCAL_BASE, 10_000.0)}
        rope = {"full_attention": rope, "sliding_attention": local}
    config.rope_parameters = rope


def _weights(
    file: GGUFFile,
    kind: Any,
    config: PretrainedConfig,
    dtype: torch.dtype,
    progress: Progress,
    kept: Mapping[str, BlockFormat],
) -> dict[str, Tensor | Blocks]:
    """Every tensor in `dtype`, or in blocks of the kept formats, under its name in transformers.

    Raises `ConfigError` for one that has none.
    """
    form = FORMS[file.architecture]
    with torch.device("meta"), no_init_weights():
        ours = kind(config).state_dict()
    (number,) = [number for number, name in MODEL_ARCH_NAMES.items() if name == file.architecture]
    theirs = get_tensor_name_map(number, config.num_hidden_layers)
    names: dict[str, str] = {}
    for name in ours:
        stem, _, leaf = name.rpartition(".")
        names[f"{theirs.get_name(stem)}.{leaf}"] = name
    weights: dict[str, Tensor | Blocks] = {}
    place = WeightArena()
    for done, tensor in enumerate(file.tensors, start=1):
        if tensor.name == _ROPE_FACTORS:  # read by the config
            continue
        if tensor.name not in names:
            _unknown(file, f"a tensor {tensor.name!r}", f"those of {file.architecture}")
        name = names[tensor.name]
        order = torch.arange(tensor.shape[0])
        if form.interleaved and name.endswith(("q_proj.weight", "k_proj.weight")):
            order = rotary_order(len(order), config.head_dim)
        if len(tensor.shape) == 2 and tensor.kind.name in kept:
            weight, is_finite = _blocks(file, tensor, order, kept, place)
        else:
            minus = 1 if form.plus_one and tensor.name.endswith("norm.weight") else 0
            weight = torch.cat([(rows - minus).to(dtype) for rows in file.values(tensor)]).view(tensor.shape)[order]
            is_finite = bool(weight.isfinite().all())
        if not is_finite:
            raise ConfigError(
                f"the tensor {tensor.name!r} of {str(file.path)!r} holds other than finite numbers",
                fix="fetch it again",
            )
        weights[name] = weight
        progress("convert", done, len(file.tensors))
    return weights


def rotary_order(rows: int, head_dim: int) -> Tensor:
    """Where a file has the rows of q and k, int64 [rows].

    Of one head with head_dim 6, the rows hold dimensions

        GGUF  0 3 1 4 2 5   ->   Hugging Face  0 1 2 3 4 5
    """
    return torch.arange(rows).view(-1, head_dim // 2, 2).transpose(1, 2).flatten()


def _blocks(
    file: GGUFFile, tensor: GGUFTensor, order: Tensor, kept: Mapping[str, BlockFormat], place: Place
) -> tuple[Blocks, bool]:
    """A matrix as it is in the file, its rows in this order, and whether its scales are finite."""
    data, rows = file.bytes_of(tensor), order.numpy()
    made = Blocks.of(kept[tensor.kind.name], cast("Any", tensor.shape), lambda some: torch.from_numpy(data[rows[some]]))
    return replace(made, data=place(made.data)), made.is_finite
