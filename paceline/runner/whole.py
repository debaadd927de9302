"""Is what transformers builds and loads the model that its files describe, whole and nothing else?"""

import copy
import re
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from ..errors import ConfigError
from ..hf.weight_files import Stored
from ..schema import Many, checked, validate
from .folder import refused

_SLACK = 1 << 24  # numbers that a model may hold beyond twice those of its files: buffers
_MTP = re.compile(r"(.*\.layers\.\d+\.)(eh_proj|enorm|hnorm)\.weight")
_Size = Annotated[int, Field(ge=1, le=1 << 40)]


@checked
class _Relied:
    """What is relied on of a configuration of transformers, by the names that all of them answer to."""

    vocab_size: _Size
    hidden_size: _Size
    num_hidden_layers: _Size
    num_attention_heads: _Size | None  # recurrent models have none, and are refused by their state
    max_position_embeddings: _Size | None
    eos_token_id: int | Many[int] | None
    layer_types: Many[str] | None

    def __post_init__(self) -> None:
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ConfigError(
                '"layer_types" has a wrong length', got=len(self.layer_types), expected=self.num_hidden_layers
            )
        ends = self.eos_token_id
        wrong = [one for one in ([ends] if isinstance(ends, int) else ends or []) if not 0 <= one < self.vocab_size]
        if wrong:
            raise ConfigError('"eos_token_id" names no token', got=wrong[0], expected=f"0 to {self.vocab_size - 1}")


def check_config(name: str, config: Any, generation: Any = None) -> None:
    """Raise `ConfigError` for a value of the wrong kind; generation: the configuration that names the last tokens."""
    text = config.get_text_config()
    given = {key: getattr(text, key, None) for key in _Relied.__annotations__}
    given["max_position_embeddings"] = given["max_position_embeddings"] or None
    if generation is not None:
        given["eos_token_id"] = generation.eos_token_id
    validate(_Relied, given, f"the configuration of {name!r}")


def check_sizes(name: str, auto: Any, config: Any, trusts: bool, stored: Mapping[str, Stored]) -> None:
    """Raise `ConfigError` where config.json describes a far larger model than the weights are, before it takes memory.

    What the files lack would be made up: memory of the sizes in config.json, filled with random numbers.
    """
    with refused(f"no model can be built from the configuration of {name!r}", fix="fetch the model again"):
        with torch.device("meta"), no_init_weights():  # shapes only
            built = auto.from_config(copy.deepcopy(config), trust_remote_code=trusts)
        needed = sum(tensor.numel() for tensor in (*built.parameters(), *built.buffers()))
    packs = getattr(config, "quantization_config", None) is not None
    held = sum(one.numel * (16 if packs else 1) for one in stored.values())
    if needed > 2 * held + _SLACK:
        raise ConfigError(
            f"the configuration of {name!r} describes a larger model than its weights are",
            got=f"{needed:,} numbers to hold", expected=f"about the {held:,} in its safetensors files",
            fix="fetch the model again, or name the right folder",
        )  # fmt: skip


def check_weights(name: str, model: PreTrainedModel, loaded: Mapping[str, Any], stored: Mapping[str, Stored]) -> None:
    """Raise `ConfigError` for tensors that are missing, misshapen, left over or of a kind that loses what they hold.

    loaded: what transformers tells of loading, less what it declares as of no matter. It fills what is missing with
    random numbers, drops what is left over (the layers of a deeper model), and goes on.
    """
    unexpected = [str(key) for key in loaded["unexpected_keys"]]
    # Layers for multi-token prediction, in checkpoints of DeepSeek-V3's form, come behind the model's own.
    extra = tuple(found[1] for key in unexpected if (found := _MTP.fullmatch(key)))
    for what, keys in (
        ("lacks", loaded["missing_keys"]),
        ("has misshapen", [f"{key} {list(held)} for {list(own)}" for key, held, own in loaded["mismatched_keys"]]),
        ("holds other", [key for key in unexpected if not key.startswith(extra)] if extra else unexpected),
        ("has weights of an unusable kind among its", _unusable(model, stored)),
    ):
        if keys:
            raise ConfigError(
                f"{name!r} {what} weights",
                got=f"{len(keys)} of them, for example {sorted(map(str, keys))[0]}",
                expected="every tensor of the architecture in config.json, and no others",
                fix="fetch the model again, or name the right folder",
            )


def _unusable(model: PreTrainedModel, stored: Mapping[str, Stored]) -> list[str]:
    """Complex weights, and integers where the model computes with floats: both would become real numbers silently."""
    packs = getattr(model, "hf_quantizer", None) is not None
    held = {key.rpartition(".")[2] for key, one in model.state_dict().items() if not one.is_floating_point()}
    dropped = [*(model._keys_to_ignore_on_load_unexpected or ()), r"(^|\.)position_ids$"]
    return [
        f"{key} ({one.dtype})"
        for key, one in stored.items()
        if one.dtype.startswith("C")
        or not (packs or one.is_float or key.rpartition(".")[2] in held or any(re.search(p, key) for p in dropped))
    ]
