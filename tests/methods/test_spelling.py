"""Spelling: the tokens of any text, and of bytes that are no text, stand for exactly those bytes."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AddedToken

from paceline.errors import IncompatibleModels
from paceline.methods.draft_model.spelling import Spelling
from paceline.target import wrap_model
from tests.helpers import tokenizer
from tests.methods.tokenizers_made import TEXT, TOKENIZERS, finished, reader
from tests.tiny import tiny_model

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
    own = finished(raw)
    return wrap_model(tiny_model("llama", vocab_size=len(own) + 5), own)


def test_what_a_tokenizer_normalises_is_spelled_in_parts():
    spelling = Spelling(model_of(trained(normalizers.NFC(), pre_tokenizers.ByteLevel.alphabet())))
    for text in ("the fox e\u0301 over", "e\u0301e\u0301", *texts(60, 3)):
        assert spelling.join(spelling.encode(text.encode())) == text.encode()


def test_bytes_without_a_token_keep_their_place():
    spelling = Spelling(model_of(trained(alphabet="?")))
    spelled = spelling.join(spelling.encode("the fox 東 over".encode()))
    assert spelled == b"the fox ??? over"


LOSSY = {
    "words": lambda: tokenizer(),
    "lower case": lambda: finished(trained(normalizers.Lowercase(), pre_tokenizers.ByteLevel.alphabet())),
    "wordpiece": lambda: wordpiece(),
}


def wordpiece():
    """As of BERT, cased: spaces are not in its tokens."""
    raw = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    raw.normalizer, raw.pre_tokenizer = normalizers.BertNormalizer(lowercase=False), pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece()
    raw.train_from_iterator(TEXT, trainers.WordPieceTrainer(special_tokens=["[UNK]"], show_progress=False))
    return finished(raw, unk_token="[UNK]")


@pytest.mark.parametrize("own", LOSSY)
def test_tokenizers_that_lose_text_are_refused(own):
    made = LOSSY[own]()
    with pytest.raises(IncompatibleModels) as caught:
        Spelling(wrap_model(tiny_model("llama", vocab_size=max(97, len(made))), made))
    for words in ("does not spell", "Expected: byte-level BPE", "take a draft of the target's own family"):
        assert words in str(caught.value)


NORMALIZERS = {
    "accents": normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
    "NFKC": normalizers.NFKC(),
    "spaces": normalizers.Replace("  ", " "),
    "ends": normalizers.Strip(),
}


@pytest.mark.parametrize("name", NORMALIZERS)
def test_what_a_normaliser_loses_is_spelled_nevertheless(name):
    """Each of them keeps plain text, so that the tokenizer is taken, and changes other texts."""
    spelling = Spelling(model_of(trained(NORMALIZERS[name], pre_tokenizers.ByteLevel.alphabet())))
    for text in (" a  b  ", "½ ﬁ é e\u0301", "x\u3000", *texts(60, 4)):
        assert spelling.join(spelling.encode(text.encode(), b"the ")) == text.encode()


def test_added_tokens_that_swallow_spaces_are_spelled():
    own = finished(trained(alphabet=pre_tokenizers.ByteLevel.alphabet()))
    own.add_tokens([AddedToken("<tool>", lstrip=True, rstrip=True), AddedToken("fox jumps", single_word=True)])
    own.add_special_tokens({"mask_token": AddedToken("<mask>", lstrip=True, special=True)})
    spelling = Spelling(wrap_model(tiny_model("llama", vocab_size=len(own)), own))
    for text in ("a <tool>  b", " <mask> the", "<tool><mask>", "the fox jumps", "xfox jumpsy", "<tool", "<mask>"):
        for at in range(len(text)):
            before, data = text[:at].encode(), text[at:].encode()
            assert spelling.join(spelling.encode(data, before)) == data
    ids = [own.convert_tokens_to_ids(token) for token in ("<tool>", "<mask>", "fox jumps")]
    assert spelling.join(ids) == b"<tool><mask>fox jumps"
