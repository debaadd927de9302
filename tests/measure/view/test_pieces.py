"""The text of each token: joined, the text of the answer."""

import json
from types import SimpleNamespace

from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from paceline.measure.result_folder import ResultFolder
from paceline.sampling.detokenize import Detokenizer
from tests.helpers import byte_pairs


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, as the smallest of byte-level vocabularies."""
    return byte_pairs([*sorted(ByteLevel.alphabet()), "<end>"], eos_token="<end>")


def pieces(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[str]:
    return Detokenizer(tokenizer, skip_special_tokens=False).pieces(ids, is_end=True)


def test_joined_pieces_are_the_text():
    tokenizer, text = byte_tokenizer(), "naïve </b>\n日本 🙂!"
    ids = tokenizer.encode(text)
    found = pieces(tokenizer, ids)
    assert len(found) == len(ids) == len(text.encode())
    assert "".join(found) == text
    assert found[2:4] == ["", "ï"]  # the character stands with the token that completes it


def test_an_incomplete_end_is_shown():
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("a🙂")[:-1]
    found = pieces(tokenizer, ids)
    assert "".join(found) == tokenizer.decode(ids)
    assert found[0] == "a"
    assert found[-1] == "\N{REPLACEMENT CHARACTER}"


def test_special_tokens_have_names():
    tokenizer = byte_tokenizer()
    assert pieces(tokenizer, [*tokenizer.encode("ab"), 256]) == ["a", "b", "<end>"]
    assert pieces(tokenizer, []) == []


def test_decoding_alone_would_be_noticed():
    """The mutant: each token decoded by itself loses the characters that span tokens."""
    tokenizer, text = byte_tokenizer(), "é"
    assert "".join(tokenizer.decode([token]) for token in tokenizer.encode(text)) != text


def test_round_pieces_name_every_node(tmp_path):
    """Also half a character, which no text of its own would tell from another half."""
    tokenizer = byte_tokenizer()
    ids = [*tokenizer.encode("a é"), 256]
    rounds = [{"token_ids": ids, "parents": [-1, 0, 0, 1, 1]}]
    line = {"token_ids": ids, "rounds": rounds}
    results = ResultFolder(tmp_path)
    results.add([SimpleNamespace(side="ours", as_dict=lambda: line)], ["ours"], tokenizer)
    results.close()
    (read,) = map(json.loads, (tmp_path / "answers.jsonl").read_text().splitlines())
    assert read["rounds"][0]["pieces"] == ["a", " ", r"bytes:\xc3", r"bytes:\xa9", "<end>"]
