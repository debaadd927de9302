"""Settings in config.json of models and heads: values that no layer can compute with, and contradictions."""

from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import Field

from ..errors import ConfigError
from ..schema import Positive, validate

_Size = Annotated[int, Field(ge=1, le=1 << 40)]
_NotNegative = Annotated[float, Field(ge=0)]
ROPE: Mapping[str, Any] = {
    **dict.fromkeys(("rope_theta", "factor", "attention_factor", "beta_fast", "beta_slow"), Positive),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), Positive),
    **dict.fromkeys(("mscale", "mscale_all_dim"), _NotNegative),
    "partial_rotary_factor": Annotated[float, Field(gt=0, le=1)],
    "original_max_position_embeddings": _Size,
    "truncate": bool,
}
"""What may be said of rotary positions. Null stands for what is not said, here and elsewhere."""
_KINDS: Mapping[str, Any] = {
    **ROPE,
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"), Positive),
    **dict.fromkeys(("logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier"), Positive),
    "attention_multiplier": Positive,
    "sliding_window": _Size,
}


_SAME_NAMES = {"default", "linear", "dynamic", "llama3", "yarn"}
"""Kinds of scaling that never had another name, as "longrope" and "mrope" did."""


def check_settings(subject: str, settings: Mapping[str, Any], place: str = "") -> None:
    """Raise `ConfigError` for a number that is not finite or not possible, in nested objects too. place: of these."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            check_settings(subject, cast("Mapping[str, Any]", value), f"{place}{key}.")
            continue
        if value == 0 and settings.get(f"use_{key}") is False:  # how Qwen2-MoE says that there are no windows
            continue
        small = str(key).endswith(("eps", "epsilon"))
        kind = _KINDS.get(key, Positive if small else float if isinstance(value, float) else None)
        if kind is not None and value is not None:
            validate(kind, value, f"{place}{key} of {subject}")


def one_rope(subject: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json says of rotary positions, in any of its places. Raises `ConfigError` where they differ."""
    rope: dict[str, Any] = {}
    for place in ({"rope_theta": config.get("rope_theta")}, config.get("rope_scaling"), config.get("rope_parameters")):
        for key, value in sorted((place or {}).items()):  # rope_type before type, its older name
            key = "rope_type" if key == "type" else key
            held = rope.setdefault(key, value) if value is not None else None
            differs = held is not value and held != value
            if differs and (key != "rope_type" or {held, value} <= _SAME_NAMES):
                raise ConfigError(
                    f"{subject} contradicts itself about rotary positions", got=f"{key} {held!r} and {value!r}",
                    expected="one value in rope_theta, rope_scaling and rope_parameters", fix="remove the wrong one",
                )  # fmt: skip
    return rope
