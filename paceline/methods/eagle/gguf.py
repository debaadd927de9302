"""EAGLE-3 heads as llama.cpp's draft models; rows of queries and keys lie in rotary pairs."""

from dataclasses import KW_ONLY

from ...schema import checked
from ..heads.gguf import ENGINE, Entries, file_layout, read_parts
from ..heads.published import Layout, Published, TargetFacts, refuse_if
from .head import EagleConfig, EagleHead

_OWN, _NORMS = {"input_norm": "enc.output_norm"}, ("norm_before_residual", "norm_before_fc")


@checked
class _Entries(Entries):
    _: KW_ONLY
    norm_before_residual: bool = False
    norm_before_fc: bool = False


def read_file(published: Published, target: TargetFacts) -> EagleHead:
    """The head. Raises as `read_parts`."""
    parts = read_parts(published, _Entries, _OWN, target, in_pairs=True)
    config = EagleConfig(
        version=3, target_hidden_size=parts.entries.target_hidden_size or parts.entries.hidden_size,
        own_embeddings=parts.owns_embeddings, **{name: getattr(parts.entries, name) for name in _NORMS}, **parts.fields,
    )  # fmt: skip
    return parts.build(EagleHead, config)


def write_file(head: EagleHead, facts: TargetFacts, num_tokens: int) -> Layout:
    """The export of an EAGLE-3 head. Raises `NotExportable` for what llama.cpp lacks."""
    c, kind = head.config, "an EAGLE-3 head"
    refuse_if(c.fc_norm or c.norm_output, ENGINE, f"{kind} with fc_norm or norm_output (EAGLE-3.1)")
    refuse_if(c.num_hidden_layers > 1, ENGINE, f"{kind} of {c.num_hidden_layers} layers")
    refuse_if(c.fc_bias, ENGINE, f"{kind} with a bias of fc", "train it without")
    refuse_if(len(c.states) != 3, ENGINE, f"{kind} that reads {len(c.states)} states", "train one that reads three")
    refuse_if(c.qk_norm, ENGINE, f"{kind} with norms of queries and keys")
    more = {name: getattr(c, name) for name in _NORMS}
    return file_layout("eagle3", head, facts, _OWN, more, num_tokens, in_pairs=True, scalings=("llama3",))
