"""What drafters keep between rounds, against what a fresh one would know."""

import pytest
import torch

from paceline import Coupled, DraftModel, Fixed, PromptLookup, SamplingParams, SelfQuantized
from paceline.engine.loop import SpeculativeDecoder
from paceline.errors import DraftError
from paceline.target import ModelRunner
from paceline.verify import Ratio
from tests.attention.common import agree, held, prefilled
from tests.exactness.drafters import small_draft, twin
from tests.helpers import REPEATING, admit, loaded, prompt, reading_apart, sequence

PARAMS = SamplingParams(temperature=1.0, max_tokens=20)


def steps(drafter, ids, params=PARAMS, rounds=8, depth=4, verifier=None, target=None):
    """The decoder and the sequence after each of the rounds, released at the end."""
    target = target or loaded()
    decoder = SpeculativeDecoder(reading_apart(ModelRunner(target, 2)), drafter, verifier or Coupled(), Fixed(depth))
    seq = sequence(target, ids, params)
    admit(decoder, seq)
    for _ in range(rounds):
        if seq.is_finished:
            break
        decoder.step([seq])
        yield decoder, seq
    decoder.release(seq)


def is_in_step(drafter: DraftModel, ids: list[int], draft=None, **options) -> bool:
    """Invariant 1: the draft has cached all but the last token, or all but two after a block was accepted whole.

    And what it cached is what a fresh prefill of the text gives it.
    """
    for _, seq in steps(drafter, ids, **options):
        if seq.is_finished:
            break
        cached, last = drafter.runner.cache.lengths[seq.slot], seq.rounds[-1]
        whole = last.num_drafted > 0 and last.num_accepted == last.num_drafted
        if cached != len(seq.token_ids) - (2 if whole else 1):
            return False
        if not agree(held(drafter.runner, seq.slot), prefilled(drafter.runner.loaded, seq.token_ids[:cached])):
            return False
    return True


@pytest.mark.diagonal
@pytest.mark.parametrize("verifier", [Coupled, Ratio])
@pytest.mark.parametrize("length", [1, 4, 9, 60])
def test_draft_cache_is_in_step(length, verifier):
    assert is_in_step(DraftModel(small_draft()), prompt(length), verifier=verifier())
    assert is_in_step(DraftModel(twin(loaded())), prompt(length), verifier=verifier())


def tokens_read(drafter: DraftModel, chunk: int) -> list[int]:
    """How many tokens of two long prompts the draft read in each round, until it drafts for both."""
    target = loaded()
    decoder = SpeculativeDecoder(ModelRunner(target, 2), drafter, Coupled(), Fixed(4))
    drafter.runner.chunk = chunk
    seqs = [sequence(target, prompt(length, length), PARAMS) for length in (100, 50)]
    for seq in seqs:
        admit(decoder, seq)
    cached = drafter.runner.cache.lengths
    read = list[int]()
    while not all(seq.rounds and seq.rounds[-1].num_drafted for seq in seqs):
        before = sum(cached[seq.slot] for seq in seqs)
        decoder.step(seqs)
        drafted = sum(seq.rounds[-1].num_drafted for seq in seqs)
        assert [seq.rounds[-1].num_drafted == 0 for seq in seqs] == [
            cached[seq.slot] < len(seq.token_ids) - 10 for seq in seqs
        ]
        read.append(sum(cached[seq.slot] for seq in seqs) - before - drafted)
    for seq in seqs:
        assert agree(held(drafter.runner, seq.slot), prefilled(small_draft(), seq.token_ids[: cached[seq.slot]]))
        decoder.release(seq)
    return read


def test_a_draft_model_reads_one_chunk_of_prompts_in_a_round():
    read = tokens_read(DraftModel(small_draft()), 32)
    assert read[:2] == [32, 32]
    assert max(read) < 2 * 32  # the last tokens of a prompt ride along with the first draft


class ReadsAChunkOfEach(DraftModel):
    """Every row reads a chunk, so that a round takes longer the more prompts are read."""

    def _prefill(self, slot, text, most):
        super()._prefill(slot, text, most)
        return 0


def test_a_chunk_of_each_prompt_is_noticed():
    assert max(tokens_read(ReadsAChunkOfEach(small_draft()), 32)) >= 2 * 32


class NeverForgets(DraftModel):
    """Rejected tokens stay in the draft's cache."""

    def observe(self, seqs, draft, logits, walks): ...


class ForgetsOneTooFew(DraftModel):
    """The recovered token's place still holds the rejected one."""

    def observe(self, seqs, draft, logits, walks):
        for seq in seqs:
            cached = self.runner.cache.lengths[seq.slot]
            self.runner.cache.truncate(seq.slot, min(cached, seq.num_cached + 1))


class ForgetsTooMuch(DraftModel):
    """Right, and slower every round: the symptom is work, not text."""

    def observe(self, seqs, draft, logits, walks):
        super().observe(seqs, draft, logits, walks)
        for seq in seqs:
            self.runner.cache.truncate(seq.slot, max(0, self.runner.cache.lengths[seq.slot] - 2))


class OneShort(DraftModel):
    """After a whole block it skips the token it never fed, as if it had been cached."""

    def propose(self, seqs, budgets):
        made = super().propose(seqs, budgets)
        for seq, budget in zip(seqs, budgets, strict=True):
            self.runner.cache.lengths[seq.slot] += budget.depth > 0
        return made


@pytest.mark.parametrize("mutant", [NeverForgets, ForgetsOneTooFew, ForgetsTooMuch, OneShort])
def test_mutants_are_out_of_step(mutant):
    caught = 0
    for draft in (small_draft(), twin(loaded())):
        try:
            caught += not is_in_step(mutant(draft), prompt(9))
        except (AssertionError, IndexError):  # some break down instead of drafting badly
            caught += 1
    assert caught


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
@pytest.mark.parametrize("verifier", [Coupled, Ratio])
def test_draft_with_the_target_s_weights_is_always_right(temperature, verifier):
    """Anything rejected would be a fault of position or cache in the draft; 5 tokens a round, every round."""
    params = SamplingParams(temperature=temperature, max_tokens=21, top_k=20)
    drafter = DraftModel(twin(loaded()))
    for _, seq in steps(drafter, REPEATING, params, verifier=verifier()):
        assert seq.rounds[-1].num_accepted == seq.rounds[-1].num_drafted


def test_draft_that_joins_late_catches_up():
    """A drafter may meet a text in the middle: everything it needs stands in its tokens."""
    target = loaded()
    drafter = DraftModel(twin(target))
    decoder = SpeculativeDecoder(ModelRunner(target, 1), drafter, Coupled(), Fixed(4))
    seq = sequence(target, REPEATING, PARAMS)
    admit(decoder, seq)
    real, drafter.propose = drafter.propose, lambda seqs, budgets: real(seqs, Fixed(0).budgets(seqs))
    for _ in range(10):
        decoder.step([seq])
    drafter.propose = real
    decoder.step([seq])
    assert seq.rounds[-1].num_accepted == 4
    decoder.release(seq)


def test_no_row_of_the_self_draft_survives():
    """After each round the cache is, bit for bit, that of the same text decoded with the same shapes by the target.

    The twin drafts the same number of tokens, so both passes have the same rows; only the writer of the draft differs.
    """
    assert survivors(SelfQuantized(lm_head="shared")) == 0


class Survives(SelfQuantized):
    """The root's row is put back as the draft wrote it."""

    def propose(self, seqs, budgets):
        made = super().propose(seqs, budgets)
        (seq,) = seqs
        at = seq.num_cached
        cache = self._runner.cache
        self.kept = [layer[seq.slot, :, at].clone() for layer in (*cache.keys, *cache.values)]
        return made

    def observe(self, seqs, draft, logits, walks):
        (seq,) = seqs
        cache = self._runner.cache
        at = seq.num_cached - seq.rounds[-1].num_emitted
        for layer, row in zip((*cache.keys, *cache.values), self.kept, strict=True):
            layer[seq.slot, :, at] = row


def test_a_surviving_row_is_caught():
    assert survivors(Survives(lm_head="shared")) > 0


def survivors(drafter: SelfQuantized) -> int:
    """Rounds after which some committed row differs from those of the replay: same slot, same trees, no self-draft."""
    target, replay = loaded(), ModelRunner(loaded(), 2)
    slot = replay.admit(REPEATING)
    replay.extend_cache(slot, REPEATING[:-1])
    trees, paths = [], []
    observe = drafter.observe

    def record(seqs, draft, logits, walks):
        observe(seqs, draft, logits, walks)
        trees.append(draft.tree)
        paths.append(walks[0].path)

    drafter.observe = record
    count = 0
    for decoder, seq in steps(drafter, REPEATING, target=target):
        if seq.is_finished:
            break
        assert seq.slot == slot
        replay.forward([slot], trees[-1])
        replay.commit([slot], [paths[-1]])
        ours, theirs = held(decoder.runner, slot), held(replay, slot)
        count += not all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    return count


def test_a_self_draft_that_fails_rolls_back():
    drafter = SelfQuantized(lm_head="shared")
    for decoder, seq in steps(drafter, REPEATING, rounds=1):
        length = decoder.runner.cache.lengths[seq.slot]
        drafter._chains = None
        with pytest.raises(DraftError, match="AttributeError"):
            decoder.step([seq])
        assert decoder.runner.cache.lengths[seq.slot] == length == seq.num_cached


@pytest.mark.parametrize(
    ("match", "tokens", "expected"),
    [
        ("recent", [1, 2, 3, 9, 1, 2, 4, 8, 1, 2], [4, 8, 1]),
        ("first", [1, 2, 3, 9, 1, 2, 4, 8, 1, 2], [3, 9, 1]),
        ("recent", [1, 2, 3, 4], []),
        ("recent", [7], []),
        ("recent", [5, 5], [5, 5, 5]),  # a copy that runs into its own start goes on periodically
        ("recent", [3, 4, 3, 4], [3, 4, 3]),
        ("recent", [6, 1, 2, 3, 7, 2, 3, 8, 1, 2, 3], [7, 2, 3]),  # three tokens tell more than two
    ],
)
def test_lookup(match, tokens, expected):
    seq = sequence(loaded(), tokens, PARAMS, slot=0)
    draft = PromptLookup(match=match).propose([seq], Fixed(3).budgets([seq]))
    assert draft.tree.token_ids[0].tolist() == [tokens[-1], *expected]


def test_lookup_index_grows_with_the_text():
    """Drafting after every token equals a fresh drafter's proposal on the same text."""
    grown = PromptLookup()
    text = [t % 5 for t in prompt(60, 7)]
    for end in range(1, len(text)):
        seq = sequence(loaded(), text[:end], PARAMS, slot=0)
        budget = Fixed(4).budgets([seq])
        assert torch.equal(
            grown.propose([seq], budget).tree.token_ids, PromptLookup().propose([seq], budget).tree.token_ids
        )
