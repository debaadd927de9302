"""Writes a model of transformers as a GGUF file, which `gguf` reads back as the same model.

What a file cannot say, and would therefore change the model, is refused by name: the config is read back from the
metadata, and the tokenizer from the file.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    GGMLQuantizationType,
    GGUFValueType,
    GGUFWriter,
    LlamaFileType,
)
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ...errors import ConfigError, IncompatibleModels
from ...kernels.library import BlockFormat
from ...quant.block_rounding import round_rows
from ...quant.mixes import BlockMix, head_format, layer_format
from ...schema import Positive, brief
from ...system.files import Progress, replacing
from ..checkpoint import local_folder, quietly, read_headers, weight_files
from ..describe import head_dim_of
from ..load import eos_ids_of, open_checkpoint
from .config import BETAS, FORMS, GATING, ROPE_FACTORS, SHARED_SIZE, YARN, config_of, entries_of
from .file import SUFFIX, GGUFFile, GGUFTensor, read_gguf
from .tokens import described, gguf_tokenizer, split_of
from .weights import places_of, rotary_order

if TYPE_CHECKING:
    from transformers import PreTrainedModel
FileWeights: TypeAlias = BlockMix | Literal["bf16", "f16", "f32"]
"""How matrices are stored."""
_PLAIN = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
_TYPES = {"q5_k": "Q5_K_S", "q4_k": "Q4_K_S", "q3_k": "Q3_K_S", "q2_k": "Q2_K_S", "mxfp4": "MXFP4_MOE"}
_ARCHITECTURES = {"mistral": "llama"} | {
    kind: name for name, form in reversed([*FORMS.items()]) for kind in (form.model_type, *form.variants.values())
}
"""llama.cpp's name of each model type; of two, the first in the table."""
_EXACT = ("ffn_gate_inp.weight", "bias")
"""Tensors that llama.cpp wants in float32."""
_PATTERN = "attention.sliding_window_pattern"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_BYTES = re.compile("<0x[0-9A-F]{2}>")
_INERT = {
    "_name_or_path", "architectures", "attention_dropout", "bos_token_id", "chunk_size_feed_forward", "dtype",
    "embd_pdrop", "eos_token_id", "id2label", "initializer_range", "is_encoder_decoder", "label2id",
    "max_window_layers", "model_type", "num_mtp_layers", "num_nextn_predict_layers",
    "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type",
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
class FileTensor:
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

    weights: see `FileWeights`; None: what the checkpoint has, or bf16 where it has several.

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
    architecture = _ARCHITECTURES.get(config.model_type) if processor is None else None
    if architecture is None or tokenizer is None:
        raise IncompatibleModels(
            f"{name_or_path!r} cannot be written as a GGUF file", got=f"model type {config.model_type!r}",
            expected="a language model of " + ", ".join(_ARCHITECTURES),
            fix="convert it with llama.cpp's convert_hf_to_gguf.py",
        )  # fmt: skip
    stored = weights or _stored(name_or_path)
    tensors = list(tensors_of(architecture, model, stored))
    metadata = {"general.name": Path(name_or_path).name, "general.quantization_version": 2}
    metadata["general.file_type"] = _file_type(stored)
    metadata |= layer_entries(architecture, config) | token_entries(tokenizer, model)
    _check_config(name_or_path, config, {"general.architecture": architecture, **metadata}, tensors)
    with replacing(out) as part:
        write_file(part, architecture, metadata, tensors, progress, _bytes)
        _check_tokenizer(name_or_path, part, tokenizer)
    matrices = [tensor.kind.name for tensor in tensors if tensor.values.dim() > 1]
    return Written(out, out.stat().st_size, {name: matrices.count(name) for name in dict.fromkeys(matrices)})


def _stored(name: str) -> str:
    """What the matrices of a model are stored in; what it is loaded in may be wider."""
    if name.endswith(SUFFIX):
        dtype = read_gguf(Path(name)).dtype
        return next(key for key, known in _PLAIN.items() if known is dtype)
    held = read_headers(weight_files(local_folder(name))).values()
    kinds = {header.dtype.lower() for header in held if len(header.shape) > 1}
    return kinds.pop() if len(kinds) == 1 and kinds <= _PLAIN.keys() else "bf16"


def _quantized(name: str, got: str) -> ConfigError:
    return ConfigError(
        f"the weights of {name!r} are quantised already", got=got, expected="weights in bf16, f16 or f32",
        fix="give the original model: rounding twice adds both errors",
    )  # fmt: skip


def _file_type(stored: str) -> int:
    name = "ALL_F32" if stored == "f32" else "MOSTLY_" + _TYPES.get(stored, stored.upper())
    return int(LlamaFileType[name])


def tensors_of(architecture: str, model: "PreTrainedModel", stored: str) -> Iterator[FileTensor]:
    """All tensors under their names in files, matrices in the order of their rows there."""
    form, config, state = FORMS[architecture], cast("Any", model.config), model.state_dict()
    has_experts = any(".experts." in name for name in state)
    for stored_name, (name, part) in places_of(
        architecture, config, {name: tuple(tensor.shape) for name, tensor in state.items()}
    ).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if stored_name.startswith("None."):
            raise IncompatibleModels(
                f"a GGUF file of {architecture} has no place for a tensor", got=name,
                fix="convert it with llama.cpp's convert_hf_to_gguf.py",
            )  # fmt: skip
        values = state[name] if part is None else part(state[name])
        if form.interleaved and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = values[rotary_order(len(values), head_dim_of(config)).argsort()]
        if form.plus_one and stored_name.endswith("norm.weight"):
            values = values.float() + 1
        kind = GGMLQuantizationType.F32
        if values.dim() > 1 and not stored_name.endswith(_EXACT):
            kind = GGMLQuantizationType[_kind(name, values, stored, config, has_experts)]
        yield FileTensor(stored_name, kind, values)
    rope = config.rope_parameters or {}
    if rope.get("rope_type") == "llama3":
        plain = rope["rope_theta"] ** -(torch.arange(0, head_dim_of(config), 2) / head_dim_of(config))
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        yield FileTensor(ROPE_FACTORS, GGMLQuantizationType.F32, plain / scaled)


def _kind(name: str, values: Tensor, stored: str, config: Any, has_experts: bool) -> str:
    if stored in _PLAIN:
        return stored.upper()
    path, inputs, layers = name.removesuffix(".weight"), values.shape[-1], config.num_hidden_layers
    is_head = name == "lm_head.weight" or (name.endswith("embed_tokens.weight") and config.tie_word_embeddings)
    form = head_format(stored, inputs) if is_head else layer_format(stored, path, layers, inputs, has_experts)
    own = {dtype: name.upper() for name, dtype in _PLAIN.items()}
    return form.name if form is not None else own[values.dtype]


def layer_entries(architecture: str, config: Any) -> dict[str, Any]:
    """What a file says of the layers: the entries that `config_of` reads."""
    entries, head_dim = entries_of(architecture), head_dim_of(config)
    about: dict[str, Any] = dict.fromkeys(("attention.value_length", "rope.dimension_count"), head_dim)
    about["vocab_size"] = config.vocab_size
    if FORMS[architecture].partial:
        factor = (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
        about["rope.dimension_count"] = int(head_dim * factor)
    if architecture == "ernie4_5-moe":
        about[SHARED_SIZE] = config.moe_intermediate_size * config.moe_num_shared_experts
    if GATING in entries:
        about[GATING] = get_args(entries[GATING][1])[0]
    for key, (name, kind) in entries.items():
        value = head_dim if name == "head_dim" else getattr(config, name, None) if name else None
        if value is not None:  # llama.cpp takes no integer for a fraction
            about[key] = float(value) if kind is Positive else value
    if _PATTERN in entries and "attention.sliding_window" in about and getattr(config, "layer_types", None):
        about[_PATTERN] = [kind == "sliding_attention" for kind in config.layer_types]
    ropes = config.rope_parameters or {}
    rope = ropes.get("full_attention", ropes)
    about["rope.freq_base"] = float(rope.get("rope_theta", 10_000.0))
    if "sliding_attention" in ropes:
        about["rope.freq_base_swa"] = float(ropes["sliding_attention"]["rope_theta"])
    if (scaled := rope.get("rope_type")) in ("linear", "yarn"):
        about |= {"rope.scaling.type": scaled, "rope.scaling.factor": float(rope["factor"])}
    if scaled == "yarn":
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        about["rope.scaling.original_context_length"] = original
        about |= {key: float(rope[name]) for key, name in BETAS.items() if rope.get(name) is not None}
    return {f"{architecture}.{key}": value for key, value in about.items()}


def token_entries(tokenizer: PreTrainedTokenizerBase, model: "PreTrainedModel") -> dict[str, Any]:
    """The entries of a byte-level tokenizer or of SentencePiece's. Raises `ConfigError` for another one."""
    rows = cast("Any", model.get_input_embeddings()).num_embeddings
    names, added = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))), tokenizer.added_tokens_decoder
    tokens = [*names, *(f"[PAD{i}]" for i in range(len(names), rows))]
    types = [_NORMAL] * len(names) + [_UNUSED] * (rows - len(names))
    for place, token in added.items():
        types[place] = _CONTROL if token.special else _USER_DEFINED
    ends = sorted(eos_ids_of(model), key=lambda token_id: token_id != tokenizer.eos_token_id)
    bare, whole = (tokenizer("a", add_special_tokens=adds).input_ids for adds in (False, True))
    held: dict[str, Any] = {
        "tokens": tokens, "token_type": types, **_splits(tokenizer, tokens, types),
        "bos_token_id": tokenizer.bos_token_id, "padding_token_id": tokenizer.pad_token_id,
        "unknown_token_id": tokenizer.unk_token_id,
        **dict(zip(("eos_token_id", "eot_token_id", "eom_token_id"), ends, strict=False)),
        "add_bos_token": whole[:1] != bare[:1],
    }  # fmt: skip
    template = tokenizer.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    return {f"tokenizer.ggml.{key}": entry for key, entry in held.items() if entry is not None} | (
        {"tokenizer.chat_template": template} if template else {}
    )


def _splits(tokenizer: PreTrainedTokenizerBase, tokens: list[str], types: list[int]) -> dict[str, Any]:
    """How text becomes tokens. Types of pieces that SentencePiece treats in another way are set."""
    model = described(tokenizer).get("model", {})
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model.get("merges", ())]
    if not model.get("byte_fallback"):
        return {"model": "gpt2", "pre": split_of(tokenizer), "merges": [" ".join(pair) for pair in merges]}
    ranks = {left + right: rank for rank, (left, right) in reversed([*enumerate(merges)])}
    for place, token in enumerate(tokens):
        if token == model.get("unk_token"):
            types[place] = _UNKNOWN
        elif _BYTES.fullmatch(token):
            types[place] = _BYTE
    # a piece that no merge makes comes last
    scores = [-float(ranks.get(token, len(merges))) for token in tokens]
    begins = cast("Any", tokenizer).backend_tokenizer.encode("a", add_special_tokens=False).tokens[0] != "a"
    return {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": begins}


def _check_config(name: str, config: Any, metadata: dict[str, Any], tensors: list[FileTensor]) -> None:
    """Raise `IncompatibleModels` where the file would be read as another model."""
    factors = next((tensor.values for tensor in tensors if tensor.name == ROPE_FACTORS), None)
    held = tuple(
        GGUFTensor(Path(name), tensor.name, tuple(tensor.values.shape), tensor.kind, 0, 0) for tensor in tensors
    )
    read, settings = config_of(_Planned(Path(name), metadata, held, factors)).to_dict(), config.to_dict()
    ropes = settings.get("rope_parameters") or {}
    for rope in ropes.values() if "full_attention" in ropes else [ropes]:
        if rope.get("partial_rotary_factor") == 1:  # all of it, as without this entry
            del rope["partial_rotary_factor"]
        if rope.get("rope_type") == "yarn":
            rope |= {name: default for name, default in YARN.items() if rope.get(name) is None}
    differing = [key for key in settings.keys() & read.keys() - _INERT if settings[key] != read[key]]
    differing += ["sliding_window"] if settings.get("sliding_window") and "sliding_window" not in read else []
    if differing:
        key = min(differing)
        raise IncompatibleModels(
            f"a GGUF file cannot describe {name!r}", got=f"{key} {brief(settings[key])}",
            expected=f"{brief(read.get(key))}, as the file would be read",
            fix="convert it with llama.cpp's convert_hf_to_gguf.py",
        )  # fmt: skip


def _check_tokenizer(name: str, path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `ConfigError` where the file's tokenizer reads texts in another way."""
    reader = gguf_tokenizer(read_gguf(path))
    for text in _SAMPLES:
        ids, read = tokenizer(text).input_ids, reader(text).input_ids
        if ids != read:
            raise ConfigError(
                f"a GGUF file cannot describe the tokenizer of {name!r}", got=f"{read} for {text!r}",
                expected=f"{ids}", fix="convert it with llama.cpp's convert_hf_to_gguf.py",
            )  # fmt: skip


def add_entries(writer: GGUFWriter, metadata: Mapping[str, Any]) -> None:
    """Add metadata; the kind of an entry is that of its value."""
    for key, value in metadata.items():
        kind = GGUFValueType.UINT32 if type(value) is int else GGUFValueType.get_type(value)
        inner = GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
        writer.add_key_value(key, value, kind, inner)


def write_file(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: list[FileTensor],
    progress: Progress,
    bytes_of: Callable[[FileTensor], Any],
) -> None:
    """Write a file, one tensor after another. bytes_of: gives the bytes of one, an array of uint8."""
    writer = GGUFWriter(None, architecture)
    add_entries(writer, metadata)
    for tensor in tensors:
        per, num_bytes = GGML_QUANT_SIZES[tensor.kind]
        # The writer takes shapes in elements, but of uint8 in bytes: float32 here says "elements".
        shape, size = tensor.values.shape, tensor.values.numel() // per * num_bytes
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), size, tensor.kind)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for done, tensor in enumerate(tensors, start=1):
        writer.write_tensor_data(bytes_of(tensor))
        progress("convert", done, len(tensors))
    writer.close()


def _bytes(tensor: FileTensor) -> Any:
    kind = tensor.kind.name.lower()
    if kind not in _PLAIN:
        return round_rows(BlockFormat[tensor.kind.name], tensor.values.flatten(0, -2), tensor.name).numpy()
    stored = tensor.values.detach().to(_PLAIN[kind]).contiguous()
    if not stored.isfinite().all():
        raise ConfigError(
            f"the weights {tensor.name!r} cannot be stored in {kind}", got="numbers beyond its range, or not finite",
            fix="use another format",
        )  # fmt: skip
    return stored.view(torch.uint8).numpy()
