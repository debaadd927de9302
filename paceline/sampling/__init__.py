"""From logits to distributions and from tokens to text.

target_distribution       p of every node of a tree, each node with the processors applied on its own path
warp             temperature, top_k, top_p and min_p, vectorised over rows
DraftSampler     draws a draft model's tokens under the same warpers, and keeps the distribution they were drawn from
confidence       the probability a draft gave its token, for policies
make_grammar     the grammar of an answer that must have a form
Detokenizer      token ids to text as they come, with stop strings
token_logprob    the target's log-probabilities of an emitted token
"""

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
