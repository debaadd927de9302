"""Text from tokens as they come equals text from all of them, whatever the tokenizer and wherever a round ends."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import one_hot
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from paceline import LLM, SamplingParams
from paceline.sampling.detokenize import Detokenizer
from tests.tiny import tiny_model

TEXTS = [
    "The quick brown fox jumps over the lazy dog.  Two spaces,\ttabs\n\nand blank lines .",
    "def f(x):\n    return {'a': x ** 2}  # don't\n",
    "Zażółć gęślą jaźń; Größe, façade, naïve — “quotes” …",
    "日本語のテキストと中文文本，한국어 텍스트도 있다。",
    "emoji 👩‍👩‍👧‍👦 🇩🇪 🏳️‍🌈 👍🏽 and math ∀x∈ℝ ∃y: x²≤y",
    "مرحبا بالعالم שלום עולם हिन्दी पाठ",
    "a literal replacement character � in the middle, and at the end �",
]
SPECIAL = ["<s>", "</s>", "<|tool|>"]


def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<plain>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def byte_fallback() -> PreTrainedTokenizerFast:
    """Spaces as ▁, unknown characters as runs of byte tokens, and the answer's first space stripped."""
    pieces = ["<unk>", *SPECIAL, *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["▁", "▁the", "▁a", "the", "don", "'t", "\n", ".", "▁.", *"abcdefghijklmnopqrstuvwxyz", "é", "日", "▁日"]
    tokenizer = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def metaspace() -> PreTrainedTokenizerFast:
    tokenizer = byte_fallback().backend_tokenizer
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


TOKENIZERS: dict[str, PreTrainedTokenizerBase] = {
    "byte level": byte_level(),
    "byte fallback": byte_fallback(),
    "metaspace": metaspace(),
}
_real = os.environ.get("PACELINE_TEST_TOKENIZER")  # the folder of a tokenizer of your own
if _real and Path(_real).is_dir():
    TOKENIZERS["real"] = AutoTokenizer.from_pretrained(_real)


@pytest.fixture(params=list(TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    return TOKENIZERS[request.param]


def random_ids(tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> list[int]:
    """Text, noise, or a mixture: a model may emit anything."""
    size = len(tokenizer)
    if rng.random() < 0.5:
        return [rng.randrange(size) for _ in range(rng.randrange(1, 40))]
    ids = tokenizer.encode(rng.choice(TEXTS), add_special_tokens=False)
    for _ in range(rng.randrange(0, 4)):
        ids.insert(rng.randrange(len(ids) + 1), rng.randrange(size))
    return ids


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Oracle: the text cut before the stop string that ends first, the longest where several do."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("skip", [True, False], ids=["skip", "keep"])
def test_text_equals_decoding_everything(tokenizer: PreTrainedTokenizerBase, skip: bool) -> None:
    rng = random.Random(0)
    for _ in range(150):
        ids = random_ids(tokenizer, rng)
        stream, shown = Detokenizer(tokenizer, (), skip), ""
        for count, token in enumerate(ids, 1):
            assert not stream.feed(token)
            assert stream.text == tokenizer.decode(ids[:count], skip_special_tokens=skip)
            if rng.random() < 0.6:
                shown += stream.take()
                assert stream.text.startswith(shown)
        assert shown + stream.finish() == stream.text == tokenizer.decode(ids, skip_special_tokens=skip)


def test_stop_strings_end_the_text(tokenizer: PreTrainedTokenizerBase) -> None:
    rng, hits = random.Random(1), 0
    for _ in range(200):
        ids = random_ids(tokenizer, rng)
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        at = [rng.randrange(max(1, len(whole))) for _ in range(rng.randrange(1, 4))]
        stops = tuple({whole[i : i + rng.randrange(1, 7)] for i in at} - {""}) or ("never there",)
        if any("\N{REPLACEMENT CHARACTER}" in stop for stop in stops):
            continue  # may be seen where a character was merely incomplete
        stream, shown, hit = Detokenizer(tokenizer, stops), "", False
        for count, token in enumerate(ids, 1):
            hit = stream.feed(token)
            text, stop = first_stop(tokenizer.decode(ids[:count], skip_special_tokens=True), stops)
            assert (stream.text, stream.stop_hit, hit) == (text, stop, stop is not None)
            if rng.random() < 0.6:
                shown += stream.take()
                assert text.startswith(shown)
            if hit:
                break
        hits += hit
        assert shown + stream.finish() == stream.text
    assert hits > 50


def feed_text(stream: Detokenizer, text: str) -> list[bool]:
    return [stream.feed(token) for token in TOKENIZERS["byte level"].encode(text, add_special_tokens=False)]


def test_a_beginning_of_a_stop_string_is_held_back() -> None:
    stream = Detokenizer(TOKENIZERS["byte level"], ("\n\nUser:",))
    feed_text(stream, "Hello\n\nUs")
    assert stream.take() == "Hello"
    feed_text(stream, "ually")
    assert stream.take() == "\n\nUsually"
    assert feed_text(stream, "!\n\nUser: hi").count(True) >= 1


def test_of_two_stop_strings_the_first_to_end_counts() -> None:
    stream = Detokenizer(TOKENIZERS["byte level"], ("abcdef", "cd", "bcd"))
    hits = [stream.feed(token) for char in "xabcd" for token in feed_ids(char)]
    assert hits == [False] * 4 + [True]
    assert stream.text == "xa"
    assert stream.stop_hit == "bcd"


def feed_ids(text: str) -> list[int]:
    return TOKENIZERS["byte level"].encode(text, add_special_tokens=False)


def test_feeding_on_declines_a_hit() -> None:
    stream = Detokenizer(TOKENIZERS["byte level"], ("b",))
    shown = ""
    hits = []
    for char in "abcbd":
        hits += [stream.feed(token) for token in feed_ids(char)]
        shown += stream.take()
    assert hits == [False, True, False, True, False]
    assert stream.stop_hit is None
    assert shown + stream.finish() == stream.text == "abcbd"


def test_an_incomplete_character_is_not_shown() -> None:
    stream = Detokenizer(TOKENIZERS["byte level"])
    ids = feed_ids("\N{OGHAM LETTER BEITH}")  # a character the tokenizer was not trained on: three tokens
    assert len(ids) == 3
    shown = []
    for token in ids:
        stream.feed(token)
        shown.append(stream.take())
    assert shown == ["", "", "\N{OGHAM LETTER BEITH}"]


def test_a_special_token_does_not_swallow_a_space() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    ids = tokenizer.convert_tokens_to_ids(["▁the", "<|tool|>", "▁a"])
    stream = Detokenizer(tokenizer)
    for token in ids:
        stream.feed(token)
    assert stream.text == "the a"


@pytest.mark.parametrize("options", [{}, {"stop": ("nothing",)}])
def test_spaces_between_special_tokens(options: dict[str, Any]) -> None:
    """A tokenizer without a decoder puts a space between any two tokens; between special ones it can be left out."""
    words = Tokenizer(models.WordLevel({"the": 0, "cat": 1, "<|a|>": 2, "<|b|>": 3}, unk_token="the"))
    words.add_special_tokens([AddedToken("<|a|>", special=True), AddedToken("<|b|>", special=True)])
    words = PreTrainedTokenizerFast(tokenizer_object=words)
    llm, answer = LLM(tiny_model("llama"), tokenizer=words), [0, 2, 3, 2, 1, 0, 3]

    def force(seen: Tensor, scores: Tensor) -> Tensor:
        return one_hot(torch.tensor([answer[seen.shape[1] - 1]]), scores.shape[1]).log()

    def texts(**more: bool) -> set[str]:
        """Of an answer, and of a stream."""
        params = SamplingParams(max_tokens=7, ignore_eos=True, logits_processors=(force,), **options, **more)
        return {llm.generate([5], params)[0].text, "".join(chunk.text for chunk in llm.stream([5], params))}

    assert texts(skip_special_tokens=False) == {"the <|a|> <|b|> <|a|> cat the <|b|>"}
    joined = texts(skip_special_tokens=False, spaces_between_special_tokens=False)
    assert joined == {"the <|a|><|b|><|a|> cat the <|b|>"}
    assert texts(spaces_between_special_tokens=False) == {"the cat the"}


def test_a_long_answer_costs_the_same_per_token() -> None:
    calls = 0
    tokenizer = byte_level()
    decode = tokenizer.decode

    def counted(ids: list[int], skip_special_tokens: bool) -> str | list[str]:
        nonlocal calls
        calls += len(ids)
        return decode(ids, skip_special_tokens=skip_special_tokens)

    tokenizer.decode = counted  # type: ignore[method-assign]
    stream = Detokenizer(tokenizer, ("never there",))
    ids = tokenizer.encode(" ".join(TEXTS) * 5, add_special_tokens=False)
    for token in ids:
        stream.feed(token)
    assert calls < 8 * len(ids), "tokens were decoded many times"
