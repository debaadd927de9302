"""Tokenizers of GGUF files: how text is split, what older files leave out, and tokens that are never split."""

from pathlib import Path
from typing import Any

import pytest
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from paceline.errors import ConfigError
from paceline.hf.gguf_file import GGUFFile
from paceline.hf.gguf_tokens import ends_of_answers, gguf_tokenizer
from tests.gguf_files import SPECIAL, vocabulary

MERGES = ["Ġ Ġ", "h e", "l l"]
TEXT = "HTTPServer don't I'LL x12345 y's\n\n  /* ½ */  e\u0301 हिन्दी ﬁ日本 foo_bar/\n/"


def tokenizer(pre: str | None, **more: Any):
    """Of a file with these entries; None: left out."""
    tokens = more.get("tokens") or vocabulary()
    held = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": MERGES}
    held["token_type"] = [3 if one.startswith("<") and len(one) > 1 else 1 for one in tokens]
    metadata = {f"tokenizer.ggml.{key}": one for key, one in (held | more).items() if one is not None}
    return gguf_tokenizer(
        GGUFFile(Path("x.gguf"), metadata | {"general.architecture": "llama", "llama.context_length": 9}, ())
    )


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
    for more in ({"pre": "llama-bpe"}, {"pre": None, "model": "llama"}):
        with pytest.raises(ConfigError, match=r"no tokenizer\.ggml\.token_type"):
            tokenizer(**more, token_type=None)


@pytest.mark.parametrize(("types", "ends"), [(None, [0, 2]), ([3, 3, 3], [0, 2]), ([3, 3, 4], [0, 2]), ([3, 3, 1], 0)])
def test_an_end_of_turn_ends_an_answer_where_it_is_an_added_token(types, ends):
    held = {"tokens": SPECIAL, "eos_token_id": 0} | ({"token_type": types} if types else {})
    assert ends_of_answers({f"tokenizer.ggml.{key}": one for key, one in held.items()}) == ends


def test_control_tokens_of_any_letters():
    """DeepSeek's are written with letters that are no bytes."""
    tokens = [*vocabulary(), "<｜User｜>", "<think>"]
    read = tokenizer("deepseek-r1-qwen", tokens=tokens, token_type=[3] * 3 + [1] * (len(tokens) - 5) + [3, 4])
    ids = [len(tokens) - 2, vocabulary().index("he"), len(tokens) - 1]
    assert read("<｜User｜>he<think>").input_ids == ids
    assert (len(read), read.decode(ids)) == (len(tokens), "<｜User｜>he<think>")
    assert read.decode(ids, skip_special_tokens=True) == "he<think>"
    assert not {*SPECIAL} & {*read.tokenize("he")}
