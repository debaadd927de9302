"""Tokenizers of GGUF files: how text is split, what older files leave out, and tokens that are never split."""

import random
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from paceline.errors import ConfigError
from paceline.hf.gguf.file import GGUFFile
from paceline.hf.gguf.tokens import ends_of_answers, gguf_tokenizer
from tests.gguf_files import SPECIAL, vocabulary

MERGES = ["Ġ Ġ", "h e", "l l"]
TEXT = "HTTPServer don't I'LL x12345 y's\n\n  /* ½ */  e\u0301 हिन्दी ﬁ日本 foo_bar/\n/"


def tokenizer(pre: str | None, architecture: str = "llama", **more: Any) -> Any:
    """Of a file with these entries; None: left out."""
    tokens = more.get("tokens") or vocabulary()
    held = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": MERGES}
    held["token_type"] = [3 if one.startswith("<") and len(one) > 1 else 1 for one in tokens]
    metadata = {f"tokenizer.ggml.{key}": one for key, one in (held | more).items() if one is not None}
    layers = {"general.architecture": architecture, f"{architecture}.context_length": 9}
    return gguf_tokenizer(GGUFFile(Path("x.gguf"), metadata | layers, ()))


WORDS = "▁the▁then▁they▁lie▁lay▁late日本▁é"
PIECES = [WORDS[i : i + size] for size in (2, 3, 4, 1) for i in range(len(WORDS) - size + 1)]
SPELLED = [*["<unk>", "<s>", "</s>"], *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(PIECES)]
KINDS = [2, 3, 3, *[6] * 256, *[1] * (len(SPELLED) - 259)]


def sentencepiece(*added: tuple[str, int], architecture: str = "llama", **more: Any) -> Any:
    """Of a file with pieces, the first of them the best, and added tokens of these types."""
    tokens = [*SPELLED, *(text for text, _ in added)]
    held = {"model": "llama", "tokens": tokens, "scores": [-float(i) for i in range(len(tokens))], "merges": None}
    return tokenizer(None, architecture, **held | {"token_type": [*KINDS, *(kind for _, kind in added)]} | more)


def spelled(one: Any, text: str) -> list[str]:
    """The tokens of a text alone."""
    return one.convert_ids_to_tokens(one(text, add_special_tokens=False).input_ids)


def pieces(one: Any, text: str = TEXT) -> list[str]:
    return [piece for piece, _ in one.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(("pre", "theirs"), [("qwen2", Qwen2Tokenizer), ("qwen35", Qwen3_5Tokenizer)])
def test_text_is_split_as_by_the_tokenizer_of_the_family(pre, theirs):
    ours = tokenizer(pre)
    assert pieces(ours) == pieces(theirs())
    assert ours.backend_tokenizer.normalizer.normalize_str("e\u0301") == "é"


def test_text_is_split_as_transformers_reads_these_names():
    theirs = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    from tokenizers import Regex, pre_tokenizers

    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for pre in ("llama-bpe", "pixtral", "midm-2.0", "dbrx", "smaug-bpe", "tekken", "gpt-4o", "llama4", "qwen35"):
        pattern = Regex(theirs.GGUF_PRE_TOKENIZER_SPLITS[pre])
        split = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), bytes_of])
        assert pieces(tokenizer(pre)) == [piece for piece, _ in split.pre_tokenize_str(TEXT)], pre


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("tekken", "fooBAR x12", ["foo", "BAR", "Ġx", "1", "2"]),
        ("gpt-4o", "HTTPServer's 1234", ["HTTPServer's", "Ġ", "123", "4"]),
        ("exaone", "x12 y's", ["x", "1", "2", "Ġy", "'s"]),
        ("exaone4", "x12 y's", ["x", "12", "Ġy", "'s"]),
    ],
)
def test_pieces(pre, text, expected):
    assert pieces(tokenizer(pre), text) == expected


def test_a_piece_that_is_a_token_stays_whole_where_its_family_does_so():
    tokens = [*vocabulary(), "hello"]
    assert tokenizer("llama-bpe", tokens=tokens)("hello").input_ids == [len(tokens) - 1]
    assert tokenizer("gpt-2", tokens=tokens)("hello").input_ids != [len(tokens) - 1]


def test_the_token_of_the_beginning_where_a_file_does_not_say():
    for pre, begins in (("llama-bpe", True), ("tekken", True), ("qwen2", False)):
        assert (tokenizer(pre, bos_token_id=1)("he").input_ids[0] == 1) == begins
        assert tokenizer(pre, bos_token_id=1, add_bos_token=False)("he").input_ids[0] != 1


@pytest.mark.parametrize("named", [None, "default"])
def test_an_unnamed_split_is_that_of_the_vocabulary(named):
    for split, place, token in (("llama-bpe", 128_000, "<|begin_of_text|>"), ("qwen2", 151_644, "<|im_start|>")):
        filled = [one for one in vocabulary() if one != token]
        tokens = [*filled, *(f"t{i}" for i in range(place - len(filled))), token]
        assert pieces(tokenizer(named, tokens=tokens)) == pieces(tokenizer(split))
    with pytest.raises(ConfigError, match=rf"gpt2, {named}.*tokenizer=\.\.\."):
        tokenizer(named)


def test_tokens_without_types():
    """What no merge gives was added, and is never split."""
    read = tokenizer("gpt-2", token_type=None)
    assert read("he<|im_end|>ll").input_ids == [vocabulary().index("he"), 2, vocabulary().index("ll")]
    assert read.decode([2, vocabulary().index("he")], skip_special_tokens=True) == "he"
    for make in (lambda: tokenizer("llama-bpe", token_type=None), lambda: sentencepiece(token_type=None)):
        with pytest.raises(ConfigError, match=r"no tokenizer\.ggml\.token_type"):
            make()


@pytest.mark.parametrize(("types", "ends"), [(None, [0, 2]), ([3, 3, 3], [0, 2]), ([3, 3, 4], [0, 2]), ([3, 3, 1], 0)])
def test_an_end_of_turn_ends_an_answer_where_it_is_an_added_token(types, ends):
    held = {"tokens": SPECIAL, "eos_token_id": 0} | ({"token_type": types} if types else {})
    assert ends_of_answers({f"tokenizer.ggml.{key}": one for key, one in held.items()}) == ends


def test_the_end_of_a_message_of_gpt_oss_does_not_end_an_answer():
    tokens = ["<|return|>", "<|end|>", "<|call|>"]
    assert ends_of_answers({"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 0}) == [0, 2]
    assert ends_of_answers({"tokenizer.ggml.tokens": tokens[:2], "tokenizer.ggml.eos_token_id": 0}) == [0, 1]


def test_all_ends_that_a_file_names():
    held = {"eos": 4, "eot": 5, "eom": 6}
    assert ends_of_answers({f"tokenizer.ggml.{key}_token_id": one for key, one in held.items()}) == [4, 5, 6]


def test_tokens_whose_ids_a_sentencepiece_file_does_not_say_are_the_first():
    read = sentencepiece()
    assert (read.unk_token, read.bos_token, read.eos_token, read("the").input_ids[0]) == ("<unk>", "<s>", "</s>", 1)
    assert ends_of_answers({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": SPELLED}) == 2


def test_control_tokens_of_any_letters():
    """DeepSeek's are written with letters that are no bytes."""
    tokens = [*vocabulary(), "<｜User｜>", "<think>"]
    read = tokenizer("deepseek-r1-qwen", tokens=tokens, token_type=[3] * 3 + [1] * (len(tokens) - 5) + [3, 4])
    ids = [len(tokens) - 2, vocabulary().index("he"), len(tokens) - 1]
    assert read("<｜User｜>he<think>").input_ids == ids
    assert (len(read), read.decode(ids)) == (len(tokens), "<｜User｜>he<think>")
    assert read.decode(ids, skip_special_tokens=True) == "he<think>"
    assert not {*SPECIAL} & {*read.tokenize("he")}


@pytest.mark.parametrize("architecture", ["gemma3", "phi3"])
def test_pieces_are_merged_as_transformers_reads_them(architecture):
    """Of phi3, transformers puts a space before texts."""
    theirs = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    scores = [-float(i) for i in range(len(SPELLED))]
    held = {"tokenizer_type": "llama", "tokens": SPELLED, "token_type": KINDS, "scores": scores}
    backend, _ = theirs.convert_gguf_tokenizer(architecture, held)
    ours, rng = sentencepiece(architecture=architecture, add_space_prefix=architecture == "phi3"), random.Random(1)
    for length in range(60):
        text = "".join(rng.choice("the n yliaé日本½\n😀") for _ in range(length))
        ids = ours(text, add_special_tokens=False).input_ids
        assert ids == backend.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids) == text


def test_transformers_does_not_read_the_file(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.integrations.gguf", None)
    assert spelled(sentencepiece(), "the then") == ["▁the", "▁t", "hen"]
    with pytest.raises(ConfigError, match=r"no tokenizer\.ggml\.scores"):
        sentencepiece(scores=None)


def test_of_equal_scores_the_first_piece_is_merged_first():
    ranked, equal = sentencepiece(), sentencepiece(scores=[-1000.0] * len(SPELLED))
    rng = random.Random(2)
    for text in ("".join(rng.choice("then yliaé") for _ in range(40)) for _ in range(20)):
        assert spelled(equal, text) == spelled(ranked, text)


@pytest.mark.parametrize("said", [None, True, False])
def test_the_space_before_a_text(said):
    """llama.cpp puts it behind tokens that are never split, too, and where a file does not say."""
    read, first = sentencepiece(("<think>", 4), add_space_prefix=said), [] if said is False else ["▁"]
    joined = ["la"] if said is False else ["▁la"]
    assert spelled(read, "la") == joined
    assert spelled(read, " n") == [*first, "▁", "n"]
    assert spelled(read, "<s>la<think> n") == ["<s>", *joined, "<think>", *first, "▁", "n"]
    assert read.decode(read(" n la", add_special_tokens=False).input_ids) == " n la"
    assert spelled(read, "") == []


def test_tokens_that_a_file_adds_are_not_made_of_pieces():
    """Gemma's runs of spaces, which have the lowest score."""
    read = sentencepiece(("  ", 4), ("    ", 4), ("<|user|>", 3), add_space_prefix=False)
    assert spelled(read, "the" + " " * 7 + "la<|user|>") == ["the", "    ", "  ", "▁la", "<|user|>"]
    ids = read("the  la<|user|>", add_special_tokens=False).input_ids
    assert (read.decode(ids), read.decode(ids, skip_special_tokens=True)) == ("the  la<|user|>", "the  la")


def test_tokens_of_phi_3_take_the_spaces_behind_them():
    added = ("<|end|>", 3), ("<|endoftext|>", 3)
    for architecture, between in (("phi3", []), ("llama", ["▁", "<0x0A>"])):
        read = sentencepiece(*added, architecture=architecture)
        assert spelled(read, "<|end|>\n<|endoftext|> la") == ["<|end|>", *between, "<|endoftext|>", "▁", "▁la"]


@pytest.mark.parametrize("make", [sentencepiece, lambda **more: tokenizer("gpt-2", bos_token_id=1, **more)])
def test_tokens_around_a_text(make):
    for begins in (False, True):
        for ends in (False, True):
            said = {"add_bos_token": begins, "add_eos_token": ends, "eos_token_id": 2}
            ids = make(**said)("the").input_ids
            assert (ids[0] == 1, ids[-1] == 2) == (begins, ends)
            assert make(**said, add_sep_token=True)("the").input_ids == ids  # of pairs of texts


@pytest.mark.parametrize(
    ("make", "entry"),
    [
        *((sentencepiece, name) for name in ("remove_extra_whitespaces", "precompiled_charsmap")),
        *(
            (lambda **more: tokenizer("gpt-2", **more), name)
            for name in ("remove_extra_whitespaces", "add_space_prefix")
        ),
    ],
)
def test_what_would_change_tokens_and_is_not_done_is_refused(make, entry):
    with pytest.raises(ConfigError, match=rf"tokenizer\.ggml\.{entry} .*no {entry}.*tokenizer=\.\.\."):
        make(**{entry: [1, 2] if entry == "precompiled_charsmap" else True})
    make(**{entry: False})
