"""Which device and dtype a user means."""

import torch

from ..errors import ConfigError

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


def device_of(device: str | torch.device | None) -> torch.device:
    """None takes CUDA where there is one. Raises `ConfigError` for a device that is not there."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {device!r}", expected="for example cpu, cuda or cuda:1") from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"there is no device {device!r}", got=f"{torch.cuda.device_count()} CUDA devices", fix="use cpu"
        )
    return place


def dtype_of(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """None and "auto" keep the checkpoint's. Raises `ConfigError` for an unknown name."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype in ("auto", *_DTYPES):
        return _DTYPES.get(dtype)
    raise ConfigError(f"unknown dtype {dtype!r}", expected="auto, " + ", ".join(_DTYPES))
