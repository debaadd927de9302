"""Reads a GGUF file as a transformers model and tokenizer, as if from a Hugging Face folder.

Matrices in blocks stay as they are where kernels read them; other quantised weights become bfloat16. An unknown tensor,
or an unknown entry about the layers, is an error, since ignoring it would give another model.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ...errors import ConfigError, IncompatibleModels
from ...kernels.library import BlockFormat
from ...quant.file_arena import ExpertsIn, expert_arena, no_experts
from ...system.files import Progress, read_json, to_json, write_text
from ...system.turns import SHARED
from ..checkpoint import Stored, check_config, check_loaded_weights, check_model_size, on_meta, quietly, refused
from ..described import CPU, DescribedModel, has_kernels
from ..fingerprint import note_rounded
from .config import FORMS, class_of, config_of
from .file import GGUFFile, read_gguf
from .tokens import check_tokens, gguf_tokenizer
from .weights import read_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOG = logging.getLogger("paceline")


def open_gguf(
    path: Path,
    dtype: Callable[[PretrainedConfig], torch.dtype | None],
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress = lambda *_: None,
    packs: bool = False,
    keeps_blocks: bool = True,
    device: torch.device = CPU,
    experts_in: ExpertsIn | None = None,
) -> tuple["PreTrainedModel | DescribedModel", PreTrainedTokenizerBase]:
    """The model of a GGUF file, and its tokenizer.

    dtype: what the model is made in, None: the file's own dtype, or bfloat16 where it is quantised.
    tokenizer: in place of the file's.
    packs: put weights into the form of the kernels, where there are some for this architecture.
    keeps_blocks: then leave quantised matrices in their blocks.
    device: of whose kernels weights are packed for. Other models are on the CPU.
    experts_in: where packed experts lie, see `ExpertsIn`.

    Raises `ConfigError` for what is no whole GGUF file of a language model, and for entries that are not understood;
    `IncompatibleModels` for other architectures.
    """
    file = read_gguf(path)
    _check_kind(file)
    check_tokens(file)
    with refused(f"{str(path)!r} does not describe a model", "the metadata of a language model", "fetch it again"):
        config = config_of(file)
    check_config(str(path), config)
    wanted = dtype(config) or file.dtype
    is_packed = packs and has_kernels(config, wanted, device)
    if experts_in == "disk" and not (is_packed and device.type == "cpu"):
        raise no_experts(path.name)
    held = {tensor.name: Stored("F32", tensor.shape) for tensor in file.tensors}
    build = partial(DescribedModel, config, wanted, device) if is_packed else partial(on_meta, class_of(config), config)
    built = check_model_size(str(path), build, config, held)
    tokenizer = tokenizer or gguf_tokenizer(file)
    kept = BlockFormat.__members__ if is_packed and keeps_blocks else {}
    if changed := [form for form in file.formats if form not in kept]:
        _LOG.warning("%s: %s weights become %s.", path.name, ", ".join(changed), str(wanted).split(".")[1])
    with refused(f"the weights in {str(path)!r} cannot be read", fix="fetch it again"):
        shapes = {name: tuple(tensor.shape) for name, tensor in built.state_dict().items()}
        read = partial(read_weights, file, config, shapes, wanted, progress, kept, device)
        if isinstance(built, DescribedModel):
            if device.type == "cpu":
                sizes = {tensor.name: tensor.num_bytes for tensor in file.tensors}
                of_experts = sum(size for name, size in sizes.items() if "_exps." in name)
                built.experts_place = expert_arena(path.name, experts_in, sum(sizes.values()), of_experts)
            model, loaded = built, built.take(read(built.place_of))
        else:
            weights = dict(read())
            told = {"ignore_mismatched_sizes": True, "output_loading_info": True}
            with SHARED.taken():
                model, loaded = type(built).from_pretrained(
                    None, config=config, state_dict=weights, dtype=wanted, **told
                )
    check_loaded_weights(str(path), model, loaded, {})
    note_rounded(model, bool(file.formats))
    return model, tokenizer


@quietly()
def convert_gguf(path: Path, folder: Path, progress: Progress = lambda *_: None) -> None:
    """Write config, weights and tokenizer of a GGUF file into `folder`, from which transformers loads them unaided.

    Raises as `open_gguf`, and OSError when the disk refuses.
    """
    model, tokenizer = open_gguf(path, lambda _: None, progress=progress)
    cast("PreTrainedModel", model).save_pretrained(folder)
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
    kind = metadata.get("general.type", "model")
    if file.architecture == "clip" or kind != "model":
        description = "a vision projector" if file.architecture == "clip" else f"of type {kind!r}"
        raise ConfigError(
            f"{name!r} is {description}", expected="a language model",
            fix="name the file of the language model, and this one with --mmproj",
        )  # fmt: skip
    if f"{file.architecture}.target_layers" in metadata:  # as heads over the states of a model have
        raise ConfigError(f"{name!r} is a head that drafts", expected="a model", fix=f"--drafter head:{name}")
    if file.architecture == "qwen2vl":
        raise ConfigError(f"{name!r} is half of a model that sees", fix="name the other half, too: --mmproj FILE")
    if file.architecture not in FORMS:
        raise IncompatibleModels(
            f"{name!r} is of an architecture that is not read from GGUF", got=file.architecture,
            expected="one of " + ", ".join(FORMS), fix="give the Hugging Face folder or hub id of the same model",
        )  # fmt: skip
