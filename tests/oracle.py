"""The slow obvious decoder: no cache, no tree, no draft; the whole text is read again for every token.

It shares the distribution of a token with the fast path and nothing else; tests hold the fast path against it.
"""

import torch

from paceline.core.outputs import Origin
from paceline.core.request import Sequence
from paceline.core.tree import TokenTree
from paceline.runner import LoadedModel
from paceline.runner.prefill import look, whole_text
from paceline.sampling.distribution import target_distribution
from paceline.verify import choose_token


@torch.inference_mode()
def autoregressive(loaded: LoadedModel, seq: Sequence) -> Sequence:
    """Run `seq` to its end, one token at a time; the vision tower encodes its images once more."""
    features = look(loaded, seq.vision)
    while not seq.is_finished:
        logits = whole_text(loaded, seq.token_ids, vision=seq.vision, features=features)[None]
        distribution = target_distribution(logits, [seq], TokenTree.chain([[seq.token_ids[-1]]], loaded.device))
        seeds = torch.tensor([seq.seed], device=loaded.device)
        token = choose_token(distribution, seeds, torch.tensor([[len(seq.token_ids)]], device=loaded.device))
        seq.append(int(token[0, 0]), Origin.PLAIN, "")
    return seq
