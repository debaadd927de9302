"""What the files of a model tell without its weights."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from .checkpoint import check_folder, quietly, refused
from .gguf.config import config_of
from .gguf.file import SUFFIX, read_gguf
from .gguf.tokens import gguf_tokenizer
from .load import chosen_device, dtype_of, generation_config_of, load_tokenizer, usual_dtype
from .vision import is_vlm

if TYPE_CHECKING:
    from transformers.processing_utils import ProcessorMixin


class ModelFiles(NamedTuple):
    """A model but for its weights. processor: of a vision-language model."""

    config: PretrainedConfig
    generation_config: GenerationConfig | None
    dtype: torch.dtype
    tokenizer: PreTrainedTokenizerBase | None
    processor: "ProcessorMixin | None" = None

    @property
    def template(self) -> str:
        """The chat template; "" where there is none."""
        templates = [getattr(owner, "chat_template", None) for owner in (self.processor, self.tokenizer)]
        return next((str(template) for template in templates if template), "")


@quietly()
def read_files(
    place: Path, dtype: str | None = None, device: str | None = None, tokenizer: str | None = None
) -> ModelFiles:
    """Of a folder or a GGUF file, as `load_model` would have it. Raises `ConfigError` for files that cannot be read.

    tokenizer: the folder of another one.
    """
    other = None if tokenizer is None else load_tokenizer(tokenizer)
    with refused(f"{str(place)!r} does not describe a model", fix="fetch the model again"):
        if place.suffix == SUFFIX:
            file, processor = read_gguf(place), None
            config: Any = config_of(file)
            generation, own = GenerationConfig.from_model_config(config), file.dtype
            found = other or gguf_tokenizer(file)
        else:
            check_folder(place)
            config, processor = AutoConfig.from_pretrained(place, trust_remote_code=False), None
            if is_vlm(config):
                from .processors import load_processor  # with transformers' modelling code

                processor = load_processor(place, config)
            generation, own = generation_config_of(place), config.dtype or torch.float32
            found = other or getattr(processor, "tokenizer", None) or load_tokenizer(place)
    kind = dtype_of(dtype) or usual_dtype(config, chosen_device(device)) or own
    return ModelFiles(config, generation, kind, found, processor)
