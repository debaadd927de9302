"""The slow obvious decoder: no cache, no tree, no draft; the whole text is read again for every token.

It shares the distribution of a token with the fast path and nothing else; tests hold the fast path against it.
"""

import torch
from torch import Tensor

from paceline.core.request import TokenSequence
from paceline.core.rng import Purpose, gumbel
from paceline.core.round import Origin
from paceline.core.tree import TokenTree
from paceline.core.walk import TargetDistribution
from paceline.sampling.distribution import target_distribution
from paceline.target import LoadedModel
from paceline.target.prefill import encode_images, reference_logits


def choose_token(distribution: TargetDistribution, seeds: Tensor, positions: Tensor) -> Tensor:  # [B], [B, N] -> [B, N]
    """The target's own token at every node, by the definition: argmax(scores + noise), argmax(scores) if greedy.

    Raises the error of a node that has no distribution.
    """
    tokens = torch.empty_like(positions)
    for row, is_greedy in enumerate(distribution.is_greedy):
        scores = distribution.at([row] * positions.shape[1], [*range(positions.shape[1])])
        if not is_greedy:
            scores = scores + gumbel(seeds[row : row + 1], positions[row : row + 1], Purpose.TARGET, scores.shape[1])[0]
        best = scores.double().cpu().numpy().argmax(-1)  # the first of equal ones
        for node, token in enumerate(best.tolist()):
            if not scores[node, token].isfinite():
                raise distribution.error(row, node, int(positions[row, node]))
            tokens[row, node] = token
    return tokens


@torch.inference_mode()
def autoregressive(loaded: LoadedModel, seq: TokenSequence) -> TokenSequence:
    """Run `seq` to its end, one token at a time; the vision tower encodes its images once more."""
    features = encode_images(loaded, seq.vision)
    while not seq.is_finished:
        logits = reference_logits(loaded, seq.token_ids, vision=seq.vision, features=features)[None]
        distribution = target_distribution(logits, [seq], TokenTree.chain([[seq.token_ids[-1]]], loaded.device))
        seeds = torch.tensor([seq.seed], device=loaded.device)
        token = choose_token(distribution, seeds, torch.tensor([[len(seq.token_ids)]], device=loaded.device))
        seq.append(int(token[0, 0]), Origin.PLAIN, "")
    return seq
