"""From logits to distributions and from tokens to text."""

from .detokenize import Detokenizer
from .distribution import target_distribution
from .draft_sampler import DraftSampler, confidence
from .grammar import Grammar, make_grammar
from .scores import token_logprob
from .warpers import warp

__all__ = [
    "Detokenizer",
    "DraftSampler",
    "Grammar",
    "confidence",
    "make_grammar",
    "target_distribution",
    "token_logprob",
    "warp",
]
