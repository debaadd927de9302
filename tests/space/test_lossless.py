"""Whatever the masks say, the answer is plain decoding's: no option, ending, batch or neighbour changes a token."""

import pytest

from paceline import LLM, Choose, PromptLookup, Ratio, SamplingParams
from paceline.core.interfaces import DraftBudget
from paceline.engine.loop import SpeculativeDecoder
from paceline.methods import Space
from paceline.policy import CostModel, Dynamic, Fixed
from paceline.target import ModelRunner, make_runner
from paceline.verify import Coupled
from tests.attention.common import CACHE_MUTANTS, GathersWithoutACopy, sound_after_every_round, with_cache
from tests.helpers import (
    NO_EOS,
    REPEATING,
    SEED,
    VOCAB,
    Budgets,
    all_free,
    assert_identical,
    generate,
    loaded,
    prompt,
    run,
    sequence,
    tokenizer,
)
from tests.space.common import adapter
from tests.space.foresight import KNOWN, SAMPLED, decreed, errs, future, knows, overfitted
from tests.tiny import tiny_model

V = VOCAB


def varying(seq) -> DraftBudget:
    """Another budget every round and row: none, chains, trees, some that stop early or leave out unlikely nodes."""
    turn = len(seq.rounds) + 2 * seq.slot
    depth = (3, 2, 0, 4, 1)[turn % 5]
    stop = (None, lambda sure: len(sure) < 2)[turn % 2]
    return DraftBudget(depth, depth * (2, 9)[turn % 2], 0, stop, ((), [0.02], [0.0, 0.05, 0.2])[turn % 3])


ADAPTERS = {
    "nothing stands": lambda: (adapter(num_masks=3), 2),
    "chain": lambda: (adapter(num_masks=3, shared_mask=True), 1),
    "transition": lambda: (adapter(num_masks=2, transition_rank=4), 3),
    "embeddings only": lambda: (adapter(num_masks=5, rank=0), 2),
    "knows one text": lambda: (overfitted(), 2),
}


def decode(given, top_k, requests, policy=None, invariant=False, name="llama", max_length=None):
    """requests: (prompt, params)."""
    on = make_runner(loaded(name), 3, max_length, invariant)
    requests = [(*one, SEED, NO_EOS, max_length) for one in requests]
    return assert_identical(on, Space(given, top_k), requests, policy=policy or Budgets(varying))


@pytest.mark.diagonal
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters(kind, invariant):
    made, top_k = ADAPTERS[kind]()
    requests = [
        (ids, SamplingParams(temperature=t, max_tokens=24))
        for t in (0.0, 1.0)
        for ids in (KNOWN, REPEATING, [7], prompt(60))
    ]
    seqs = decode(made, top_k, requests, invariant=invariant)
    assert sum(r.num_nodes for seq in seqs for r in seq.rounds) > 50
    if kind == "knows one text":
        assert max(r.num_accepted for r in seqs[4].rounds) > 1


@pytest.mark.parametrize("name", ["mistral", "gpt2", "gemma3", "gpt_neox"])
def test_other_architectures(name):
    """Sliding windows, learned positions, scaled embeddings, one matrix for query, key and value."""
    requests = [(REPEATING, SamplingParams(temperature=t, max_tokens=16)) for t in (0.0, 1.0)]
    rank = 0 if name == "gpt2" else 4  # its layers are no linear ones
    decode(adapter(name, rank=rank), 2, requests, name=name)


# Masks that know the text: everything that can end an answer comes inside a draft that would stand.


def predicted(params, eos=NO_EOS):
    """Loop and slow decoder, where every draft is right as far as the text goes on."""
    on, drafter = decreed(loaded(), knows, 1), Space(adapter(num_masks=3), 1)
    return assert_identical(on, drafter, [(REPEATING, params, SEED, eos)], 3, 15)[0]


@pytest.mark.parametrize("offset", range(8))
def test_ends_inside_a_draft(offset):
    answer = future()[len(REPEATING) :]
    end = answer[4 + offset]
    for params, eos in (
        (SAMPLED, frozenset({end})),
        (SamplingParams(temperature=1.0, max_tokens=40, stop_token_ids=(end,)), NO_EOS),
        (SamplingParams(temperature=1.0, max_tokens=40, min_tokens=4 + offset), frozenset({end})),
    ):
        seq = predicted(params, eos)
        assert seq.finish_reason == "stop"
        assert seq.output_ids == answer[: len(seq.output_ids)]


@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_budgets_of_the_answer(max_tokens):
    seq = predicted(SamplingParams(temperature=1.0, max_tokens=max_tokens))
    assert (seq.num_output, seq.finish_reason) == (max_tokens, "length")
    # The first token comes with the prompt, the second round only hangs masks; then every round takes four, and the
    # last what is left.
    assert len(seq.rounds) == min(2, max_tokens) + -(-max(0, max_tokens - 2) // 4)


@pytest.mark.parametrize(("name", "room"), [("llama", 1), ("llama", 5), *[("gpt2", room) for room in (1, 2, 4, 7)]])
def test_end_of_the_context(name, room):
    """No position past the last exists: learned embeddings have no row for it."""
    target = loaded(name)
    rank = 4 if name == "llama" else 0
    for limit in (target.context, 65):
        requests = [
            (prompt(limit - room - below), SamplingParams(temperature=t, max_tokens=60))
            for below in (0, 3)
            for t in (0.0, 1.0)
        ]
        policy = Budgets(depth=4, nodes=6)
        length = None if limit == target.context else limit
        seqs = decode(adapter(name, rank=rank), 2, requests, policy, name=name, max_length=length)
        assert all(len(seq.token_ids) == limit for seq in seqs)


@pytest.mark.parametrize(("begin", "length"), [(3, 2), (6, 3)])
def test_stop_strings_and_logprobs(begin, length):
    model = tiny_model("llama")
    llm = LLM(model, tokenizer=tokenizer(), drafter=Space(adapter(num_masks=3), 3), policy=Fixed(3, 7))
    whole = llm.plain().generate("abcabcabd", SamplingParams(temperature=1.0, max_tokens=20, seed=5, ignore_eos=True))
    stop = whole[0].text[begin : begin + length]
    for options in ({"stop": (stop,)}, {"logprobs": 3}, {"stop": (stop,), "n": 2, "logprobs": 0}):
        params = SamplingParams(temperature=1.0, max_tokens=20, seed=5, ignore_eos=True, **options)
        ours, plain = (one.generate("abcabcabd", params)[0].outputs for one in (llm, llm.plain()))
        for mine, theirs in zip(ours, plain, strict=True):
            assert (mine.text, mine.token_ids) == (theirs.text, theirs.token_ids)
            for a, b in zip(mine.logprobs or [], theirs.logprobs or [], strict=True):
                assert (a.token_id, list(a.top)) == (b.token_id, list(b.top))
                assert abs(a.logprob - b.logprob) < 1e-4
        assert "".join(c.text for c in llm.stream("abcabcabd", params)) == ours[0].text if "n" not in options else True


# Beside others


@pytest.mark.parametrize("policy", [Fixed, Dynamic, CostModel], ids=["fixed", "dynamic", "cost"])
def test_beside_lookup(policy):
    drafter = Choose([PromptLookup(), Space(overfitted())])
    requests = [(REPEATING, SamplingParams(temperature=t, max_tokens=30)) for t in (0.0, 1.0, 0.5)]
    assert_identical(ModelRunner(loaded(), 2), drafter, requests, 16, policy=policy())


def test_both_draft_and_both_are_right():
    """Rounds of lookup leave no masks; the next of SPACE begins anew."""
    on = decreed(loaded(), knows, 2)
    turns = Budgets(lambda seq: DraftBudget(2, 8, (len(seq.rounds) // 3 + seq.slot) % 2))
    seqs = [sequence(on.loaded, REPEATING, SAMPLED) for _ in range(2)]
    for seq in run(on, Choose([PromptLookup(), Space(adapter(num_masks=3), 1)]), seqs, policy=turns):
        assert seq.token_ids == future()
        mine = [r for r in seq.rounds if r.source == "space" and r.num_drafted]
        assert len(mine) > 2
        assert all(r.num_accepted == r.num_drafted for r in mine)


def test_another_rule():
    """Under a ratio rule the drafts are point masses; the loop takes them, and no noise is shared."""
    on = ModelRunner(loaded(), 1)
    seq = sequence(on.loaded, KNOWN, SamplingParams(temperature=1.0, max_tokens=20))
    run(on, Space(overfitted(), 2), [seq], 3, 6, Ratio())
    assert seq.num_output == 20


# The cache


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_cache_is_plain_decodings_after_every_round(top_k):
    """With top_k 2 second siblings are accepted, whose rows have to be gathered."""
    on, drafter = decreed(loaded(), errs, 1), Space(adapter(num_masks=3), top_k)
    assert sound_after_every_round(on, drafter, REPEATING, 8, SAMPLED, depth=3)


@pytest.mark.parametrize("mutant", [one for one in CACHE_MUTANTS if one is not GathersWithoutACopy])
def test_cache_faults_are_noticed(mutant):
    """The one left out errs where accepted nodes lie one off their places: no order that these trees have."""
    on = with_cache(decreed(loaded(), errs, 1), mutant)
    assert not sound_after_every_round(on, Space(adapter(num_masks=3), 2), REPEATING, 10, SAMPLED, depth=3)


def test_interrupted_answers():
    """Closed early, the slots are free, and the next answer is right."""
    on, drafter = ModelRunner(loaded(), 2), Space(adapter(num_masks=3), 2)
    decoder = SpeculativeDecoder(on, drafter, Coupled(), Fixed(3))
    for _, turn in zip(
        generate(decoder, [sequence(on.loaded, REPEATING, SAMPLED) for _ in range(3)]), range(3), strict=False
    ):
        assert turn < 3
    assert all_free(on)
    assert not drafter._predicted
    (seq,) = run(on, drafter, [sequence(on.loaded, REPEATING, SAMPLED)], 3)
    assert seq.token_ids == future()
