"""Loads the processor of a vision-language model: tokenizer, chat template, and what makes pixels of pictures."""

import re
from functools import cache
from typing import cast

from transformers import PROCESSOR_MAPPING, AutoImageProcessor, AutoProcessor, AutoTokenizer, PretrainedConfig
from transformers.processing_utils import ProcessorMixin
from transformers.utils.import_utils import is_torchvision_available

from ..errors import ConfigError

_VIDEO = "video_processor"


class _NoVideo:
    """What SmolVLM's processor looks at before it asks whether there is a video."""

    num_frames: int | None = None
    fps: float | None = None


@cache
def without_video(kind: type[ProcessorMixin]) -> type[ProcessorMixin]:
    """The same class for pictures alone: `transformers` makes no part for videos where torchvision is missing."""
    parts: list[str] = kind.get_attributes()
    if _VIDEO not in parts:
        return kind
    kept = [part for part in parts if part != _VIDEO]
    made = type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda cls: list(kept)), _VIDEO: _NoVideo()})
    return cast("type[ProcessorMixin]", made)


def load_processor(name_or_path: str, config: PretrainedConfig, trust_remote_code: bool = False) -> ProcessorMixin:
    """The processor of a checkpoint, for pictures. Raises `ConfigError` for files that are missing or
    broken, and for packages that it needs."""
    try:
        kind = cast("type[ProcessorMixin] | None", PROCESSOR_MAPPING.get(type(config), None))
        if kind is None or trust_remote_code or is_torchvision_available() or _VIDEO not in kind.get_attributes():
            loaded = AutoProcessor.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
            if not isinstance(loaded, ProcessorMixin):  # where there is nothing else, it gives the tokenizer
                raise ValueError(f"only a {type(loaded).__name__}")
            return loaded
        options, _ = kind.get_processor_dict(name_or_path)
        options.pop(_VIDEO, None)
        parts = [AutoImageProcessor.from_pretrained(name_or_path), AutoTokenizer.from_pretrained(name_or_path), None]
        return cast(ProcessorMixin, without_video(kind).from_args_and_dict(parts, options))
    except ImportError as error:  # SmolVLM's asks for num2words, though it is for videos alone
        told = re.search(r"pip install (?:-U |--upgrade )?[`'\"]?([\w.-]+)", str(error))
        package = told[1].rstrip(".") if told else (error.name or "").partition(".")[0]
        raise ConfigError(
            f"the processor of {name_or_path!r} needs a package that is not here", got=str(error).partition("\n")[0],
            fix=f"pip install {package}" if package else "install what it names",
        ) from error  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise ConfigError(
            f"{name_or_path!r} has no usable processor for images",
            got=lines[0] if lines else type(error).__name__,
            expected="processor_config.json or preprocessor_config.json beside the weights, and a tokenizer",
        ) from error
