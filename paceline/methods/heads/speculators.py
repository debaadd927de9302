"""The layout of speculators, which any method may have: config.json nests the draft layer, and names the verifier."""

from collections.abc import Collection, Mapping
from typing import Any

from ...errors import ConfigError, IncompatibleModels
from .published import TargetFacts, refuse_if
from .published_options import joined

KIND, ENGINE, VERSION = "speculators_model_type", "speculators", "0.9.0"
_LAYER = "transformer_layer_config"
_LACKS = {
    "dflash2": "dflash2, with a selector of paths and convolutions: this layout of it waits for a reader in vLLM",
    "jetspec": "jetspec, whose rows hold drafted tokens and draft the next ones: no published head has this layout",
}
"""Kinds without a reader here, and why."""


def flattened(config: Mapping[str, Any], kinds: Collection[str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json as a plain one: what the layer says beside what the head says.

    kinds: those that the reader knows. defaults: what absent options mean in this layout. Raises `IncompatibleModels`
    for a speculator of another kind, `ConfigError` for one without its layer.
    """
    kind = config[KIND]
    if kind not in kinds:
        message = "a speculators head of a kind that Paceline has no drafter for"
        expected = "dflash, dspark, eagle3 or peagle"
        raise IncompatibleModels(message, got=_LACKS.get(kind, repr(kind)), expected=expected)
    layer: Any = config.get(_LAYER)
    if not isinstance(layer, dict):
        raise ConfigError("a speculators config without its layer", got=layer, expected=_LAYER)
    rest = {key: value for key, value in config.items() if key not in (_LAYER, "architectures")}
    layer = {key: value for key, value in layer.items() if key != "tie_word_embeddings"}  # a layer has no tables
    return joined("the config.json of a speculators head", {**defaults, **rest}, layer, _LAYER)


def nested(
    kind: str, architecture: str, layer: Mapping[str, Any], options: Mapping[str, Any], facts: TargetFacts, tokens: int
) -> dict[str, Any]:
    """The config.json of a head. layer: its layers. options: its own. tokens: to draft in a step.

    Raises `NotExportable` where the target's architecture is not known.
    """
    refuse_if(not facts.architectures, ENGINE, "no architecture of the target", "name the target with --model")
    return {
        **options,
        "architectures": [architecture],
        KIND: kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": {"name_or_path": facts.name, "architectures": list(facts.architectures)},
        },
        _LAYER: dict(layer),
    }
