"""Opens the processors of vision-language models."""

import re
from functools import cache
from pathlib import Path
from typing import Any, cast

import transformers
from transformers import (
    PROCESSOR_MAPPING,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    PretrainedConfig,
)
from transformers.processing_utils import ProcessorMixin

from ..errors import ConfigError
from .checkpoint import one_line, refused

_VIDEO = "video_processor"
_LOADERS = {
    "feature_extractor": AutoFeatureExtractor,
    "image_processor": AutoImageProcessor,
    "tokenizer": AutoTokenizer,
}


class _NoVideo:
    """The attributes that processors of SmolVLM and MiniCPM-V read even if there is no video."""

    num_frames: int | None = None
    fps: float | None = None
    slice_mode = False
    downsample_mode = ""


class _Kept(ProcessorMixin):
    """Comes between a processor class and transformers' own, to which some pass the missing part too."""

    def __init__(self, *parts: object, video_processor: None = None, **options: object):
        super().__init__(*(part for part in parts if part is not None), **options)


@cache
def without_video(kind: type[ProcessorMixin]) -> type[ProcessorMixin]:
    """A processor class without its video part, which is never used, and needs torchvision and a file of its own."""
    parts: list[str] = kind.get_attributes()
    if _VIDEO not in parts:
        return kind
    kept = [part for part in parts if part != _VIDEO]
    members = {"get_attributes": classmethod(lambda cls: list(kept)), _VIDEO: _NoVideo(), "__init__": kind.__init__}
    bases: Any = (kind, _Kept)
    return cast("type[ProcessorMixin]", type(kind.__name__, bases, members))


def load_processor(folder: str | Path, config: PretrainedConfig, trust_remote_code: bool = False) -> ProcessorMixin:
    """The processor of a checkpoint. Raises `ConfigError` for missing or broken files, and for missing packages."""
    own = {"trust_remote_code": trust_remote_code}
    with refused(
        f"{str(folder)!r} has no usable processor for images",
        "processor_config.json or preprocessor_config.json beside the weights, and a tokenizer",
    ):
        try:
            kind = cast("type[ProcessorMixin] | None", PROCESSOR_MAPPING.get(type(config), None))
            if kind is None:
                named, _ = ProcessorMixin.get_processor_dict(folder)
                kind = getattr(transformers, str(named.get("processor_class")), None)
            if kind is None or trust_remote_code or _VIDEO not in kind.get_attributes():
                loaded = AutoProcessor.from_pretrained(folder, **own)
                if not isinstance(loaded, ProcessorMixin):  # where there is nothing else, it gives the tokenizer
                    raise ValueError(f"only a {type(loaded).__name__}")
                return loaded
            options, _ = kind.get_processor_dict(folder)
            options.pop(_VIDEO, None)
            opened = {part: loader.from_pretrained(folder, **own) for part, loader in _LOADERS.items()
                      if part in kind.get_attributes()}  # fmt: skip
            parts = [opened.get(part) for part in kind.get_attributes()]
            return cast(ProcessorMixin, without_video(kind).from_args_and_dict(parts, options))
        except ImportError as error:  # SmolVLM's asks for num2words, though it is for videos alone
            named = re.search(r"pip install (?:-U |--upgrade )?[`'\"]?([\w.-]+)", str(error))
            package = named[1].rstrip(".") if named else (error.name or "").partition(".")[0]
            raise ConfigError(
                f"the processor of {str(folder)!r} needs a package that is not here", got=one_line(error),
                fix=f"pip install {package}" if package else "install what it names",
            ) from error  # fmt: skip
