"""Checkpoints that were quantised by other tools. Layers of 4 bits become blocks of the native kernels; what else there
is, transformers reads, each kind with packages of its own."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConfigError
from .checkpoint import Stored
from .four_bits import FourBits, four_bits

if TYPE_CHECKING:
    from transformers import PreTrainedModel
METHODS = {
    "fp8": ("accelerate",),
    "mxfp4": ("accelerate",),
    "compressed-tensors": ("compressed_tensors", "accelerate"),
    "gptq": ("gptqmodel", "optimum"),
    "awq": ("gptqmodel", "accelerate"),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
}
"""What `quantization_config.quant_method` may say, and the packages that are imported to read it."""
_INSTEAD = 'or give the model that was not quantised: weights="int4" (--weights int4) rounds it while it is loaded'


def _settings(config: Any) -> dict[str, Any] | None:
    about = getattr(config, "quantization_config", None)
    return about if about is None or isinstance(about, dict) else about.to_dict()


def rounded_layers(config: Any, stored: Mapping[str, Stored]) -> FourBits | None:
    """How the layers lie if they are of 4 bits and can become blocks, as far as shapes tell."""
    form = four_bits(_settings(config) or {})
    return form if form is not None and form.fits(stored) else None


def is_quantized(config: Any) -> bool:
    """Whether another tool rounded the weights, as config.json says."""
    return (_settings(config) or _settings(config.get_text_config())) is not None


def check_quantization(name: str, config: Any, unlike: str = "") -> None:
    """Raise `ConfigError` for a kind of quantised weights that is not read, or not without a package that is missing.

    config: of transformers, as config.json describes the model. unlike: why layers of 4 bits cannot become blocks.
    """
    settings = _settings(config) or _settings(config.get_text_config())
    if settings is None:
        return
    is_older = settings.get("load_in_4bit") or settings.get("load_in_8bit")  # of bitsandbytes, which left out its name
    method = str(settings.get("quant_method") or ("bitsandbytes" if is_older else None))
    if method not in METHODS:
        raise ConfigError(
            f"the weights of {name!r} are quantised in a way that is not read", got=method,
            expected="one of " + ", ".join(METHODS), fix=_INSTEAD.removeprefix("or "),
        )  # fmt: skip
    missing = [package for package in METHODS[method] if find_spec(package) is None]
    if missing:
        install = " ".join(package.replace("_", "-") for package in missing)
        how = f"by {method} with {unlike}" if unlike else f"by {method}"
        raise ConfigError(
            f"the weights of {name!r} are quantised {how}, and what reads them is not installed",
            got="no " + ", ".join(missing), fix=f"pip install {install}; {_INSTEAD}",
        )  # fmt: skip


def check_dtype(name: str, model: "PreTrainedModel", wanted: torch.dtype | None) -> None:
    """Raise `ConfigError` where a quantised model stayed in another dtype than the one that was asked for."""
    if wanted is not None and model.dtype != wanted and getattr(model.config, "quantization_config", None):
        kept = str(model.dtype).removeprefix("torch.")
        raise ConfigError(
            f"the quantised weights of {name!r} cannot be loaded in this dtype",
            got=str(wanted).removeprefix("torch."), expected=kept, fix=f'leave dtype out, or set it to "{kept}"',
        )  # fmt: skip


def has_shared_outliers(config: Any) -> bool:
    """True for bitsandbytes' LLM.int8 (Dettmers et al. 2022): an outlier in one row moves its column in all of them."""
    settings = _settings(config) or {}
    return bool(settings.get("load_in_8bit")) and settings.get("llm_int8_threshold", 6.0) > 0
