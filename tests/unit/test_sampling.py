"""The laws of `paceline.sampling` against transformers' processors and against a slow, obvious oracle."""

import time
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from paceline.core.draft import Law
from paceline.core.outputs import TargetLaw
from paceline.core.request import SamplingParams, Sequence
from paceline.core.rng import Purpose, gumbel
from paceline.core.tree import TokenTree
from paceline.errors import ConfigError, NumericsError
from paceline.sampling import DraftSampler, confidence, target_law, token_logprob, warp
from paceline.sampling import warpers as warpers_module

V = 40
EOS = 3
BAD_WORDS = ((5,), (7, 8), (9, 10, 11))


def sequence(params: SamplingParams, prompt: list[int], answer: list[int] | None = None, seed: int = 1) -> Sequence:
    bad = BAD_WORDS if params.bad_words else ()
    return Sequence(prompt, params, seed, frozenset([EOS]), 10_000, bad, token_ids=prompt + (answer or []))


def root_only(seq: Sequence) -> TokenTree:
    return TokenTree.chain([[seq.token_ids[-1]]])


def shift_by_history(ids: Tensor, scores: Tensor) -> Tensor:
    """A user's processor: what it adds depends on the order of the whole past."""
    weight = (ids[0] * torch.arange(1, ids.shape[1] + 1)).sum()
    return scores + torch.sin(torch.arange(scores.shape[1]) * weight)


def edit_in_place(ids: Tensor, scores: Tensor) -> Tensor:
    scores[:, ids[0, -1]] = -torch.inf
    return scores


# --- the oracle: every processor written out, one node and one token at a time -------------------------------------


def naive_processed(row: Tensor, past: list[int], seq: Sequence) -> Tensor:
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


def check_law(law: TargetLaw, logits: Tensor, seqs: list[Sequence], tree: TokenTree) -> int:
    """Compare every node whose law can be used with the oracle; the number of nodes compared."""
    compared = 0
    for b, seq in enumerate(seqs):
        endings = {*([] if seq.params.ignore_eos else seq.eos_ids), *seq.params.stop_token_ids}
        for i in range(tree.num_nodes):
            past, reachable = list(seq.token_ids), not bool(tree.is_probe[b, i])
            parent = 0
            for node in tree.path_to(b, i):
                token = int(tree.token_ids[b, node])
                before = naive_processed(logits[b, parent], past, seq)
                reachable &= bool(before[token] > -torch.inf) and token not in endings
                past.append(token)
                parent = node
            if not reachable:
                continue
            want = naive_warped(naive_processed(logits[b, i], past, seq), seq.params)
            got = law.scores[b, i].double()
            assert torch.equal(got == -torch.inf, want == -torch.inf), f"row {b}, node {i}: other tokens are forbidden"
            torch.testing.assert_close(torch.log_softmax(got, 0), torch.log_softmax(want, 0), atol=2e-5, rtol=1e-5)
            compared += 1
        assert bool(law.is_greedy[b]) == (seq.params.temperature == 0)
    return compared


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


def random_tree(generator: torch.Generator, roots: list[int], nodes: int, low: int = 0, high: int = 14) -> TokenTree:
    """Branching trees over a few tokens, so that n-grams, bad words and endings do occur; some probes."""
    batch = len(roots)
    tokens = torch.randint(low, high, (batch, nodes), generator=generator)
    tokens[:, 0] = torch.tensor(roots)
    parents = torch.tensor(
        [[-1] + [int(torch.randint(0, i, (), generator=generator)) for i in range(1, nodes)]] * batch
    )
    leaf = torch.ones(batch, nodes, dtype=torch.bool).scatter_(1, parents.clamp(min=0), False)
    probe = leaf & (torch.rand(batch, nodes, generator=generator) < 0.2)
    probe[:, 0] = False
    return TokenTree(tokens, parents, probe)


@pytest.mark.parametrize("warps", WARPS, ids=str)
@pytest.mark.parametrize("history", HISTORY, ids=str)
def test_every_node_of_a_branching_tree(history: str, warps: str) -> None:
    g = torch.Generator().manual_seed(0)
    params = SamplingParams(**HISTORY[history], **WARPS[warps])
    seqs = [
        sequence(
            params, torch.randint(0, 14, (9,), generator=g).tolist(), torch.randint(4, 14, (n,), generator=g).tolist()
        )
        for n in (0, 4)
    ]
    tree = random_tree(g, [s.token_ids[-1] for s in seqs], 8)
    logits = torch.randn(2, 8, V, generator=g) * 2
    before = logits.clone()
    assert check_law(target_law(logits, seqs, tree), logits, seqs, tree) >= 4
    assert torch.equal(logits, before), "the logits were written to"


def law_of_root_prefix(logits: Tensor, seqs: list[Sequence], tree: TokenTree) -> TargetLaw:
    """Mutant: the processors see the committed prefix, whatever the node."""
    parts = [
        target_law(logits[:, i : i + 1], seqs, TokenTree.chain([[s.token_ids[-1]] for s in seqs])) for i in range(8)
    ]
    return TargetLaw(torch.cat([p.scores for p in parts], 1), parts[0].is_greedy)


def law_of_rows_above(logits: Tensor, seqs: list[Sequence], tree: TokenTree) -> TargetLaw:
    """Mutant: the processors see the rows above in the tree instead of the path."""
    above = torch.arange(-1, tree.num_nodes - 1).expand_as(tree.parents)
    return target_law(logits, seqs, TokenTree(tree.token_ids, above, torch.zeros_like(tree.is_probe)))


@pytest.mark.parametrize("mutant", [law_of_root_prefix, law_of_rows_above])
@pytest.mark.parametrize("name", ["repetition", "presence", "frequency", "bigrams", "bad words", "min tokens", "user"])
def test_the_checker_catches_a_wrong_path(mutant: Callable[..., TargetLaw], name: str) -> None:
    caught = 0
    for seed in range(12):
        g = torch.Generator().manual_seed(seed)
        seq = sequence(SamplingParams(**HISTORY[name]), [4, 7, 9, 10], [12, 8, 4, 7])
        tree = random_tree(g, [7], 8, low=4)
        logits = torch.randn(1, 8, V, generator=g)
        check_law(target_law(logits, [seq], tree), logits, [seq], tree)
        try:
            check_law(mutant(logits, [seq], tree), logits, [seq], tree)
        except AssertionError:
            caught += 1
    assert caught > 0


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


@pytest.mark.parametrize("warps", WARPS, ids=str)
@pytest.mark.parametrize("history", ["bias", "bad words", "min tokens", "repetition", "bigrams", "trigrams"])
def test_plain_sequences_match_transformers(history: str, warps: str) -> None:
    g = torch.Generator().manual_seed(1)
    for _ in range(5):
        params = SamplingParams(**HISTORY[history], **WARPS[warps])
        prompt = torch.randint(0, 14, (8,), generator=g).tolist()
        seq = sequence(params, prompt, torch.randint(4, 14, (3,), generator=g).tolist())
        logits = torch.randn(1, 1, V, generator=g) * 3
        chain = hf.LogitsProcessorList(
            [*hf_processors(params, len(prompt), history == "bad words"), *hf_warpers(params)]
        )
        want = chain(torch.tensor([seq.token_ids]), logits[0].double())
        got = target_law(logits, [seq], root_only(seq)).scores[0]
        assert torch.equal(got == -torch.inf, want == -torch.inf)
        torch.testing.assert_close(got.double().softmax(-1), want.softmax(-1), atol=1e-6, rtol=1e-5)


# --- warpers on large vocabularies ---------------------------------------------------------------------------------

SPREADS = {"flat": 0.3, "usual": 2.0, "peaked": 6.0, "constant": 0.0}


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS.keys())
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"top_k": 50},
        {"top_k": 700},
        {"top_k": 5000},
        {"top_p": 0.05},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 40, "top_p": 0.7},
        {"top_k": 300, "top_p": 0.95, "min_p": 0.01},
    ],
    ids=str,
)
def test_truncation_matches_transformers(options: dict, spread: float, ties: bool) -> None:
    g = torch.Generator().manual_seed(2)
    scores = torch.randn(3, 3000, generator=g) * spread
    scores[2, 100:] = -torch.inf  # fewer tokens allowed than a window holds
    if ties:
        scores = (scores * 4).round() / 4
    params = SamplingParams(temperature=1.0, **options)
    got = warp(scores, [params] * 3)
    want = hf.LogitsProcessorList(hf_warpers(params))(torch.zeros(3, 1, dtype=torch.long), scores.double())
    if spread == 0.0 and "top_p" in options:  # equal scores: where rounding puts the boundary is anyone's choice
        assert ((got > -torch.inf).sum(1) - (want > -torch.inf).sum(1)).abs().max() <= 1
        return
    kept = got > -torch.inf
    assert torch.equal(got[kept], scores[kept])
    assert bool(kept.any(-1).all())
    if not ties:
        assert torch.equal(kept, want > -torch.inf)
        return
    # transformers cuts between equal scores in the order of an unstable sort: the scores kept are the same
    assert torch.equal(got.sort(-1).values.double(), want.sort(-1).values)
    for row, keep in zip(scores, kept, strict=True):
        tied = (row == row[keep].min()).nonzero()[:, 0]
        assert keep[tied].int().diff().le(0).all(), "of equal scores the lower token ids are kept"


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.99])
def test_the_windows_do_not_change_the_nucleus(top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(3)
    spreads = torch.tensor([0.1, 0.5, 1.0, 2.0, 4.0, 8.0]).unsqueeze(1)
    scores = ((torch.randn(6, 12_000, generator=g) * spreads) * 32).round() / 32  # rows that stop at every window
    params = [SamplingParams(temperature=1.0, top_p=top_p)] * 6
    widths: list[int] = []
    window = warpers_module._window

    def spy(part: Tensor, width: int) -> tuple[Tensor, Tensor]:
        widths.append(width)
        return window(part, width)

    monkeypatch.setattr(warpers_module, "_window", spy)
    got = warp(scores, params)
    assert widths[0] == 128
    assert (12_000 in widths) == (top_p > 0.5), "the full sort is for broad nuclei only"
    monkeypatch.setattr(warpers_module, "_WINDOWS", ())
    assert torch.equal(got, warp(scores, params))


def test_a_row_is_bitwise_the_same_in_any_batch() -> None:
    g = torch.Generator().manual_seed(4)
    vocab, width = 5003, 3  # an odd vocabulary: rows start at odd addresses
    options = [{**h, **w} for h, w in zip(list(HISTORY.values()) * 2, list(WARPS.values()) * 4, strict=False)]
    options += list(WARPS.values())
    seqs = [sequence(SamplingParams(**o), [4, 5, 6, 7], [8, 9, i % 14]) for i, o in enumerate(options)]
    rows = [[s.token_ids[-1], 10, 11] for s in seqs]
    logits = torch.randn(len(seqs), width, vocab, generator=g) * torch.rand(len(seqs), 1, 1, generator=g) * 6
    for dtype in (torch.float32, torch.bfloat16):
        batch = target_law(logits.to(dtype), seqs, TokenTree.chain(rows))
        for b, seq in enumerate(seqs):
            alone = target_law(logits[b : b + 1].to(dtype), [seq], TokenTree.chain([rows[b]]))
            assert torch.equal(alone.scores[0].float(), batch.scores[b]), options[b]
            if not seq.params.needs_history:  # nor does it matter how many nodes share the pass
                one = target_law(logits[b : b + 1, :1].to(dtype), [seq], TokenTree.chain([rows[b][:1]]))
                assert torch.equal(one.scores[0, 0].float(), batch.scores[b, 0]), options[b]


# --- fast path and errors ------------------------------------------------------------------------------------------


def test_all_greedy_returns_the_logits_themselves() -> None:
    logits = torch.randn(2, 3, V, dtype=torch.bfloat16)
    seqs = [sequence(SamplingParams(top_k=3, min_tokens=2), [1, 2], [3, 4]) for _ in range(2)]
    law = target_law(logits, seqs, TokenTree.chain([[4, 5, 6]] * 2))
    assert law.scores is logits
    assert law.is_greedy.tolist() == [True, True]


def test_a_mixed_batch_is_float32() -> None:
    logits = torch.randn(2, 1, V, dtype=torch.bfloat16)
    seqs = [sequence(SamplingParams(), [1]), sequence(SamplingParams(temperature=2.0), [1])]
    law = target_law(logits, seqs, TokenTree.chain([[1], [1]]))
    assert law.scores.dtype == torch.float32
    assert law.is_greedy.tolist() == [True, False]
    assert torch.equal(law.scores[0], logits[0].float())
    torch.testing.assert_close(law.scores[1], logits[1].float() / 2)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_bad_logits_are_named(value: float) -> None:
    seq = sequence(SamplingParams(temperature=1.0), [1, 2, 3])
    tree = TokenTree.from_lists([[3, 4, 5]], [[-1, 0, 1]])
    logits = torch.zeros(1, 3, V)
    logits[0, 0, 7] = value
    with pytest.raises(NumericsError, match="row 0, node 0, position 3"):
        target_law(logits, [seq], tree)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_overflow_of_a_draft_is_left_to_the_verifier(value: float) -> None:
    seq = sequence(SamplingParams(temperature=0.5, top_k=3, repetition_penalty=1.3), [1, 2, 3])
    logits = torch.randn(1, 3, V)
    tree = TokenTree.from_lists([[3, 4, 5]], [[-1, 0, 1]])
    want = target_law(logits, [seq], tree).scores
    logits[0, 2, 7] = value
    got = target_law(logits, [seq], tree).scores
    assert torch.equal(got[0, :2], want[0, :2])
    assert torch.equal(got[0, 2], logits[0, 2]) or bool(got[0, 2].isnan().any())


def returns_nothing(ids: Tensor, scores: Tensor) -> None:
    scores[:] = 0


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (returns_nothing, "returns_nothing.*NoneType"),
        (lambda ids, scores: scores[0], r"lambda.*\(40,\)"),
        (lambda ids, scores: scores * -torch.inf, "forbid|NaN"),
        (lambda ids, scores: torch.full_like(scores, -torch.inf), r"forbid every token .*node 0"),
        (lambda ids, scores: scores * torch.nan, "NaN"),
    ],
)
def test_bad_processors_are_named(processor: Callable[..., Tensor], words: str) -> None:
    seq = sequence(SamplingParams(logits_processors=(processor,)), [1, 2])
    with pytest.raises((ConfigError, NumericsError), match=words):
        target_law(torch.zeros(1, 1, V), [seq], root_only(seq))


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    seq = sequence(SamplingParams(logit_bias={V: 1.0}), [1, 2])
    with pytest.raises(ConfigError, match="logit_bias"):
        target_law(torch.zeros(1, 1, V), [seq], root_only(seq))


def test_a_processor_never_sees_a_past_that_cannot_happen() -> None:
    seen: list[list[int]] = []

    def record(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(ids[0].tolist())
        return edit_in_place(ids, scores)  # no token twice in a row

    seq = sequence(SamplingParams(logits_processors=(record,)), [1, 2])
    tree = TokenTree.from_lists([[2, 2, 9, EOS, 9, 4, 9]], [[-1, 0, 1, 0, 3, 0, 5]])
    target_law(torch.randn(1, 7, V), [seq], tree)
    assert seen == [[1, 2], [1, 2, 4], [1, 2, 4, 9]]


def test_the_smallest_temperature_is_the_argmax() -> None:
    seq = sequence(SamplingParams(temperature=1e-300, top_p=0.9), [1])
    logits = torch.randn(1, 1, V)
    assert int(target_law(logits, [seq], root_only(seq)).probs().argmax()) == int(logits.argmax())


# --- the draft's side ----------------------------------------------------------------------------------------------


def draft_batch(params: list[SamplingParams], seed: int = 7) -> tuple[Tensor, list[Sequence]]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(len(params), V, generator=g) * 2, [
        sequence(p, [4, 5], [6], seed=i * 97 - 3) for i, p in enumerate(params)
    ]


def test_coupled_draws_are_the_targets_own_when_the_laws_agree() -> None:
    logits, seqs = draft_batch([SamplingParams(**w) for w in WARPS.values()] * 3)
    offset = 2
    tokens, q = DraftSampler(coupled=True).sample(logits, seqs, offset)
    law = target_law(logits.unsqueeze(1), seqs, TokenTree.chain([[6]] * len(seqs)))
    seeds = torch.tensor([s.seed for s in seqs])
    noise = gumbel(seeds, torch.full((len(seqs), 1), 3 + offset), Purpose.TARGET, V)[:, 0]
    noise[law.is_greedy] = 0
    assert q is None
    assert torch.equal(tokens, (law.scores[:, 0] + noise).argmax(-1))
    assert DraftSampler(coupled=True).law is Law.POINT_MASS


def test_q_is_the_law_the_token_was_drawn_from() -> None:
    many = 4000
    params = SamplingParams(temperature=0.9, top_k=6, logit_bias={4: 1.0}, min_tokens=3)
    logits = (torch.randn(1, V, generator=torch.Generator().manual_seed(8)) * 2).expand(many, V)
    seqs = [sequence(params, [4, 5], [6], seed=i) for i in range(many)]
    tokens, q = DraftSampler(coupled=False).sample(logits, seqs, 1)
    assert q is not None
    want = target_law(logits[:1, None], seqs[:1], TokenTree.chain([[6]])).probs()[0, 0]
    torch.testing.assert_close(q[0].double(), want, atol=1e-6, rtol=1e-5)
    counts = torch.bincount(tokens, minlength=V).double()
    assert float(counts[q[0] == 0].sum()) == 0
    expected = q[0].double()[q[0] > 0] * many
    chi = float(((counts[q[0] > 0] - expected) ** 2 / expected).sum())
    assert chi < 25, f"chi-square {chi} with {len(expected) - 1} degrees of freedom"
    assert DraftSampler(coupled=False).law is Law.IID


def test_min_tokens_of_the_draft_counts_the_offset() -> None:
    logits = torch.zeros(1, V)
    logits[0, EOS] = 9.0
    seqs = [sequence(SamplingParams(min_tokens=3), [4, 5], [6])]
    drawn = [int(DraftSampler(coupled=True).sample(logits, seqs, offset)[0]) for offset in range(4)]
    assert [token == EOS for token in drawn] == [False, False, True, True]


@pytest.mark.parametrize("coupled", [True, False])
def test_draft_rows_are_bitwise_independent(coupled: bool) -> None:
    logits, seqs = draft_batch([SamplingParams(**{**h, **w}) for h in HISTORY.values() for w in WARPS.values()])
    tokens, q = DraftSampler(coupled).sample(logits, seqs, 1)
    for b, seq in enumerate(seqs):
        token, law = DraftSampler(coupled).sample(logits[b : b + 1], [seq], 1)
        assert int(token) == int(tokens[b])
        assert (law is None) == (q is None)
        assert law is None or q is None or torch.equal(law[0], q[b])
        if q is not None and seq.params.temperature == 0:
            assert float(q[b, tokens[b]]) == 1.0
            assert float(q[b].sum()) == 1.0


def test_confidence_is_the_softmax_of_the_token() -> None:
    logits = torch.randn(3, V)
    tokens = torch.tensor([1, 2, 3])
    want = logits.softmax(-1)[torch.arange(3), tokens]
    torch.testing.assert_close(confidence(logits, tokens), want)


def test_token_logprob() -> None:
    row = torch.randn(V)
    row[9] = 20.0
    want = torch.log_softmax(row, 0)
    got = token_logprob(row.bfloat16().float(), 4, 3)
    assert got.token_id == 4
    assert next(iter(got.top)) == 9
    assert len(got.top) == 3
    assert got.logprob == pytest.approx(float(want[4]), abs=0.2)
    assert token_logprob(row, 4, 0).top == {}
    assert token_logprob(row, 4, 0).logprob == pytest.approx(float(want[4]))


def test_speed_is_printed() -> None:
    for vocab in (49_152, 151_936):
        logits = torch.randn(1, 6, vocab) * 6  # about as peaked as a language model
        for options in ({}, WARPS["plain"], {"temperature": 1.0, "top_k": 50}, {"temperature": 1.0, "top_p": 0.9}):
            seq = sequence(SamplingParams(**options), [1, 2, 3])
            tree, times = TokenTree.chain([[3, 4, 5, 6, 7, 8]]), []
            for _ in range(7):
                start = time.perf_counter()
                target_law(logits, [seq], tree)
                times.append(time.perf_counter() - start)
            print(f"V={vocab} N=6 {options or 'greedy'}: {min(times) * 1e6:.0f} us")
