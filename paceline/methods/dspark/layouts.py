"""DSpark heads as others publish them: DFlash's layouts (see `dflash.layouts`) with more tensors.

              their authors (DeepSpec)                 speculators
config.json   flat: block_size, mask_token_id,         as DFlash's; markov_rank, markov_head_type
              target_layer_ids, markov_rank,
              markov_head_type
tensors       markov_head.markov_w1 (of the vocabulary), markov_w2 (of the draft vocabulary), gate_proj or joint_proj;
              confidence_head.proj, where it is enabled, over [h; e] or h
first draft   by the anchor's row                      by the anchor's row, if sample_from_anchor
"""

from dataclasses import KW_ONLY

import torch
from torch import nn

from ...errors import ConfigError
from ...schema import checked
from ..dflash.layouts import DFlashOptions, build
from ..heads.parts import Width
from ..heads.published import Published, TargetFacts, lacks
from ..heads.published_options import check_held, said
from ..heads.speculators import KIND, flattened
from .head import DSparkHead, MarkovType


@checked
class _DSpark(DFlashOptions):
    """What config.json of a DSpark head says."""

    _: KW_ONLY
    markov_rank: Width
    markov_head_type: MarkovType = "vanilla"
    sample_from_anchor: bool | None = None
    num_anchors: int | None = None
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False


_AUTHORS = "Qwen3DSparkModel"
_READ = "the form of deepseek-ai/DeepSpec or of speculators"


def read(published: Published, target: TargetFacts, engine: str | None) -> DSparkHead | None:
    """A DSpark head; None for files of another method. Raises as the reader of DFlash heads."""
    config = published.config
    is_theirs = config.get(KIND) == "dspark"
    if published.file is not None or not (is_theirs or _AUTHORS in (config.get("architectures") or ())):
        return None
    if is_theirs:
        published.config = flattened(config, ("dspark",), {})
    options = said(published, _DSpark, "DSpark", _READ, ("speculators_config",) if is_theirs else ())
    if is_theirs and options.sample_from_anchor is None:
        message = f"{published.name} does not say which row drafts the first token"
        expected = "sample_from_anchor: true or false"
        raise ConfigError(message, got="no sample_from_anchor", expected=expected, fix="add what it was trained with")
    if not is_theirs and options.sample_from_anchor is False:
        raise lacks(published, "DSpark", "sample_from_anchor false", _READ)
    _rename_confidence(published, options)
    if not is_theirs:
        for name in ("embed_tokens.weight", "lm_head.weight"):  # copies of the target's
            published.tensors.pop(name, None)
    return build(
        published, target, options, is_theirs, DSparkHead,
        markov_rank=options.markov_rank, markov_head_type=options.markov_head_type, own_tables=True,
        from_anchor=not is_theirs or bool(options.sample_from_anchor),
    )  # fmt: skip


def _rename_confidence(published: Published, options: _DSpark) -> None:
    """A confidence head over all that ours reads: zeros where theirs reads less, or is not there."""
    tensors, old = published.tensors, "confidence_head.proj."
    weight, bias = torch.zeros(1, options.hidden_size + options.markov_rank), torch.zeros(1)
    if options.enable_confidence_head:
        told = tensors.pop(old + "weight", torch.empty(0)), tensors.pop(old + "bias", torch.empty(0))
        width = weight.shape[1] if options.confidence_head_with_markov else options.hidden_size
        check_held(published, {"confidence_head": ([(1, width), (1,)], [tuple(part.shape) for part in told])})
        weight, bias = nn.functional.pad(told[0], (0, weight.shape[1] - width)), told[1]
    tensors |= {"confidence_head.weight": weight, "confidence_head.bias": bias}
