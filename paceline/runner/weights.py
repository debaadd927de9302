"""A model with quantised weights, as a target or as a draft."""

from dataclasses import replace

from ..quant import QuantReport, Weights, quantize_target
from .hf_adapter import LoadedModel, share_copy
from .model_runner import ModelRunner
from .selftest import own_reference

GROUP_SIZE = 32
"""Of INT4 weights: with 64, small models answer visibly differently from their bfloat16 selves."""


def with_weights(
    loaded: LoadedModel, weights: Weights, group_size: int = GROUP_SIZE
) -> tuple[LoadedModel, QuantReport]:
    """The model with its linear layers in INT8 or INT4; what is not replaced is shared with `loaded`.

    The loaded model is held against plain transformers first, the quantised one against itself: a tree against its
    paths. Raises `ConfigError` and `IncompatibleModels` as `quantize_target` does.
    """
    seen = 0 if loaded.sight is None else len(loaded.sight.token_ids)
    ModelRunner(loaded, max_batch_size=1, max_length=max(64, seen + 1))  # runs the self-tests
    model = share_copy(loaded.model)
    report = quantize_target(model, weights, group_size)
    made = loaded.with_model(model)
    return replace(made, reference=own_reference(made), name=f"{loaded.name}-{weights}"), report
