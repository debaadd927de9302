"""The speculators layout: one config.json around that of the draft layer and of the model it drafts for."""

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError, IncompatibleModels


def flattened(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same head as a plain EAGLE-3 config. Defaults are those of the speculators layout, which differ.

    Raises `IncompatibleModels` for a kind of speculator other than eagle3.
    """
    kind = config["speculators_model_type"]
    if kind != "eagle3":
        raise IncompatibleModels(
            "a speculators head of a kind that Paceline has no drafter for", got=repr(kind), expected="'eagle3'"
        )
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ConfigError("a speculators config without its layer", got=layer, expected="transformer_layer_config")
    rest = {key: value for key, value in config.items() if key not in ("transformer_layer_config", "architectures")}
    flat: dict[str, Any] = {**layer, **rest}
    # Absent means true here and false in plain configs, as vLLM reads both.
    flat["norm_before_residual"] = config.get("norm_before_residual", True)
    return flat
