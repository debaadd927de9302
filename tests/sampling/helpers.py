"""The oracles of the sampling tests: transformers' processors, and every distribution written out slowly."""

from collections import Counter
from itertools import product

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from paceline.core.request import SamplingParams, TokenSequence
from paceline.core.tree import TokenTree
from paceline.core.walk import TargetDistribution

V = 40
EOS = 3
BAD_WORDS = ((5,), (7, 8), (9, 10, 11))


def sequence(
    params: SamplingParams, prompt: list[int], answer: list[int] | None = None, seed: int = 1
) -> TokenSequence:
    bad = BAD_WORDS if params.bad_words else ()
    return TokenSequence(prompt, params, seed, frozenset([EOS]), 10_000, bad, token_ids=prompt + (answer or []))


def every_score(target: TargetDistribution) -> Tensor:
    """Processed scores of every node, [B, N, V]."""
    batch, width, vocab = target.scores.shape
    rows, nodes = zip(*product(range(batch), range(width)), strict=True)
    return target.at([*rows], [*nodes]).view(batch, width, vocab)


def root_only(seq: TokenSequence) -> TokenTree:
    return TokenTree.chain([[seq.token_ids[-1]]])


def shift_by_history(ids: Tensor, scores: Tensor) -> Tensor:
    """A user's processor: what it adds depends on the order of the whole past."""
    weight = (ids[0] * torch.arange(1, ids.shape[1] + 1)).sum()
    return scores + torch.sin(torch.arange(scores.shape[1]) * weight)


def edit_in_place(ids: Tensor, scores: Tensor) -> Tensor:
    scores[:, ids[0, -1]] = -torch.inf
    return scores


HISTORY: dict[str, dict] = {
    "bias": {"logit_bias": {4: 3.0, 12: -100.0}},
    "bad words": {"bad_words": ("x",)},
    "min tokens": {"min_tokens": 6, "stop_token_ids": (6,)},
    "min tokens, eos ignored": {"min_tokens": 6, "ignore_eos": True},
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "bigrams": {"no_repeat_ngram_size": 2},
    "trigrams": {"no_repeat_ngram_size": 3},
    "user": {"logits_processors": (shift_by_history, edit_in_place)},
    "all": {
        "logit_bias": {4: 2.0},
        "bad_words": ("x",),
        "min_tokens": 5,
        "repetition_penalty": 0.8,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.3,
        "no_repeat_ngram_size": 3,
        "logits_processors": (shift_by_history,),
    },
}
WARPS: dict[str, dict] = {
    "greedy": {},
    "plain": {"temperature": 1.0},
    "cool": {"temperature": 0.6},
    "top_k": {"temperature": 1.3, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "three": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
}


# --- the oracle: every processor written out, one node and one token at a time -------------------------------------


def naive_processed(row: Tensor, past: list[int], seq: TokenSequence) -> Tensor:
    p, scores = seq.params, row.double().clone()
    answer = past[len(seq.prompt_ids) :]
    for token, bias in (p.logit_bias or {}).items():
        scores[token] += bias
    for word in seq.bad_word_ids:
        if len(word) == 1 or tuple(past[-len(word) + 1 :]) == word[:-1]:
            scores[word[-1]] = -torch.inf
    if len(answer) < p.min_tokens:
        for token in (*seq.eos_ids, *p.stop_token_ids):
            scores[token] = -torch.inf
    if p.repetition_penalty != 1:
        for token in set(past):
            scores[token] = scores[token] * (p.repetition_penalty if scores[token] < 0 else 1 / p.repetition_penalty)
    for token, count in Counter(answer).items():
        scores[token] -= p.presence_penalty + p.frequency_penalty * count
    n = p.no_repeat_ngram_size
    if n:
        suffix = past[len(past) - n + 1 :]
        for i in range(len(past) - n + 1):
            if past[i : i + n - 1] == suffix:
                scores[past[i + n - 1]] = -torch.inf
    for processor in p.logits_processors:
        scores = processor(torch.tensor([past]), scores.float().unsqueeze(0))[0].double()
    return scores


def naive_warped(scores: Tensor, p: SamplingParams) -> Tensor:
    if p.temperature == 0:
        return scores
    scores = scores / p.temperature
    order = sorted(range(len(scores)), key=lambda t: (-float(scores[t]), t))
    if p.top_k:
        kth = scores[order[min(p.top_k, len(order)) - 1]]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if p.top_p < 1:
        probs, mass = torch.softmax(scores, 0), 0.0
        for rank, token in enumerate(order):
            if rank > 0 and mass >= p.top_p:
                scores[token] = -torch.inf
            mass += float(probs[token])
    if p.min_p:
        probs = torch.softmax(scores, 0)
        scores = scores.masked_fill(probs < p.min_p * probs.max(), -torch.inf)
    return scores


def check_target(target: TargetDistribution, logits: Tensor, seqs: list[TokenSequence], tree: TokenTree) -> int:
    """Compare every node whose distribution can be used with the oracle; the number of nodes compared."""
    compared = 0
    for b, seq in enumerate(seqs):
        endings = {*([] if seq.params.ignore_eos else seq.eos_ids), *seq.params.stop_token_ids}
        for i in range(tree.num_nodes):
            past, reachable = list(seq.token_ids), not bool(tree.is_probe[b, i])
            parent = 0
            for node in tree.rows[b].path_to(i):
                token = int(tree.token_ids[b, node])
                before = naive_processed(logits[b, parent], past, seq)
                reachable &= bool(before[token] > -torch.inf) and token not in endings
                past.append(token)
                parent = node
            if not reachable:
                continue
            want = naive_warped(naive_processed(logits[b, i], past, seq), seq.params)
            got = target.at([b], [i])[0].double()
            assert torch.equal(got == -torch.inf, want == -torch.inf), f"row {b}, node {i}: other tokens are forbidden"
            torch.testing.assert_close(torch.log_softmax(got, 0), torch.log_softmax(want, 0), atol=2e-5, rtol=1e-5)
            compared += 1
        assert target.is_greedy[b] == (seq.params.temperature == 0)
    return compared


# --- transformers ---------------------------------------------------------------------------------------------------


def hf_processors(p: SamplingParams, prompt_length: int, bad: bool) -> list[hf.LogitsProcessor]:
    made: list[hf.LogitsProcessor] = []
    if p.logit_bias:
        made.append(hf.SequenceBiasLogitsProcessor({(t,): float(b) for t, b in p.logit_bias.items()}))
    if bad:
        made.append(hf.NoBadWordsLogitsProcessor([list(w) for w in BAD_WORDS]))
    if p.min_tokens:
        made.append(hf.MinNewTokensLengthLogitsProcessor(prompt_length, p.min_tokens, [EOS, *p.stop_token_ids]))
    if p.repetition_penalty != 1:
        made.append(hf.RepetitionPenaltyLogitsProcessor(p.repetition_penalty))
    if p.no_repeat_ngram_size:
        made.append(hf.NoRepeatNGramLogitsProcessor(p.no_repeat_ngram_size))
    return made


def hf_warpers(p: SamplingParams) -> list[hf.LogitsProcessor]:
    made: list[hf.LogitsProcessor] = []
    if p.temperature not in (0, 1):
        made.append(hf.TemperatureLogitsWarper(p.temperature))
    if p.top_k:
        made.append(hf.TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        made.append(hf.TopPLogitsWarper(p.top_p))
    if p.min_p:
        made.append(hf.MinPLogitsWarper(p.min_p))
    return made
