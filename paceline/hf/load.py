"""Which device and dtype a user means, and the processor of a vision-language model."""

import re
from functools import cache
from pathlib import Path
from typing import cast

import torch
from transformers import PROCESSOR_MAPPING, AutoImageProcessor, AutoProcessor, AutoTokenizer, PretrainedConfig
from transformers.processing_utils import ProcessorMixin
from transformers.utils.import_utils import is_torchvision_available

from ..errors import ConfigError
from ..kernels.library import library
from .checkpoint import one_line, refused
from .describe import FORMS

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


def device_of(device: str | torch.device | None) -> torch.device:
    """None takes CUDA where there is one. Raises `ConfigError` for a device that is not there."""
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
    try:
        torch.zeros(1, device=place).item()  # also tells the devices that hold shapes and no numbers
    except Exception as error:  # every kind of device raises its own
        told = str(error).strip().partition("\n")[0]
        raise ConfigError(f"the device {device!r} cannot be used here", got=told, fix="use cpu") from error
    return place


def multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """False iff the device is a CPU without instructions for products in this dtype of 16 bits, which are then slow."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    which = "bf16" if dtype is torch.bfloat16 else "fp16"
    return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{which}_supported")())


def usual_dtype(config: PretrainedConfig, device: torch.device) -> torch.dtype | None:
    """What a model is loaded in when nobody says: None, the checkpoint's, or float32 where the CPU lacks that.

    Native passes widen 16 bits in registers, so that text models keep theirs. Others: on two AVX2 cores `generate` with
    SmolLM2-135M took 55 s in the bfloat16 it is stored in, and 21 s in float32, both in torch.
    """
    text = config.get_text_config()
    stored = config.dtype or text.dtype
    native = device.type == "cpu" and text is config and text.model_type in FORMS and library() is not None
    return None if not isinstance(stored, torch.dtype) or native or multiplies(stored, device) else torch.float32


def dtype_of(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """None for None and "auto": see `usual_dtype`. Raises `ConfigError` for an unknown name."""
    if dtype is None or dtype == "auto":
        return None
    for name, known in _DTYPES.items():
        if dtype in (name, known):
            return known
    raise ConfigError(f"unknown dtype {dtype!r}", expected="auto, " + ", ".join(_DTYPES))


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


def load_processor(folder: str | Path, config: PretrainedConfig, trust_remote_code: bool = False) -> ProcessorMixin:
    """The processor of a checkpoint, for pictures. Raises `ConfigError` for files that are missing or
    broken, and for packages that it needs."""
    own = {"trust_remote_code": trust_remote_code}
    with refused(
        f"{str(folder)!r} has no usable processor for images",
        "processor_config.json or preprocessor_config.json beside the weights, and a tokenizer",
    ):
        try:
            kind = cast("type[ProcessorMixin] | None", PROCESSOR_MAPPING.get(type(config), None))
            if kind is None or trust_remote_code or is_torchvision_available() or _VIDEO not in kind.get_attributes():
                loaded = AutoProcessor.from_pretrained(folder, **own)
                if not isinstance(loaded, ProcessorMixin):  # where there is nothing else, it gives the tokenizer
                    raise ValueError(f"only a {type(loaded).__name__}")
                return loaded
            options, _ = kind.get_processor_dict(folder)
            options.pop(_VIDEO, None)
            parts = [AutoImageProcessor.from_pretrained(folder, **own), AutoTokenizer.from_pretrained(folder, **own)]
            return cast(ProcessorMixin, without_video(kind).from_args_and_dict([*parts, None], options))
        except ImportError as error:  # SmolVLM's asks for num2words, though it is for videos alone
            told = re.search(r"pip install (?:-U |--upgrade )?[`'\"]?([\w.-]+)", str(error))
            package = told[1].rstrip(".") if told else (error.name or "").partition(".")[0]
            raise ConfigError(
                f"the processor of {str(folder)!r} needs a package that is not here", got=one_line(error),
                fix=f"pip install {package}" if package else "install what it names",
            ) from error  # fmt: skip
