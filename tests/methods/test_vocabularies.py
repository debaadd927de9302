"""Drafts with another tokenizer: no text is lost on the way, no answer changes, and the draft's cache stays in step."""

import math
import random
from bisect import bisect_left

import pytest
import torch

from paceline import LLM, Coupled, DraftModel, Dynamic, Fixed, Ouroboros, PromptLookup, Ratio, SamplingParams, Suffix
from paceline.core.draft import Law
from paceline.core.interfaces import DraftBudget
from paceline.engine.loop import SpeculativeDecoder
from paceline.errors import IncompatibleModels
from paceline.methods import Blockwise, Choose, Eagle, Medusa, Space
from paceline.methods.draft_model import vocabularies
from paceline.methods.draft_model.chain import CommonTokens
from paceline.methods.draft_model.spelling import Spelling
from paceline.methods.draft_model.vocabularies import Translation, common_tokens, translation
from paceline.target import ModelRunner, wrap_model
from paceline.target.adapters import share_copy
from tests.attention.common import agree, held, prefilled
from tests.helpers import admit, assert_identical, loaded, memoryless, run, sequence
from tests.methods.heads import blockwise, medusa, random_head
from tests.methods.space.common import adapter
from tests.methods.test_draft_caches import NeverForgets
from tests.methods.test_spelling import texts
from tests.methods.tokenizers_made import TEXT, TOKENIZERS, byte_level, permuted, reader
from tests.tiny import tiny_model

PAIRS = [
    ("byte level", "sentencepiece"),
    ("sentencepiece", "byte level, prefixed"),
    ("sentencepiece, no prefix", "byte level, larger"),
    ("byte level", "permuted"),
]


# Two texts


def is_in_step(kind, ours: str, theirs: str) -> bool:
    """Read in pieces of any length, what the draft reads is the target's text."""
    target, draft, rng = reader(ours), reader(theirs), random.Random(2)
    one, other = Spelling(target), Spelling(draft)
    ok = True
    for text in [*TEXT, *texts(20, 5)]:
        made = kind("strings", target, draft, one, other)
        ids = TOKENIZERS[ours]()(text)["input_ids"] + [rng.randrange(len(TOKENIZERS[ours]())) for _ in range(20)]
        expected = one.join(ids[ours.startswith("sentencepiece") :])  # <s> is no text
        for end in sorted({*(rng.randint(1, len(ids)) for _ in range(12)), len(ids)}):
            read = made.read(0, ids[:end])
        read = read[1:] if theirs.startswith("sentencepiece") else read
        ok &= other.join(read) == expected
    return ok


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_the_draft_reads_the_whole_text(ours, theirs):
    assert is_in_step(Translation, ours, theirs)


def test_a_text_that_spells_the_beginning_of_the_drafts_has_no_other():
    target, draft = reader("byte level"), reader("sentencepiece")
    read = [
        Translation("strings", target, draft, Spelling(target), Spelling(draft)).read(0, target.tokenizer.encode(text))
        for text in ("<s>" + TEXT[0], TEXT[0])
    ]
    assert read[0] == read[1]
    assert read[0].count(draft.tokenizer.bos_token_id) == 1


class TokenByToken(Translation):
    """Without looking back: right, but cut as no tokenizer cuts."""

    def read(self, slot, token_ids):
        text = self._texts.setdefault(slot, vocabularies._Text())
        for token in token_ids[text.num_read :]:
            text.ids += self._theirs.encode(self._ours.join([token]))
        text.num_read = len(token_ids)
        return self._whole(text)


class LooksBackTooFar(Translation):
    """The end that is cut anew is also kept."""

    def read(self, slot, token_ids):
        known = list(self._texts[slot].ids) if slot in self._texts else []
        whole = super().read(slot, token_ids)
        self._texts[slot].ids[: len(known)] = known
        return whole


def test_mutants_of_reading():
    assert not is_in_step(LooksBackTooFar, *PAIRS[0])
    read = {}
    for kind in (Translation, TokenByToken):
        target, draft = reader("sentencepiece, no prefix"), reader("byte level")
        made = kind("strings", target, draft, Spelling(target), Spelling(draft))
        ids = [token for letter in TEXT[0] for token in Spelling(target).encode(letter.encode())]
        for end in range(1, len(ids) + 1):
            read[kind] = made.read(0, ids[:end])
    assert read[Translation] == byte_level()(TEXT[0])["input_ids"] != read[TokenByToken]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_common_tokens_spell_the_same(ours, theirs):
    target, draft = reader(ours), reader(theirs)
    one, other = Spelling(target), Spelling(draft)
    common = common_tokens(one, other)
    ends = target.tokenizer.eos_token_id, draft.tokenizer.eos_token_id
    assert common[ends[0]] == ends[1]
    assert len(set(common.values())) == len(common) > 250  # one to one
    assert all(one.join([a]) == other.join([b]) for a, b in common.items() if a != ends[0])


def test_auto_goes_by_the_share_of_the_texts_in_the_intersection():
    target, draft = reader("byte level"), reader("sentencepiece")
    auto, ours = translation("auto", target, draft), Spelling(target)
    common, other = set(auto.common.draft_ids), set(range(target.vocab_size)) - set(auto.common.draft_ids)
    inside, outside = [*common][:90], [*other][:11]
    assert len(outside) == 11
    assert auto.common_for([inside]) is auto.common
    assert auto.common_for([inside + outside[:10]]) is auto.common  # nine in ten
    assert auto.common_for([inside + outside]) is None
    assert auto.common_for([inside, inside + outside]) is auto.common  # a batch has one way
    assert auto.common_for([outside * 30 + inside * 3]) is auto.common  # what is far back does not count
    assert auto.common_for([ours.encode(TEXT[0].encode())]) is None
    assert translation("auto", target, reader("permuted")).common_for([inside + outside]) is not None


def test_what_the_draft_writes_is_cut_into_tokens_that_may_be_drafted():
    target, draft = reader("byte level"), reader("sentencepiece")
    made = Translation("strings", target, draft, ours := Spelling(target), theirs := Spelling(draft))
    banned = frozenset({ours.index[True, b"<image>"]})
    eos, seq = draft.tokenizer.eos_token_id, sequence(target, ours.encode(b"the qui"), SamplingParams())

    def cut(text: bytes, *more: int) -> bytes:
        return ours.join(made._cut(seq, [*theirs.encode(text), *more], 9, banned))

    assert cut(b"ck fox") == b"ck fox"
    assert cut(b"ck fox<image> over") == b"ck fox"  # no draft may hold an image
    assert cut("ck é".encode()[:-1]) == b"ck "  # half of a character
    assert cut(b"ck fox", eos) == b"ck fox<|im_end|>"
    assert cut(b"") == b""


# Drafting


def decode(target, drafter, params, verifier=None, depth=5):
    prompts = [Spelling(target).encode(TEXT[row % 3].encode())[: 9 + row] for row in range(len(params))]
    ends = frozenset({target.tokenizer.eos_token_id})
    on, requests = ModelRunner(target, 3), [(prompts[row], one, row, ends) for row, one in enumerate(params)]
    if verifier is None:
        return assert_identical(on, drafter, requests, depth)
    return run(on, drafter, [sequence(target, *one) for one in requests], depth, verifier=verifier)


@pytest.mark.diagonal
@pytest.mark.parametrize("mode", ["auto", "intersection", "strings"])
@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_answers_stay(ours, theirs, mode):
    """Random models write bytes that are no text: the hardest case."""
    params = [SamplingParams(t, max_tokens=24, top_k=top_k) for t in (0.0, 0.8) for top_k in (0, 30)]
    seqs = decode(reader(ours), DraftModel(reader(theirs, 1, num_hidden_layers=1), vocabulary=mode), params)
    assert sum(r.num_nodes for seq in seqs for r in seq.rounds) > 20


def products_agree() -> bool:
    """Byte by byte: the confidence in a token of the draft belongs to the byte that it begins with."""
    target, draft = reader("byte level"), reader("sentencepiece", 1)
    ours, theirs, ok = Spelling(target), Spelling(draft), True
    drafter, slow = DraftModel(draft, vocabulary="strings"), tiny_model("llama", seed=1, vocab_size=draft.vocab_size)
    drafter.bind(ModelRunner(target, 3), Coupled())
    seqs = [sequence(target, ours.encode(text.encode()), SamplingParams(max_tokens=40)) for text in TEXT]
    for slot, seq in enumerate(seqs):
        seq.slot = slot
    made = drafter.propose(seqs, [DraftBudget(9, 9, should_continue=lambda confidences: len(confidences) < 7)] * 3)
    for slot, tokens in enumerate(made.tree.lists.token_ids):
        text = drafter.translation._texts[slot]
        with torch.inference_mode():
            probs = slow.eval()(torch.tensor([text.fed])).logits[0].softmax(-1)
        of_bytes = list[float]()
        for place in range(text.num_same, len(text.fed)):
            token = text.fed[place]
            of_bytes += [float(probs[place - 1, token])] + [1.0] * (len(theirs.join([token])) - 1)
        for node in range(1, len(tokens)):
            size, given = len(ours.join(tokens[node : node + 1])), float(made.confidence[slot, node])
            if not math.isnan(given):  # padding
                ok &= given == pytest.approx(math.prod(of_bytes[:size]), rel=1e-4)
                of_bytes = of_bytes[size:]
        ok &= len(text.fed) - text.num_same == 7
    return ok and made.tree.num_nodes > 4


def test_confidences_of_strings(monkeypatch):
    assert products_agree()
    monkeypatch.setattr(vocabularies, "bisect_right", bisect_left)  # to the token before
    assert not products_agree()


@pytest.mark.parametrize("mode", ["intersection", "strings"])
def test_drafts_in_another_vocabulary_have_confidences(mode):
    target, policy = reader("byte level"), Dynamic()
    drafter = DraftModel(reader("sentencepiece", 1), vocabulary=mode)
    llm = LLM(target, drafter=drafter, policy=policy, max_num_seqs=2)
    prompts = [Spelling(target).encode(text.encode()) for text in TEXT]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    got = llm.generate(prompts, params)
    assert [one.token_ids for one in got] == [one.token_ids for one in llm.plain().generate(prompts, params)]
    drafted = [one for out in got for one in out.outputs[0].rounds if one.num_drafted]
    assert drafted
    assert all(len(one.confidences) == one.num_nodes for one in drafted)


TOGETHER = {
    "suffix + ouroboros": lambda draft: Choose([Suffix(), Ouroboros(DraftModel(draft), 3)]),
    "lookup + model": lambda draft: Choose([PromptLookup(), DraftModel(draft)]),
    "ouroboros": lambda draft: Ouroboros(DraftModel(draft, vocabulary="intersection"), 3),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("together", TOGETHER)
@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_answers_stay_beside_other_drafters(ours, theirs, together):
    target, draft = reader(ours), reader(theirs, 1, num_hidden_layers=1)
    spelling, drafter = Spelling(target), TOGETHER[together](draft)
    texts = [TEXT[0] * 3, TEXT[1], TEXT[2] + TEXT[2][:40]]
    params = [SamplingParams(t, max_tokens=size, seed=size) for t, size in ((0.0, 24), (1.0, 9), (1.0, 30))]
    prompts = [spelling.encode(text.encode()) for text in texts]
    llm = LLM(target, drafter=drafter, policy=Fixed(6, 20), max_num_seqs=3)
    got, plain = llm.generate(prompts, params), llm.plain().generate(prompts, params)
    assert [one.token_ids for one in got] == [one.token_ids for one in plain]
    assert sum(one.num_drafted for out in got for one in out.outputs[0].rounds) > 10


def test_ouroboros_drafts_no_phrase_that_the_draft_model_cannot_read():
    target, draft = reader("byte level"), reader("sentencepiece", 1)
    with pytest.raises(IncompatibleModels, match=r"by strings[\s\S]*vocabulary=\"intersection\""):
        LLM(target, drafter=Ouroboros(DraftModel(draft, vocabulary="strings")))
    drafter = Ouroboros(DraftModel(draft), 3)
    drafter.bind(ModelRunner(target, 1), Coupled())
    drafter.pool.read(range(3, target.vocab_size - 5), 0)
    phrases = [phrase for first in range(target.vocab_size) for phrase in drafter.pool.after(first)]
    assert phrases
    assert all(token in drafter.draft.translation.common.draft_ids for phrase in phrases for token in phrase)


HEADS = {
    "eagle": lambda other: Eagle(random_head(other, 3)),
    "medusa": lambda other: Medusa(medusa(other)),
    "blockwise": lambda other: Blockwise(blockwise(other)),
    "mtp": lambda other: Eagle(random_head(other, "mtp")),
    "space": lambda other: Space(adapter()),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_need_the_target_s_tokenizer(name):
    target, other = reader("byte level"), loaded()
    with pytest.raises(IncompatibleModels) as caught:
        LLM(target, drafter=HEADS[name](other))
    for words in (f"vocab size {other.vocab_size}", f"vocab size {target.vocab_size}", "train a head for this target"):
        assert words in str(caught.value)


@pytest.mark.parametrize("mode", ["intersection", "strings"])
def test_the_ratio_rule_takes_them(mode):
    params = [SamplingParams(temperature=t, max_tokens=24) for t in (0.0, 1.0)]
    drafter, laws = DraftModel(reader("sentencepiece", 1), vocabulary=mode), set[Law]()
    propose = drafter.propose

    def noted(seqs, budgets):
        laws.add((made := propose(seqs, budgets)).law)
        return made

    drafter.propose = noted
    decode(reader("byte level"), drafter, params, Ratio())
    assert laws - {Law.POINT_MASS} == ({Law.IID} if mode == "intersection" else set())


def twin_models():
    """A model without memory for `byte_level`, and the same for `permuted`."""
    plain = memoryless(eps=1e-30)
    assert plain.vocab_size == 97
    own = byte_level()
    target = tiny_model("llama", torch.float64, vocab_size=len(own))
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
    draft = share_copy(target)
    order = torch.tensor([permuted().convert_tokens_to_ids(own.convert_ids_to_tokens(i)) for i in range(len(own))])
    with torch.no_grad():
        for find in ("get_input_embeddings", "get_output_embeddings"):
            rows = getattr(target, find)().weight
            moved = torch.nn.Parameter(torch.empty_like(rows).index_copy_(0, order, rows.detach()))
            getattr(draft, find)().weight = moved
    return target, draft


def accepted(mode: str, temperature: float) -> float:
    """The share of drafted tokens that stands."""
    target, draft = twin_models()
    target, draft = wrap_model(target, byte_level()), wrap_model(draft, permuted())
    params = [SamplingParams(temperature=temperature, max_tokens=40)] * 3
    seqs = decode(target, DraftModel(draft, vocabulary=mode), params)
    rounds = [one for seq in seqs for one in seq.rounds[1:-1]]
    return sum(one.num_accepted for one in rounds) / sum(one.num_drafted for one in rounds)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_that_knows_the_target_is_mostly_right(temperature):
    """Not always: the random text is cut otherwise when it is read again, and the draft begins elsewhere."""
    assert accepted("intersection", temperature) > 0.6


def test_strings_are_right_where_the_text_is_cut_alike():
    assert accepted("strings", 0.0) > 0.3


def test_columns_of_other_tokens_are_noticed(monkeypatch):
    class Shifted(CommonTokens):
        def __init__(self, draft_ids, device):
            super().__init__(draft_ids, device)
            self._target = self._target.roll(1)

    monkeypatch.setattr(vocabularies, "CommonTokens", Shifted)
    assert accepted("intersection", 0.0) < 0.2


def cache_agrees(drafter: DraftModel, ours: str) -> bool:
    """After each round the draft has cached what a fresh prefill of its text gives."""
    target = reader(ours)
    decoder = SpeculativeDecoder(ModelRunner(target, 2), drafter, Coupled(), Fixed(4))
    seq = sequence(target, Spelling(target).encode(TEXT[0].encode()), SamplingParams(temperature=1.0, max_tokens=40))
    admit(decoder, seq)
    used = False
    while not seq.is_finished:
        decoder.step([seq])
        cached = drafter.runner.cache.lengths[seq.slot]
        text = drafter.translation.read(seq.slot, seq.token_ids)
        used |= cached > 20
        if not (
            cached < len(text)
            and agree(held(drafter.runner, seq.slot), prefilled(drafter.runner.loaded, text[:cached]))
        ):
            return False
    decoder.release(seq)
    return used


class CountsOnly(DraftModel):
    """As if the accepted text were what was drafted."""

    def observe(self, seqs, draft, logits, walks):
        for seq in seqs:
            length = len(self._text(seq)) - 1
            self.runner.cache.truncate(seq.slot, min(self.runner.cache.lengths[seq.slot], length))


@pytest.mark.parametrize("mode", ["intersection", "strings"])
def test_the_draft_s_cache_is_in_step(mode):
    for ours, theirs in PAIRS[:3]:
        draft = reader(theirs, 1)
        assert cache_agrees(DraftModel(draft, vocabulary=mode), ours)
        for mutant in (NeverForgets, CountsOnly):
            assert not cache_agrees(mutant(draft, vocabulary=mode), ours)
