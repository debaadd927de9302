"""Drafts with another tokenizer: no text is lost on the way, no answer changes, and the draft's cache stays in step."""

import random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from paceline import Coupled, DraftModel, Fixed, Ratio, SamplingParams
from paceline.core.draft import Law
from paceline.decoding import SpeculativeDecoder
from paceline.drafters import vocabularies
from paceline.drafters.chain import CommonTokens
from paceline.drafters.vocabularies import Spelling, Translation, common_tokens, translation
from paceline.errors import IncompatibleModels
from paceline.runner import ModelRunner, wrap_model
from paceline.runner.adapters import share_copy
from tests.attention.common import agree, held, prefilled
from tests.drafters.tokenizers_made import TEXT, TOKENIZERS, _finished, byte_level, permuted, reader
from tests.helpers import memoryless, oracle, result, run, sequence, tokenizer
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("unchecked_types")
PAIRS = [
    ("byte level", "sentencepiece"),
    ("sentencepiece", "byte level, prefixed"),
    ("sentencepiece, no prefix", "byte level, larger"),
    ("byte level", "permuted"),
]
ALPHABETS = [
    "abc the over",
    "  \n\t.",
    "éüßñ",
    "Приве",
    "東京中文",
    "😀👩‍👧🏽",
    "e\u0301\u200d\u00a0",
    "<|im_end|></s><0x41>▁Ġ",
]


def texts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choice(rng.choice(ALPHABETS)) for _ in range(rng.randint(0, 30))) for _ in range(count)]


# Spelling


@pytest.mark.parametrize("name", TOKENIZERS)
def test_any_bytes_are_spelled(name):
    """Whole texts, texts cut inside a character, and bytes that are no text; after any other."""
    spelling, rng = Spelling(reader(name)), random.Random(1)
    for text in [*TEXT, *texts(120), *ALPHABETS, *(chr(code) for code in range(0x20))]:
        data = text.encode()
        at, end = sorted(rng.randint(0, len(data)) for _ in range(2))
        for before, piece in (
            (b"", data),
            (data[:at], data[at:end]),
            (b"", rng.randbytes(9)),
            (data, rng.randbytes(3)),
        ):
            assert spelling.join(spelling.encode(piece, before)) == piece


@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_are_cut_as_the_tokenizer_cuts_them(name):
    spelling, own = Spelling(reader(name)), TOKENIZERS[name]()
    for text in TEXT:
        ids = own(text, add_special_tokens=False)["input_ids"]
        assert spelling.encode(spelling.join(ids)) == ids
        for at in range(1, len(ids) - 1):  # behind what came before, the same tokens
            assert spelling.encode(spelling.join(ids[at:]), spelling.join(ids[:at])) == ids[at:]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_token_stands_for_its_bytes(name):
    spelling, own = Spelling(reader(name)), TOKENIZERS[name]()
    for token in range(len(own)):
        text = own.decode([token])
        if "\ufffd" not in text and text:
            assert spelling.join([token]).decode().strip(" ") == text.strip(" ")


def trained(normalizer=None, alphabet=()) -> Tokenizer:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if normalizer is not None:
        raw.normalizer = normalizer
    raw.train_from_iterator(TEXT, trainers.BpeTrainer(initial_alphabet=list(alphabet), show_progress=False))
    return raw


def model_of(raw: Tokenizer):
    own = _finished(raw)
    return wrap_model(tiny_model("llama", vocab_size=len(own) + 5), own)


def test_what_a_tokenizer_normalises_is_spelled_in_parts():
    spelling = Spelling(model_of(trained(normalizers.NFC(), pre_tokenizers.ByteLevel.alphabet())))
    for text in ("the fox e\u0301 over", "e\u0301e\u0301", *texts(60, 3)):
        assert spelling.join(spelling.encode(text.encode())) == text.encode()


def test_bytes_without_a_token_keep_their_place():
    spelling = Spelling(model_of(trained(alphabet="?")))
    spelled = spelling.join(spelling.encode("the fox 東 over".encode()))
    assert spelled == b"the fox ??? over"


@pytest.mark.parametrize("own", ["lower case", "words"])
def test_tokenizers_that_lose_text_are_refused(own):
    model = wrap_model(tiny_model("llama"), tokenizer())
    if own == "lower case":
        model = model_of(trained(normalizers.Lowercase(), pre_tokenizers.ByteLevel.alphabet()))
    with pytest.raises(IncompatibleModels, match="does not spell"):
        Spelling(model)


# Two texts


def is_in_step(kind, ours: str, theirs: str) -> bool:
    """Read in pieces of any length, what the draft reads is the target's text."""
    target, draft, rng = reader(ours), reader(theirs), random.Random(2)
    one, other = Spelling(target), Spelling(draft)
    ok = True
    for text in [*TEXT, *texts(20, 5)]:
        made: Translation = kind(target, draft, one, other)
        ids = TOKENIZERS[ours]()(text)["input_ids"] + [rng.randrange(len(TOKENIZERS[ours]())) for _ in range(20)]
        expected = one.join(ids[ours.startswith("sentencepiece") :])  # <s> is no text
        for end in sorted({*(rng.randint(1, len(ids)) for _ in range(12)), len(ids)}):
            read = made.read(0, ids[:end])
        read = read[1:] if theirs.startswith("sentencepiece") else read
        ok &= other.join(read) == expected
    return ok


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_the_draft_reads_the_whole_text(ours, theirs):
    assert is_in_step(vocabularies.Strings, ours, theirs)


class TokenByToken(vocabularies.Strings):
    """Without looking back: right, but cut as no tokenizer cuts."""

    def read(self, slot, token_ids):
        text = self._texts.setdefault(slot, vocabularies._Text())
        for token in token_ids[text.num_read :]:
            text.ids += self._theirs.encode(self._ours.join([token]))
        text.num_read = len(token_ids)
        return self._whole(text)


class LooksBackTooFar(vocabularies.Strings):
    """The end that is cut anew is also kept."""

    def read(self, slot, token_ids):
        known = list(self._texts[slot].ids) if slot in self._texts else []
        whole = super().read(slot, token_ids)
        self._texts[slot].ids[: len(known)] = known
        return whole


def test_mutants_of_reading():
    assert not is_in_step(LooksBackTooFar, *PAIRS[0])
    read = {}
    for kind in (vocabularies.Strings, TokenByToken):
        target, draft = reader("sentencepiece, no prefix"), reader("byte level")
        made = kind(target, draft, Spelling(target), Spelling(draft))
        ids = [token for letter in TEXT[0] for token in Spelling(target).encode(letter.encode())]
        for end in range(1, len(ids) + 1):
            read[kind] = made.read(0, ids[:end])
    assert read[vocabularies.Strings] == byte_level()(TEXT[0])["input_ids"] != read[TokenByToken]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_common_tokens_spell_the_same(ours, theirs):
    target, draft = reader(ours), reader(theirs)
    one, other = Spelling(target), Spelling(draft)
    common = common_tokens(target, draft, one, other)
    ends = target.tokenizer.eos_token_id, draft.tokenizer.eos_token_id
    assert common[ends[0]] == ends[1]
    assert len(set(common.values())) == len(common) > 250  # one to one
    assert all(one.join([a]) == other.join([b]) for a, b in common.items() if a != ends[0])


def test_auto_measures_the_intersection():
    modes = {pair: translation("auto", reader(pair[0]), reader(pair[1])).mode for pair in PAIRS}
    assert modes["byte level", "permuted"] == "intersection"
    assert modes["byte level", "sentencepiece"] == "strings"


def test_what_the_draft_writes_is_cut_into_tokens_that_may_be_drafted():
    target, draft = reader("byte level"), reader("sentencepiece")
    made = vocabularies.Strings(target, draft, ours := Spelling(target), theirs := Spelling(draft))
    sampler = vocabularies.DraftSampler(True, frozenset({ours.index[True, b"<image>"]}))
    eos, seq = draft.tokenizer.eos_token_id, sequence(target, ours.encode(b"the qui"), SamplingParams())

    def cut(text: bytes, *more: int) -> bytes:
        return ours.join(made._cut(seq, [*theirs.encode(text), *more], 9, sampler))

    assert cut(b"ck fox") == b"ck fox"
    assert cut(b"ck fox<image> over") == b"ck fox"  # no draft may hold an image
    assert cut("ck é".encode()[:-1]) == b"ck "  # half of a character
    assert cut(b"ck fox", eos) == b"ck fox<|im_end|>"
    assert cut(b"") == b""


# Drafting


def decode(target, drafter, params, verifier=None, depth=5):
    prompts = [Spelling(target).encode(TEXT[row % 3].encode())[: 9 + row] for row in range(len(params))]
    ends = frozenset({target.tokenizer.eos_token_id})
    seqs = [sequence(target, ids, one, row, ends) for row, (ids, one) in enumerate(zip(prompts, params, strict=True))]
    run(ModelRunner(target, 3), drafter, seqs, depth, verifier=verifier)
    if verifier is None:
        for row, (ids, one, seq) in enumerate(zip(prompts, params, seqs, strict=True)):
            assert result(seq) == result(oracle(target, ids, one, row, ends))
    return seqs


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("mode", ["intersection", "strings"])
@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_answers_stay(ours, theirs, mode, temperature):
    """Random models write bytes that are no text: the hardest case."""
    params = [SamplingParams(temperature=temperature, max_tokens=24, top_k=[0, 30][row % 2]) for row in range(4)]
    seqs = decode(reader(ours), DraftModel(reader(theirs, 1, num_hidden_layers=1), vocabulary=mode), params)
    assert sum(r.num_nodes for seq in seqs for r in seq.rounds) > 20


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


def twins():
    """A model without memory, and the same under other token ids."""
    plain = memoryless(eps=0.0)
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
    return wrap_model(target, own), wrap_model(draft, permuted())


def accepted(mode: str, temperature: float) -> float:
    """The share of drafted tokens that stands."""
    target, draft = twins()
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
    decoder.admit(seq)
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


class NeverForgets(DraftModel):
    """What was rejected or cut anew stays in the cache."""

    def observe(self, seqs, draft, logits, walks): ...


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
