"""Prompts of every form that is taken, and what is refused before anything is decoded."""

import copy

import numpy as np
import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.errors import ConfigError
from tests.helpers import tokenizer
from tests.tiny import tiny_model

PARAMS = SamplingParams(max_tokens=2, ignore_eos=True)
CHAT = [{"role": "user", "content": "abc"}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny_model("llama"), tokenizer=tokenizer())


def encoded(*texts: str, **options: object):
    made = tokenizer()(list(texts) if len(texts) > 1 else texts[0], **options)
    assert "attention_mask" in made
    return made


ABC, DE = [13, 14, 15], [16, 17]
TAKEN = {
    "text": ("abc", [ABC]),
    "texts": (["abc", "de"], [ABC, DE]),
    "array of texts": (np.array(["abc", "de"]), [ABC, DE]),
    "no prompts": ([], []),
    "ids": ([5, 6], [[5, 6]]),
    "tuple": ((5, 6), [[5, 6]]),
    "range": (range(5, 8), [[5, 6, 7]]),
    "numpy ids": (np.array([5, 6]), [[5, 6]]),
    "torch ids": (torch.tensor([5, 6]), [[5, 6]]),
    "scalars": ([np.int64(5), torch.tensor(6), 7], [[5, 6, 7]]),
    "batch of numpy": (np.array([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
    "batch of torch": (torch.tensor([[5, 6]]), [[5, 6]]),
    "arrays": ([np.array([5, 6]), torch.tensor([7]), torch.tensor([[8, 9]])], [[5, 6], [7], [8, 9]]),
    "encoding": (encoded("abc"), [ABC]),
    "encoding in torch": (encoded("abc", return_tensors="pt"), [ABC]),
    "encodings": (encoded("abc", "de"), [ABC, DE]),
    "padded encodings": (encoded("abc", "de", padding=True), [ABC, DE]),
    "padded torch": (encoded("abc", "de", padding=True, return_tensors="pt"), [ABC, DE]),
    "padded numpy": (encoded("abc", "de", padding=True, return_tensors="np"), [ABC, DE]),
    "left padding": ({"input_ids": [[0, 7, 8]], "attention_mask": [[0, 1, 1]]}, [[7, 8]]),
    "list of encodings": ([encoded("abc"), encoded("de", return_tensors="pt"), "abc"], [ABC, DE, ABC]),
    "vLLM's": ([{"prompt": "abc"}, {"prompt_token_ids": [5, 6]}], [ABC, [5, 6]]),
    "vLLM's alone": ({"prompt": "abc"}, [ABC]),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken(llm, name):
    given, expected = TAKEN[name]
    results = llm.generate(given, PARAMS)
    assert [result.prompt_token_ids for result in results] == expected
    assert [result.token_ids for result in results] == [llm.generate([ids], PARAMS)[0].token_ids for ids in expected]
    if len(expected) == 1:
        assert llm.encode(given) == expected[0]
        assert list(llm.stream(given, PARAMS))[-1].completion.token_ids == results[0].token_ids


REFUSED: list[tuple[object, str]] = [
    (None, "no prompt.*None"),
    (1, "no prompt.*1"),
    (5.0, "no prompt"),
    (True, "no prompt"),
    (np.int64(5), "no prompt"),
    (LLM, "no prompt"),
    ({5, 6}, "no prompt"),
    ((text for text in "ab"), "no prompt"),
    ([None], "no prompt.*None"),
    ([[None]], "no token id.*None"),
    ([5.0], "no token id.*5.0"),
    (np.array([5.0]), "no token id"),
    ([True, False], "no token id.*True"),
    (torch.tensor([True]), "no token id.*True"),
    ([5, 10**5000], "no token id"),
    ([[[5]]], "no token id"),
    (torch.zeros(1, 2, 2, dtype=torch.long), "no token id"),
    (b"abc", "no prompt.*decode"),
    ([b"abc"], "no prompt.*decode"),
    (memoryview(b"abc"), "no prompt.*decode"),
    ("a\ud800", "half a character.*surrogates"),
    (["abc", "\udcff"], "half a character"),
    ({}, "no prompt"),
    ({"text": "abc"}, "no prompt.*text.*prompt_token_ids"),
    ({"prompt": None}, "no prompt.*None"),
    ({"prompt": "abc", "multi_modal_data": {"video": [1]}}, "multi_modal_data.*video.*image"),
    ({"input_ids": [5], "pixel_values": [1.0]}, "pixel_values.*chat"),
    ({"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1]}, "inside the prompt"),
    ({"input_ids": [5, 6, 7], "attention_mask": [1, 1]}, "differ in length.*3 and 2"),
    ({"input_ids": [5, 6], "attention_mask": [0, 0]}, "prompt is empty"),
    ({"prompt_token_ids": []}, "prompt is empty"),
    ("", "prompt is empty"),
    ([[]], "prompt is empty"),
    (CHAT[0], r"chat is a list of them.*\[\{...\}\]"),
    ([{"content": "a"}], "no role"),
    ([{"role": 1, "content": "a"}], "no role"),
    ([{"role": "user"}], "no content"),
    ([{"role": "user", "content": None}], "no content"),
    ([{"role": "user", "content": 5}], "no content"),
    ([{"role": "user", "content": {"a": 1}}], "no content"),
    ([{"role": "user", "content": [5]}], "no part"),
    ([{"role": "user", "content": [{"type": ["text"]}]}], "unknown kind"),
    ([{"role": "user", "content": [{"type": "audio"}]}], "unknown kind.*audio"),
    ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "no text"),
    ([{"role": "user", "content": [{"type": 10**5000}]}], "unknown kind"),
    ([*CHAT, "abc"], "no message.*abc"),
    ([*CHAT, None], "no message"),
    ([{"role": "user", "content": "a\udcff"}], "half a character"),
    ([{"role": "\ud800", "content": "a"}], "half a character"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_refused(llm, given, words):
    with pytest.raises(ConfigError, match=words):
        llm.generate(given, PARAMS)
    with pytest.raises(ConfigError):
        llm.encode(given)
    assert llm.generate("abc", PARAMS)[0].prompt_token_ids == ABC


def test_many_prompts_are_not_one(llm):
    for many in (["abc", "de"], encoded("abc", "de"), torch.tensor([[5, 6], [7, 8]])):
        with pytest.raises(ConfigError, match="no token id"):
            llm.encode(many)
        with pytest.raises(ConfigError, match="no token id"):
            next(llm.stream(many, PARAMS))


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (5, "no SamplingParams.*5"),
        ({"max_tokens": 3}, "no SamplingParams.*options"),
        (SamplingParams, "no SamplingParams"),
        ([5], "no SamplingParams"),
        ([PARAMS, PARAMS], "differ in number.*2.*1"),
    ],
)
def test_params_of_another_type(llm, params, words):
    for call in (lambda: llm.generate("abc", params), lambda: next(llm.stream("abc", params))):
        with pytest.raises(ConfigError, match=words):
            call()


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('System role not supported') }}", "template refuses.*System role not supported.*Fix"),
        ("{{ missing.value }}", "template refuses.*undefined"),
        ("{% broken", "template refuses"),
    ],
)
def test_templates_that_refuse(template, words):
    refusing = copy.deepcopy(tokenizer())
    refusing.chat_template = template
    with pytest.raises(ConfigError, match=words):
        LLM(tiny_model("llama"), tokenizer=refusing).generate(CHAT)


def test_a_bad_word_without_tokens_is_refused():
    deaf = copy.deepcopy(tokenizer())
    deaf.encode = lambda text, **options: [] if not text.strip() else tokenizer().encode(text, **options)
    made = LLM(tiny_model("llama"), tokenizer=deaf)
    with pytest.raises(ConfigError, match=r"bad word has no tokens.*' '"):
        made.generate([5], SamplingParams(bad_words=("a", " ")))
