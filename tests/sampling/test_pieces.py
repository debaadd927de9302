"""The bytes and the text of single tokens: those of llguidance, and joined those of the decoded text."""

import random
from functools import cache

import pytest
from llguidance.hf import from_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from paceline.sampling.detokenize import Detokenizer
from paceline.sampling.pieces import Pieces
from tests.methods.test_spelling import wordpiece
from tests.methods.tokenizers_made import TOKENIZERS
from tests.real_models import default_model

SAID = [
    "Say 😀! 👩‍👩‍👧‍👦 and 👍🏽.",
    "naïve “façade”\n\n日本語のテキスト, 한국어",
    "the  fox\tjumps true\r\n \n",
    "é",
    "ends within 🏳️‍🌈",
]


def smollm2():
    return AutoTokenizer.from_pretrained(default_model())


def with_added():
    own = PreTrainedTokenizerFast(tokenizer_object=TOKENIZERS["byte level, larger"]().backend_tokenizer)
    own.add_tokens([AddedToken("fox jumps"), AddedToken("日本"), AddedToken("<think>", special=True)])
    return own


OWN = {**TOKENIZERS, "added tokens": with_added, "SmolLM2": smollm2}


@cache
def made(name: str):
    return OWN[name]()


def reader(name: str):
    """The bytes of tokens by llguidance, which leaves the spaces of a Metaspace decoder as they are."""
    oracle, space = from_tokenizer(made(name)), "▁".encode()
    return lambda ids: oracle.decode_bytes(ids).replace(space, b" " if name == "metaspace" else space)


def words() -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.WordLevel({"the": 0, "cat": 1, "[UNK]": 2}, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]")


@pytest.mark.parametrize("name", OWN)
def test_every_token_has_the_bytes_that_llguidance_reads(name):
    own = made(name)
    pieces, oracle = Pieces(own), reader(name)
    added = own.added_tokens_decoder
    for token in range(len(own)):
        if token not in added and pieces.data(token) != b"\xff":  # which marks special tokens in the oracle
            assert pieces.data(token) == oracle([token]), own.convert_ids_to_tokens(token)
    for token, one in added.items():
        assert pieces.text(token) == one.content
    assert (pieces.data(len(own) + 3), pieces.text(len(own) + 3)) == (b"", "")


@pytest.mark.parametrize("name", OWN)
def test_joined_bytes_are_the_text(name):
    own = made(name)
    pieces = Pieces(own)
    for text in SAID:
        ids = own.encode(text, add_special_tokens=False)
        assert b"".join(map(pieces.data, ids)).decode().removeprefix(" ") == own.decode(ids).removeprefix(" ") == text
    if pieces.may_be_part(own.encode("a", add_special_tokens=False)[0]):  # byte level, which drops no space
        rng = random.Random(1)
        for _ in range(200):
            ids = [rng.randrange(len(own)) for _ in range(12)]
            assert b"".join(map(pieces.data, ids)).decode(errors="replace") == own.decode(ids)


@pytest.mark.parametrize("name", OWN)
def test_texts_are_the_same_only_where_the_bytes_are(name):
    own = made(name)
    pieces, found = Pieces(own), dict[str, bytes]()
    for token in range(len(own)):
        assert found.setdefault(pieces.text(token), pieces.data(token)) == pieces.data(token)


def test_the_form_of_what_is_no_text():
    own = made("byte level")
    pieces = Pieces(own)
    ids = own.encode("a\N{GRINNING FACE}")
    assert [pieces.text(token) for token in ids] == ["a", *(rf"bytes:\x{byte:02x}" for byte in "😀".encode())]
    own = made("sentencepiece")
    pieces, name = Pieces(own), own.convert_tokens_to_ids
    assert [pieces.text(name(one)) for one in ("▁at", "at", "<0x0A>", "<0xF0>")] == [" at", "at", "\n", r"bytes:\xf0"]


class InPython:
    """A tokenizer without a decoder of its own."""

    all_special_ids = ()

    def __init__(self, names: list[str], **kind):
        self.names = names
        vars(self).update(kind)

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.names[token]


def test_tokenizers_in_python():
    pieces = Pieces(InPython(["▁the", "<0xC3>"], sp_model=None))
    assert [pieces.data(token) for token in range(2)] == [b" the", b"\xc3"]
    pieces = Pieces(InPython(["Ġthe", "Ã", "日"], byte_decoder={}))
    assert [pieces.data(token) for token in range(3)] == [b" the", b"\xc3", "日".encode()]


@pytest.mark.parametrize("own", [wordpiece, words, lambda: with_regex()], ids=["wordpiece", "words", "regex"])
def test_other_kinds_are_decoded(own):
    own = own()
    pieces = Pieces(own)
    for token in range(len(own)):
        assert pieces.text(token) == own.decode([token])
        assert not pieces.may_be_part(token)


def with_regex() -> PreTrainedTokenizerFast:
    from tokenizers import Regex

    own = words()
    own.backend_tokenizer.decoder = decoders.Replace(Regex("[ct]"), "")
    return own


@pytest.mark.parametrize("name", OWN)
def test_offsets_count_whole_characters(name):
    own, oracle = made(name), reader(name)
    for text in SAID:
        ids = own.encode(text, add_special_tokens=False)
        dropped = len(oracle(ids).decode()) - len(own.decode(ids))
        before = [oracle(ids[:place]).decode(errors="ignore") for place in range(len(ids))]
        assert offsets(own, ids) == [max(0, len(one) - dropped) for one in before]
        streamed, pieces = Detokenizer(own), Pieces(own)
        assert [at for token in ids for at in streamed.offsets([token], pieces)] == offsets(own, ids)


def offsets(own, ids, **options):
    return Detokenizer(own, **options).offsets(ids, Pieces(own))


def test_offsets_beside_what_is_no_text():
    own = made("byte level")
    f0, ff, a, end = own.convert_tokens_to_ids(["ð", "ÿ", "a", "<|im_end|>"])
    smile = own.encode("😀")
    assert offsets(own, [a, f0, a, ff, a, a]) == [0, 1, 2, 3, 4, 5]
    assert offsets(own, [*smile[:2], end, *smile[2:], end, a]) == [0, 0, 0, 0, 0, 1, 1]
    assert offsets(own, [a, end, a], skip_special_tokens=False) == [0, 1, 11]
    own = made("sentencepiece")
    f0, c3, a9, a, at, newline = own.convert_tokens_to_ids(["<0xF0>", "<0xC3>", "<0xA9>", "a", "▁at", "<0x0A>"])
    assert offsets(own, [at, newline, newline, a, c3, a9, a]) == [0, 2, 3, 4, 5, 5, 6]
    assert own.decode([at, f0, c3, a]) == "at\ufffd\ufffda"
    assert offsets(own, [at, f0, c3, a]) == [0, 2, 3, 4]
    gap = own.convert_tokens_to_ids("▁")
    assert offsets(own, [gap, c3, a9, a]) == [0, 0, 0, 1]


def test_a_token_decoded_alone_would_be_noticed(monkeypatch):
    """The mutant: pieces of a tokenizer of another kind."""
    monkeypatch.setattr("paceline.sampling.pieces._decoder", lambda tokenizer: [])
    for test in (test_joined_bytes_are_the_text, test_every_token_has_the_bytes_that_llguidance_reads):
        with pytest.raises((AssertionError, UnicodeDecodeError)):
            test("byte level")
