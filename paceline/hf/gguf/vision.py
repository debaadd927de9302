"""A GGUF text model and its vision projector, a file of its own (`mmproj`), as one model of transformers.

Which family it is says the type of the projector. Preprocessing is that of transformers' family.
"""

import logging
from collections.abc import Mapping
from math import isclose
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.processing_utils import ProcessorMixin
from transformers.utils.import_utils import is_torchvision_available

from ...errors import ConfigError, IncompatibleModels
from ...schema import brief, validate
from ...system.turns import SHARED
from ..checkpoint import check_config, check_loaded_weights, on_meta, quietly, refused
from ..fingerprint import note_rounded
from ..load import chosen_device, dtype_of, usual_dtype
from ..processors import without_video
from .config import class_of, config_of, not_understood, shortest_decimal
from .file import GGUFFile, read_gguf
from .projectors import ENTRIES, GELU, IDS, OPTIONAL, PLAIN, PREFIX, PROJECTORS, SILU, TYPES, Projector, Said
from .tokens import check_tokens, gguf_tokenizer
from .weights import read_weights

_LOG = logging.getLogger("paceline")


@quietly()
def open_gguf_vision(
    path: Path,
    mmproj: Path,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> tuple[PreTrainedModel, ProcessorMixin]:
    """The vision-language model of two GGUF files, and its processor. Others as in `target.load_model`.

    Raises `ConfigError` for files that cannot be read or are not understood, `IncompatibleModels` for projectors that
    are not known, and for two files that are no pair.
    """
    place, requested = chosen_device(device), dtype_of(dtype)
    text, seen = read_gguf(path), read_gguf(mmproj)
    check_tokens(text)
    projector, about = _described(seen)
    if text.architecture not in projector.text:
        raise _no_pair(path, mmproj, f"a text model of {text.architecture}", " or ".join(projector.text))
    tokenizer = tokenizer or gguf_tokenizer(text)
    tokens = {role: _id_of(path, tokenizer, token) for role, token in projector.tokens.items()}
    with refused(f"{str(path)!r} does not describe a model", "the metadata of a language model", "fetch it again"):
        inner = config_of(text)
        vision, whole = projector.config(about)
        ids = {IDS[role]: token_id for role, token_id in tokens.items() if role in IDS}
        config = AutoConfig.for_model(
            projector.model_type, text_config=inner.to_dict(), vision_config=vision, **whole, **ids,
            tie_word_embeddings=inner.tie_word_embeddings, dtype=text.dtype,
        )  # fmt: skip
    if inner.hidden_size != about["projection_dim"]:
        raise _no_pair(path, mmproj, f"a projection to {about['projection_dim']}", f"{inner.hidden_size}, of the text")
    check_config(str(path), config)
    with refused(f"{str(mmproj)!r} does not describe a vision tower", fix="fetch it again"):
        kind: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
        shell = on_meta(kind, config)
    wanted = requested or usual_dtype(config, place) or text.dtype
    if text.formats:
        _LOG.warning("%s: %s weights become %s.", path.name, ", ".join(text.formats), str(wanted).split(".")[1])
    with refused(f"the weights in {str(path)!r} or {str(mmproj)!r} cannot be read", fix="fetch them again"):
        half = "text_model" if hasattr(shell.base_model, "text_model") else "language_model"
        shapes = {name: tuple(tensor.shape) for name, tensor in on_meta(class_of(inner), inner).state_dict().items()}
        held = read_weights(text, inner, shapes, wanted, lambda *_: None, {})
        weights = {name.replace("model.", f"model.{half}.", 1): tensor for name, tensor in held}
        weights |= _seen(
            seen, projector, about, {name: tensor.shape for name, tensor in shell.state_dict().items()}, wanted
        )
        told = {"ignore_mismatched_sizes": True, "output_loading_info": True}
        with SHARED.taken():
            model, loaded = kind.from_pretrained(None, config=config, state_dict=weights, dtype=wanted, **told)
    check_loaded_weights(str(mmproj), model, loaded, {})
    model = cast("PreTrainedModel", model.to(place).requires_grad_(False))
    note_rounded(model, bool(text.formats))
    return model, _processor(projector, about, tokenizer)


def _described(file: GGUFFile) -> tuple[Projector, dict[str, Any]]:
    """The projector of a file, and what it says of the tower. Raises an error for what is not known."""
    name, metadata = str(file.path), file.metadata
    if file.architecture != "clip":
        raise ConfigError(
            f"{name!r} is no vision projector", got=f"architecture {file.architecture!r}", expected="clip",
            fix="name the mmproj file of the model",
        )  # fmt: skip
    named = [metadata[key] for key in TYPES if key in metadata] or ["mlp"]  # older files name none
    if named[0] not in PROJECTORS:
        raise IncompatibleModels(
            f"the projector in {name!r} is not known", got=brief(named[0]), expected="one of " + ", ".join(PROJECTORS),
            fix="give the Hugging Face folder of the whole model",
        )  # fmt: skip
    about, names = dict[str, Any](), {tensor.name: tensor.shape for tensor in file.tensors}
    for key, value in metadata.items():
        short = key.removeprefix(PREFIX)
        if not key.startswith("clip.") or key in TYPES or value in PLAIN.get(key, ()):
            continue
        if key in (GELU, SILU):
            about[key] = validate(bool, value, f"{key} of {name!r}")
        elif short not in ENTRIES or short == key:
            not_understood(file, f"{key} {brief(value)}")
        else:
            decimals = (
                [shortest_decimal(number) for number in value] if isinstance(value, list) else shortest_decimal(value)
            )
            about[short] = validate(ENTRIES[short], decimals, f"{key} of {name!r}")
    projector = PROJECTORS[named[0]]
    about["act"] = "silu" if about.pop(SILU, False) else "gelu" if about.pop(GELU, False) else "quick_gelu"
    if about["act"] not in projector.acts:
        not_understood(file, f"the activation {about['act']}", " or ".join(projector.acts))
    if about.get("block_count", 0) > len(names):
        not_understood(file, f"{about['block_count']:,} layers", f"at most {len(names):,}, the number of tensors")
    if projector.out not in names:
        not_understood(file, f"no tensor {projector.out!r}")
    about["projection_dim"] = names[projector.out][-1 if projector.plus_one else 0]  # the entry is the tower's own
    is_qwen = projector.tower != ""
    if missing := ENTRIES.keys() - OPTIONAL - about.keys():
        not_understood(file, f"no {PREFIX}{min(missing)}")
    if not is_qwen and "image_size" not in about:
        not_understood(file, f"no {PREFIX}image_size")
    if is_qwen and not isclose(about["attention.layer_norm_epsilon"], 1e-6, rel_tol=1e-4):
        not_understood(
            file, f"layer_norm_epsilon {about['attention.layer_norm_epsilon']}", "1e-06, as Qwen's tower has"
        )
    return projector, about | {"names": names}


def _seen(
    file: GGUFFile, projector: Projector, about: Said, own: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors of tower and projector under their names in transformers."""
    held = {tensor.name: file.whole(tensor).to(dtype) for tensor in file.tensors}
    for name in [key for key in held if key.endswith(".1") and key.removesuffix(".1") in held]:  # a frame each
        first = name.removesuffix(".1")
        held[first] = torch.stack([held[first], held.pop(name)], 2)
    for name in [key for key in held if ".attn_q." in key and "attn_qkv" in projector.parts]:
        held[name.replace("_q.", "_qkv.")] = torch.cat([held.pop(name.replace("_q.", f"_{part}.")) for part in "qkv"])
    up, width = about["names"].get("v.blk.0.ffn_up.weight", (0,)), about["embedding_length"]
    parts = dict(projector.parts)
    if up[0] == width != up[-1]:  # older files call the matrices by the wrong names
        parts["ffn_up"], parts["ffn_down"] = parts["ffn_down"], parts["ffn_up"]
    tensors: dict[str, Tensor] = {}
    for name, tensor in held.items():
        ours = _ours(name, projector, parts, own)
        if ours is None or own[ours].numel() != tensor.numel():
            not_understood(file, f"a tensor {name!r} of shape {list(tensor.shape)}", f"those of {projector.model_type}")
        tensors[ours] = (tensor - 1 if name == projector.plus_one else tensor).view(own[ours])
    if projector.model_type == "llava":  # transformers makes the norm behind the layers, which nothing reads
        norm = "model.vision_tower.post_layernorm"
        for leaf, value in (("weight", 1.0), ("bias", 0.0)):
            tensors.setdefault(f"{norm}.{leaf}", torch.full(own[f"{norm}.{leaf}"], value, dtype=dtype))
    return tensors


def _ours(name: str, projector: Projector, parts: Mapping[str, str], own: Mapping[str, Any]) -> str | None:
    """The name of a tensor in transformers, of which some are parameters without a module."""
    stem, _, leaf = name.rpartition(".")
    if leaf not in ("weight", "bias"):
        stem, leaf = name, "weight"
    if stem.startswith("v.blk."):
        _, _, layer, part = stem.split(".", 3)
        place = f"model.{projector.layers}.{layer}.{parts.get(part)}"
    else:
        place = f"model.{projector.tower}{projector.whole.get(stem)}"
    return next((path for path in (f"{place}.{leaf}", place, f"{place}_{leaf}") if path in own), None)


def _processor(projector: Projector, about: Said, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    name, options = projector.pixels(about)
    family, of_text = projector.processor(about)
    colours = {"image_mean": about["image_mean"], "image_std": about["image_std"]}
    pillow: Any = getattr(transformers, f"{name}Pil", None)
    kind: Any = getattr(transformers, name) if pillow is None or is_torchvision_available() else pillow
    for role, token in projector.tokens.items():
        setattr(tokenizer, role, token)
        setattr(tokenizer, f"{role}_id", tokenizer.convert_tokens_to_ids(token))
    if projector.model_type == "internvl":
        cast("Any", tokenizer).video_token = "<video>"  # which its processor asks for
    processor_class: Any = without_video(getattr(transformers, family))
    parts = [kind(**options, **colours), tokenizer]
    parts += [None] if "video_processor" in getattr(transformers, family).get_attributes() else []
    return cast("ProcessorMixin", processor_class(*parts, **of_text, chat_template=tokenizer.chat_template))


def _id_of(path: Path, tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    token_id = tokenizer.get_vocab().get(token)
    if token_id is None:
        raise ConfigError(
            f"the tokenizer of {str(path)!r} has no token for images", got=f"no {token!r}",
            expected="the tokenizer of the vision-language model", fix="pass tokenizer=..., its folder or hub id",
        )  # fmt: skip
    return token_id


def _no_pair(path: Path, mmproj: Path, got: str, expected: str) -> IncompatibleModels:
    message = f"{str(mmproj)!r} was made for another text model than {str(path)!r}"
    return IncompatibleModels(message, got=got, expected=expected, fix="name the two files of one model")
