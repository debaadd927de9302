"""DSpark heads as others publish them: DFlash's layouts (see `dflash.layouts`) with more tensors.

              their authors (DeepSpec)                 speculators
config.json   flat: block_size, mask_token_id,         as DFlash's; markov_rank, markov_head_type
              target_layer_ids, markov_rank,
              markov_head_type
tensors       markov_head.markov_w1 (of the vocabulary), markov_w2 (of the draft vocabulary), gate_proj or joint_proj;
              confidence_head.proj, which is not read
first draft   by the anchor's row                      by the anchor's row, if sample_from_anchor
"""

from dataclasses import KW_ONLY

from ...errors import ConfigError
from ...schema import checked
from ..dflash.layouts import DFlashOptions, build
from ..heads.parts import Width
from ..heads.published import Published, TargetFacts, lacks
from ..heads.published_options import said
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
    for name in ("weight", "bias"):  # not read here
        published.tensors.pop(f"confidence_head.proj.{name}", None)
    if not is_theirs:
        for name in ("embed_tokens.weight", "lm_head.weight"):  # copies of the target's
            published.tensors.pop(name, None)
    return build(
        published, target, options, is_theirs, DSparkHead,
        markov_rank=options.markov_rank, markov_head_type=options.markov_head_type, own_tables=True,
        from_anchor=not is_theirs or bool(options.sample_from_anchor),
    )  # fmt: skip
