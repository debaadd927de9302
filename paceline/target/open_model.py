"""What is given to `LLM` as a model: a name or a folder, a GGUF file, or a model in memory."""

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from ..errors import ConfigError
from ..hf.classes import PreTrainedModel, ProcessorMixin
from ..hf.load import load_tokenizer
from ..quant.file_arena import ExpertsIn
from ..zoo import resolve
from .load import load_model, wrap_model
from .loaded import LoadedModel


def open_model(
    model: str | Path | PreTrainedModel | LoadedModel,
    dtype: str | torch.dtype | None,
    device: str | torch.device | None,
    tokenizer: PreTrainedTokenizerBase | str | Path | None,
    processor: ProcessorMixin | None,
    mmproj: str | Path | None,
    hub: Mapping[str, object],
    trust_remote_code: bool,
    experts_in: ExpertsIn | None,
) -> LoadedModel:
    """The model, loaded. The arguments are those of `LLM`; hub: revision, token and cache_dir.

    Raises what `load_model` and `wrap_model` raise, and `ConfigError` for arguments that this kind of model does not
    take.
    """
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(resolve(tokenizer), trust_remote_code)
    if not isinstance(model, str | Path):
        _refuse(
            {"dtype": dtype, "device": device, **hub, "mmproj": mmproj, "experts_in": experts_in},
            "is for models that are loaded by name",
        )
        if not isinstance(model, LoadedModel):
            return wrap_model(model, tokenizer, processor=processor)
        if not (tokenizer is processor is None):
            raise ConfigError("a LoadedModel has its tokenizer and processor", fix="give them to wrap_model")
        return model
    if processor is not None:
        raise ConfigError("a model that is loaded by name brings its processor", fix="leave processor out")
    place = resolve(model, hub["cache_dir"])  # type: ignore[arg-type]
    if mmproj is None:
        return load_model(place, dtype, device, trust_remote_code, tokenizer, hub, experts_in)
    _refuse({"experts_in": experts_in}, "is for models of text")
    from ..hf.gguf.vision import open_gguf_vision

    unread = {**hub, "trust_remote_code": (trust_remote_code and tokenizer is None) or None}
    _refuse(unread, "is for hub ids and folders, and mmproj for GGUF files")
    vision_model, processor = open_gguf_vision(Path(place), Path(mmproj), dtype, device, tokenizer)
    return wrap_model(vision_model, name=Path(place).name, processor=processor)


def _refuse(options: Mapping[str, object], reason: str) -> None:
    if unread := [name for name, value in options.items() if value is not None]:
        raise ConfigError(f"{unread[0]} {reason}", fix=f"leave {unread[0]} out")
