"""Reads a GGUF file as a transformers model and tokenizer, as if from a Hugging Face folder.

Quantised weights become bfloat16. An unknown tensor, or an unknown entry about the layers, is an error, since ignoring
it would give another model.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from tokenizers import Regex, normalizers, pre_tokenizers
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.initialization import no_init_weights
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..errors import ConfigError, IncompatibleModels
from ..system.files import Progress, read_json, to_json, write_text
from .checkpoint import Stored, check_config, check_loaded_weights, check_model_size, quietly, refused
from .gguf_file import GGUFFile, GGUFTensor, read_gguf

_LOG = logging.getLogger("paceline")


@dataclass(frozen=True)
class _Form:
    """How files of an architecture differ from the model in transformers.

    fields: entries of the metadata beside those that all have, by name in the config.
    interleaved: the rows of q and k lie in rotary pairs. plus_one: norms hold 1 + their weight.
    """

    model_type: str
    fields: dict[str, str] = field(default_factory=dict[str, str])
    interleaved: bool = False
    plus_one: bool = False


_WINDOW = {"attention.sliding_window": "sliding_window"}
_CAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
FORMS: Mapping[str, _Form] = {
    "llama": _Form("llama", interleaved=True),
    "qwen2": _Form("qwen2"),
    "qwen3": _Form("qwen3"),
    "phi3": _Form("phi3", _WINDOW),
    "gemma": _Form("gemma", plus_one=True),
    "gemma2": _Form("gemma2", _WINDOW | _CAPS, plus_one=True),
    "gemma3": _Form("gemma3_text", _WINDOW, plus_one=True),
}
"""The architectures that are read, by llama.cpp's name."""
_FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_READ = {"vocab_size", "attention.value_length", "attention.sliding_window_pattern", "rope.dimension_count"}
_READ |= {"rope.freq_base", "rope.freq_base_swa"}
_READ |= {f"rope.scaling.{name}" for name in ("type", "factor", "original_context_length", "finetuned")}
_WIDEST = {("gemma2", 46), ("gemma3", 62)}  # those of 27B scale attention by the hidden size of a head, not by its own
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_ROPE_FACTORS = "rope_freqs.weight"
_CONTROL, _ROLES = 3, {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
_ENDS_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
_DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _BYTES])


def _words(digits: str) -> pre_tokenizers.PreTokenizer:
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_WORDS % digits), "isolated"), whole])


_SPLITS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: _BYTES,
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), lambda: _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe"), lambda: _words("{1,3}")),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), lambda: _words("")),
}
"""How text is split before byte pairs are merged, by llama.cpp's name. The merges were learnt on such pieces."""


def open_gguf(
    path: Path,
    dtype: Callable[[PretrainedConfig], torch.dtype | None],
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress = lambda *_: None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of a GGUF file on the CPU, and its tokenizer.

    dtype: what the model is made in, None: the file's own dtype, or bfloat16 where it is quantised.
    tokenizer: in place of the file's.

    Raises `ConfigError` for what is no whole GGUF file of a language model, and for entries that are not understood;
    `IncompatibleModels` for other architectures.
    """
    file = read_gguf(path)
    _check_kind(file)
    with refused(f"{str(path)!r} does not describe a model", "the metadata of a language model", "fetch it again"):
        config = _config(file)
    check_config(str(path), config)
    kind = _class_of(config)
    check_model_size(
        str(path), AutoModelForCausalLM, config, False, {one.name: Stored("F32", one.shape) for one in file.tensors}
    )
    tokenizer = tokenizer or gguf_tokenizer(file)
    wanted = dtype(config) or file.dtype
    if file.formats:
        _LOG.warning("%s: %s weights become %s.", path.name, ", ".join(file.formats), str(wanted).split(".")[1])
    with refused(f"the weights in {str(path)!r} cannot be read", fix="fetch it again"):
        weights = _weights(file, kind, config, wanted, progress)
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


def _config(file: GGUFFile) -> PretrainedConfig:
    form, prefix = FORMS[file.architecture], f"{file.architecture}."
    about = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    fields = _FIELDS | form.fields
    if unknown := about.keys() - fields.keys() - _READ:
        _unknown(file, f"{prefix}{min(unknown)} {about[min(unknown)]!r}")
    given: dict[str, Any] = {fields[key]: _decimal(value) for key, value in about.items() if key in fields}
    names = {tensor.name: tensor for tensor in file.tensors}
    heads, layers = given["num_attention_heads"], given["num_hidden_layers"]
    if layers > len(names):
        _unknown(file, f"{layers:,} layers", f"at most {len(names):,}, the number of tensors")
    plain = AutoConfig.for_model(form.model_type)
    head_dim = given.setdefault("head_dim", given["hidden_size"] // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if about.get(key, head_dim) != head_dim:
            _unknown(file, f"{prefix}{key} {about[key]}", f"{head_dim}, as of keys")
    if given.get("sliding_window") == 0:  # for none
        given["sliding_window"] = None
    if (pattern := about.get("attention.sliding_window_pattern")) is not None:
        slides = [bool((i + 1) % pattern) for i in range(layers)] if isinstance(pattern, int) else pattern
        given["layer_types"] = ["sliding_attention" if one else "full_attention" for one in slides]
    if file.architecture in ("gemma2", "gemma3"):
        wide = (file.architecture, layers) in _WIDEST
        given["query_pre_attn_scalar"] = given["hidden_size"] // heads if wide else head_dim
    if not hasattr(plain, "head_dim") and head_dim == given["hidden_size"] // heads:
        del given["head_dim"]  # as in the checkpoints of these families
    special = {role: file.metadata.get(f"tokenizer.ggml.{name}_token_id") for role, name in _ROLES.items()}
    config = AutoConfig.for_model(
        form.model_type,
        **given,
        vocab_size=names["token_embd.weight"].shape[0],  # some files pad it beyond their tokens
        tie_word_embeddings="output.weight" not in names,
        bos_token_id=special["bos"],
        eos_token_id=_ends(file.metadata),
        pad_token_id=special["pad"],
        dtype=file.dtype,
        architectures=[_class_of(plain).__name__],
    )
    _set_rope(file, config, about, names.get(_ROPE_FACTORS))
    return config


def _class_of(config: PretrainedConfig) -> Any:
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def _decimal(value: Any) -> Any:
    """Kept in 32 bits, 1e-5 reads back as 9.9999997e-06: the shortest decimal is the one that was meant."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _set_rope(file: GGUFFile, config: Any, about: Mapping[str, Any], factors: GGUFTensor | None) -> None:
    kind, base = about.get("rope.scaling.type", "none"), _decimal(about.get("rope.freq_base", 10_000.0))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if factors is not None:  # of each frequency: how Llama 3.1 and its successors reach further
        (expected,) = file.values(factors)
        factor = round(float(expected.max()), 3)
        config.rope_parameters = rope = rope | _LLAMA3 | {"rope_type": "llama3", "factor": factor}
        plain = base ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        if factors.shape != scaled.shape or not torch.allclose(plain / scaled, expected[0], rtol=1e-4):
            _unknown(file, _ROPE_FACTORS, "the factors of Llama 3")
    elif kind == "linear":
        rope |= {"rope_type": "linear", "factor": _decimal(about["rope.scaling.factor"])}
    elif kind != "none":
        _unknown(file, f"rope.scaling.type {kind!r}", "none or linear")
    if file.architecture == "gemma3":
        local = _decimal(about.get("rope.freq_base_swa", 10_000.0))
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": local}}
    config.rope_parameters = rope


def _ends(metadata: Mapping[str, Any]) -> int | list[int] | None:
    """The tokens that end an answer. Older files leave out the end of a turn, which is then known by its text."""
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, types = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.token_type", [])
    ends += [tokens.index(one) for one in _ENDS_OF_TURN if one in tokens and types[tokens.index(one)] == _CONTROL]
    found = [one for one in dict.fromkeys(ends) if one is not None]
    return found[0] if len(found) == 1 else found or None


def _weights(
    file: GGUFFile, kind: Any, config: PretrainedConfig, dtype: torch.dtype, progress: Progress
) -> dict[str, Tensor]:
    """Every tensor in `dtype` under its name in transformers. Raises `ConfigError` for one that has none."""
    form = FORMS[file.architecture]
    with torch.device("meta"), no_init_weights():
        ours = kind(config).state_dict()
    (number,) = [number for number, name in MODEL_ARCH_NAMES.items() if name == file.architecture]
    theirs = get_tensor_name_map(number, config.num_hidden_layers)
    names: dict[str, str] = {}
    for name in ours:
        stem, _, leaf = name.rpartition(".")
        names[f"{theirs.get_name(stem)}.{leaf}"] = name
    weights: dict[str, Tensor] = {}
    for done, tensor in enumerate(file.tensors, start=1):
        if tensor.name == _ROPE_FACTORS:  # read by the config
            continue
        if tensor.name not in names:
            _unknown(file, f"a tensor {tensor.name!r}", f"those of {file.architecture}")
        name, plus_one = names[tensor.name], form.plus_one and tensor.name.endswith("norm.weight")
        pieces = [(rows - 1 if plus_one else rows).to(dtype) for rows in file.values(tensor)]
        weight = torch.cat(pieces).view(tensor.shape)
        if form.interleaved and name.endswith(("q_proj.weight", "k_proj.weight")):
            # Of one head with head_dim 6, the rows hold dimensions
            #     GGUF  0 3 1 4 2 5   ->   Hugging Face  0 1 2 3 4 5
            pairs = weight.unflatten(0, (-1, config.head_dim // 2, 2))
            weight = pairs.transpose(1, 2).reshape(weight.shape)
        weights[name] = weight
        progress("convert", done, len(file.tensors))
    return weights


def gguf_tokenizer(file: GGUFFile) -> PreTrainedTokenizerBase:
    """The tokenizer of a file, with its chat template. Raises `ConfigError` for one that is not known."""
    kind, split = (file.metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if kind not in ("gpt2", "llama") or (kind == "gpt2" and split not in _SPLITS):
        raise ConfigError(
            f"the tokenizer of {str(file.path)!r} is not known", got=f"{kind}, {split}",
            expected="llama, or gpt2 with one of " + ", ".join(_SPLITS),
            fix="pass tokenizer=..., the folder or hub id of the original model",
        )  # fmt: skip
    with refused(f"{str(file.path)!r} has no usable tokenizer", fix="pass tokenizer=..., its folder or hub id"):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            file.path.parent,
            gguf_file=file.path.name,
            model_max_length=file.metadata[f"{file.architecture}.context_length"],
            model_input_names=["input_ids", "attention_mask"],
            clean_up_tokenization_spaces=False,
            # transformers reads this from 5.23 on; llama.cpp adds the token to a "llama" vocabulary that does not say
            add_bos_token=file.metadata.get("tokenizer.ggml.add_bos_token", kind == "llama"),
        )
        if kind == "gpt2":
            tokenizer.backend_tokenizer.pre_tokenizer = _SPLITS[str(split)]()
            if split == "qwen2":
                tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer
