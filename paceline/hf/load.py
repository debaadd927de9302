"""Opens checkpoints: device and dtype, weights, tokenizer, and refusals of what cannot be decoded."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from ..errors import ConfigError, IncompatibleModels
from ..kernels.library import library
from ..kernels.packing import Blocks
from ..quant.file_arena import ExpertsIn, expert_arena, no_experts
from ..quant.packed import WeightArena
from ..system.turns import SHARED
from .checkpoint import (
    CONFIG,
    WEIGHTS,
    check_config,
    check_folder,
    check_layers,
    check_loaded_weights,
    check_model_size,
    local_folder,
    on_meta,
    quietly,
    read_headers,
    read_tensors,
    refused,
    weight_files,
)
from .describe import is_described
from .described import EXPERTS, DescribedModel, outlined
from .expert_files import by_expert, check_experts, holds_blocks
from .fingerprint import note_rounded
from .four_bits import UnlikeBlocks
from .gguf.file import SUFFIX
from .gguf.load import open_gguf
from .gguf.tokens import open_gguf_tokenizer
from .mtp import find_mtp
from .pooling import is_encoder, lacks_head
from .quantized import check_dtype, check_quantization, is_quantized, rounded_layers
from .rotary import ropes_of
from .vision import is_vlm

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.processing_utils import ProcessorMixin

_LOG = logging.getLogger("paceline")
_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2}  # of the numbers of a file
KV_CACHE = "cache" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else "past_key_values"
"""The argument of a model of transformers that takes its KV cache."""
STATELESS = frozenset({"mlp", "moe"})
RECURRENT = frozenset({"conv", "hybrid", "hybrid_sliding", "linear_attention", "mamba"})
"""Kinds of layers with a state, by their names in `layer_types`."""
WINDOWS = ("sliding_attention", "chunked_attention")
"""Kinds of layers that see a part of the text."""
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
"""Kinds of models that draft for another one, and cannot read a text by themselves."""
_DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64", "half", "float")}


def chosen_device(device: str | torch.device | None) -> torch.device:
    """The device; None means CUDA if available. Raises `ConfigError` for a device that does not exist."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"unknown device {device!r}", expected="for example cpu, cuda or cuda:1") from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"there is no device {device!r}", got=f"{torch.cuda.device_count()} CUDA devices", fix="use cpu"
        )
    with refused(f"the device {device!r} cannot be used here", fix="use cpu"):
        torch.zeros(1, device=place).item()  # fails on devices that hold shapes and no numbers
    return place


def multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """False iff the device is a CPU without instructions for products in this 16-bit dtype."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    which = "bf16" if dtype is torch.bfloat16 else "fp16"
    return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{which}_supported")())


def usual_dtype(config: PretrainedConfig, device: torch.device) -> torch.dtype | None:
    """The default dtype of a model: None for the checkpoint's, or float32 if the CPU has no instructions for it.

    Models with native passes keep 16 bits, which are widened in registers. Torch needs float32: on two AVX2 cores
    `generate` with SmolLM2-135M took 55 s in bfloat16 and 21 s in float32.
    """
    text = config.get_text_config()
    stored = config.dtype or text.dtype
    native = device.type == "cpu" and text is config and is_described(text) and library() is not None
    return None if not isinstance(stored, torch.dtype) or native or multiplies(stored, device) else torch.float32


def dtype_of(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """None for None and "auto": see `usual_dtype`. Raises `ConfigError` for an unknown name."""
    if dtype is None or dtype == "auto":
        return None
    known = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if known not in _DTYPES.values():
        raise ConfigError(f"unknown dtype {dtype!r}", expected="auto, " + ", ".join(_DTYPES))
    return known


@quietly()
def open_checkpoint(
    name_or_path: str,
    dtype: str | torch.dtype | None,
    device: str | torch.device | None,
    trust_remote_code: bool,
    tokenizer: PreTrainedTokenizerBase | None = None,
    hub: Mapping[str, Any] = MappingProxyType({}),
    packs: bool = False,
    experts_in: ExpertsIn | None = None,
) -> tuple["PreTrainedModel | DescribedModel", PreTrainedTokenizerBase | None, "ProcessorMixin | None"]:
    """A text model with its tokenizer, or a vision-language model with its processor; see `load_model` for errors.

    name_or_path: a folder or hub id, or a GGUF file.
    packs: read weights straight into the form of the kernels of a CPU, and blocks of a GGUF file into that of any
        device, where there are some for the model. Other models are made by transformers.
    experts_in: where packed experts lie, see `ExpertsIn`.
    """
    place, kind = chosen_device(device), dtype_of(dtype)
    if name_or_path.endswith(SUFFIX):
        if (revision := hub.get("revision")) is not None:
            raise ConfigError("a file has no revision", got=f"revision={revision!r}", fix="leave it out")
        path, dtypes = Path(name_or_path), lambda config: kind or usual_dtype(config, place)
        options = {"packs": packs, "keeps_blocks": kind is None, "device": place, "experts_in": experts_in}
        model, tokenizer = open_gguf(path, dtypes, tokenizer, **options)
        return _placed(name_or_path, model, place), tokenizer, None
    packs = packs and place.type == "cpu"
    folder = local_folder(name_or_path, **hub)
    check_folder(folder)
    files = weight_files(folder)
    stored = read_headers(files)
    check_layers(folder, len(stored))
    own = {"trust_remote_code": trust_remote_code}
    with refused(f"{CONFIG} of {name_or_path!r} cannot be used", fix="fetch the model again"):
        config = AutoConfig.from_pretrained(folder, **own)
        # A checkpoint may name kernels of a hub, which are code; passes are routed through ours anyway.
        config._attn_implementation = config._experts_implementation = None
        sees, is_pair = is_vlm(config), bool(config.is_encoder_decoder)
    if is_encoder(config) or is_pair or not (sees or trust_remote_code or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING):
        raise _not_causal(name_or_path, config)
    check_config(name_or_path, config)
    if not sees and lacks_head(config, stored):
        config.tie_word_embeddings = config.lacks_head = True
    beside = mtp.roots if (mtp := find_mtp(config.get_text_config().num_hidden_layers, stored)) else ()
    stored = {key: tensor for key, tensor in stored.items() if not key.startswith(beside)}
    came_rounded = is_quantized(config)
    apart = by_expert(config.model_type, stored) if packs else stored
    check_experts(name_or_path, config.get_text_config(), apart)
    rounded, in_blocks = rounded_layers(config, apart) if packs else None, holds_blocks(apart)
    if rounded is None and not in_blocks:
        check_quantization(name_or_path, config)
    check_layer_types(config)
    if not files:
        raise ConfigError(
            f"the weights of {name_or_path!r} cannot be read",
            got="only " + ", ".join(sorted(file.name for file in folder.iterdir())[:8]),
            expected=f"{WEIGHTS}, or {WEIGHTS}.index.json and what it names: other formats can run code when read",
        )
    wanted, unlike = kind or usual_dtype(config, place), ""
    unreadable = partial(
        refused,
        f"the weights of {name_or_path!r} cannot be read",
        "complete *.safetensors files that match config.json",
        "fetch the model again",
    )
    if packs and (rounded or in_blocks or not came_rounded):
        held = rounded.outline(apart) if rounded else apart
        if (described := outlined(config, wanted or config.dtype, held, rounded is not None)) is not None:
            read, shapes = partial(read_tensors, apart), described.shapes
            sizes = {name: prod(tensor.shape) * described.dtype.itemsize for name, tensor in held.items()}
            if rounded or in_blocks:  # which take as much as in the files
                sizes = {name: prod(tensor.shape) * _BYTES.get(tensor.dtype, 1) for name, tensor in stored.items()}
            of_experts = sum(size for name, size in sizes.items() if EXPERTS in name)
            described.experts_place = expert_arena(folder.name, experts_in, sum(sizes.values()), of_experts)
            try:
                with unreadable():
                    weights = rounded.weights(apart, read, shapes) if rounded else read(shapes)
                    described.take(_in_arenas(weights, described.place_of))
                    described.generation_config = generation_config_of(folder)
                note_rounded(described, came_rounded)
                return described, tokenizer or load_tokenizer(folder, trust_remote_code), None
            except UnlikeBlocks as error:
                unlike, described = error.what, None
        check_quantization(name_or_path, config, unlike)
        if unlike:
            _LOG.warning("%s: blocks cannot hold %s; transformers reads the model.", name_or_path, unlike)
    if experts_in == "disk":
        raise no_experts(folder.name)
    auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    check_model_size(name_or_path, partial(on_meta, auto.from_config, config, **own), config, stored)
    with unreadable(), SHARED.taken():
        model, loaded = auto.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
            folder,
            config=config,
            dtype=wanted or "auto",
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # named below
            output_loading_info=True,
            **own,
        )
    check_loaded_weights(name_or_path, model, loaded, stored, beside)
    check_dtype(name_or_path, model, kind)
    note_rounded(model, came_rounded)
    model = _placed(name_or_path, model, place)
    if sees:
        from .processors import load_processor  # with transformers' modelling code

        return model, tokenizer, load_processor(folder, config, trust_remote_code)
    return model, tokenizer or load_tokenizer(folder, trust_remote_code), None


def _in_arenas(weights: Iterable[tuple[str, Any]], place_of: Callable[[str], WeightArena]) -> Iterator[tuple[str, Any]]:
    """Weights, of which blocks are moved to where those of their layer go: what reads them has no arena."""
    for name, weight in weights:
        yield name, replace(weight, data=place_of(name)(weight.data)) if isinstance(weight, Blocks) else weight


def generation_config_of(folder: Path) -> GenerationConfig:
    """As transformers finds it: old checkpoints have it in their config.json."""
    try:
        return GenerationConfig.from_pretrained(folder)
    except OSError:
        return GenerationConfig.from_pretrained(folder, config_file_name=CONFIG, _from_model_config=True)


def _placed(
    name: str, model: "PreTrainedModel | DescribedModel", place: torch.device
) -> "PreTrainedModel | DescribedModel":
    with refused(f"{name!r} does not fit on {place}", fix="use another device"):
        return model.to(place).requires_grad_(False)  # pyright: ignore[reportArgumentType]


@quietly()
def load_tokenizer(folder: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, hub id or GGUF file. Raises `ConfigError`."""
    if str(folder).endswith(SUFFIX):
        return open_gguf_tokenizer(Path(folder))
    place = local_folder(str(folder), weights=False)
    with refused(
        f"{str(folder)!r} has no usable tokenizer", fix="put its tokenizer files in that folder, or pass tokenizer=..."
    ):
        return AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)


def check_architecture(name: str, model: "PreTrainedModel | DescribedModel") -> None:
    """Raise `IncompatibleModels` for a model that cannot be decoded in trees by its kind."""
    if model.config.is_encoder_decoder or model.get_output_embeddings() is None:
        raise _not_causal(name, model.config)
    if model.config.model_type in ASSISTANTS:
        fix = "draft with it: --drafter head:FOLDER, beside the model it was trained for"
        raise IncompatibleModels(f"{name!r} cannot decode by itself", got=model.config.model_type, fix=fix)
    config = model.config.get_text_config()
    check_layer_types(config)
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        raise IncompatibleModels(
            f"{config.model_type} uses ALiBi, whose biases follow columns and not tree positions",
            expected="a model with rotary or learned positions",
        )


def check_layer_types(config: Any) -> None:
    """Raise `IncompatibleModels` for layers whose cache cannot be cut back to the accepted tokens."""
    text = config.get_text_config()
    for kind in getattr(text, "layer_types", None) or []:
        if kind not in ("full_attention", *WINDOWS, *STATELESS, *RECURRENT):
            raise cannot_roll_back(text.model_type, f"{kind} layers")


def is_recurrent(model: Any) -> bool:
    """Whether some layers have a state in place of columns, by what transformers says of it."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or []
    return getattr(model, "_is_stateful", False) or not RECURRENT.isdisjoint(kinds)


def _not_causal(name: str, config: Any) -> IncompatibleModels:
    return IncompatibleModels(
        f"{name!r} is not a causal language model",
        got=f"model type {config.model_type!r}",
        expected="a decoder-only model that AutoModelForCausalLM loads",
    )


def cannot_roll_back(model_type: str, kind: str) -> IncompatibleModels:
    """The error for layers that this package cannot make forget."""
    return IncompatibleModels(
        f"{model_type} cannot forget rejected tokens",
        got=kind,
        expected="attention over whole columns, or recurrent layers that keep their states in the cache",
        fix="decode it with plain transformers",
    )


def context_of(config: Any) -> int:
    """Longest sequence; capped where positions are rescaled by length, since a pass would rescale all its rows."""
    context = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 1 << 20
    for rope in ropes_of(config):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            original = rope.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None) or context
            context = min(context, int(original))
    return int(context)


def eos_ids_of(model: "PreTrainedModel | DescribedModel") -> frozenset[int]:
    """Tokens that end an answer."""
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    eos = eos if eos is not None else getattr(model.config.get_text_config(), "eos_token_id", None)
    return frozenset([eos] if isinstance(eos, int) else eos or [])
