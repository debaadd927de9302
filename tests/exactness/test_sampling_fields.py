"""Every field of `SamplingParams` with speculation gives what it gives without, and does what vLLM says it does."""

import random
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from paceline import LLM, Fixed, PromptLookup, RequestOutputKind, SamplingParams
from paceline.core.interfaces import Drafter
from paceline.sampling import distribution
from tests.adversaries import RandomTrees, Scripted
from tests.helpers import loaded
from tests.structured.common import FORMS, byte_tokenizer
from tests.tiny import tiny_model

TEXT = "abcabcabcab"
TOKENS = range(3, 97)


def favour_the_past(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    scores[:, int(ids.sum()) % 7 :: 7] += 3
    return scores


def some(draw: random.Random, most: int) -> list[int]:
    return draw.sample(TOKENS, draw.randint(1, most))


FIELDS: dict[str, Callable[[random.Random], Any]] = {
    "temperature": lambda draw: draw.choice([0.0, 0.3, 1.0, 2.0]),
    "top_k": lambda draw: draw.choice([-1, 0, 1, 5]),
    "top_p": lambda draw: draw.choice([1.0, 0.9, 0.2]),
    "min_p": lambda draw: draw.choice([0.0, 0.1]),
    "repetition_penalty": lambda draw: draw.choice([1.0, 1.3, 0.7]),
    "presence_penalty": lambda draw: draw.choice([0.0, 1.5, -2.0]),
    "frequency_penalty": lambda draw: draw.choice([0.0, 0.5]),
    "no_repeat_ngram_size": lambda draw: draw.choice([0, 1, 2]),
    "logit_bias": lambda draw: {token: draw.choice([-torch.inf, -3.0, 4.0]) for token in some(draw, 4)},
    "allowed_token_ids": lambda draw: some(draw, 40),
    "bad_words": lambda draw: draw.choice([[], ["a"], ["bc", "Q"]]),
    "min_tokens": lambda draw: draw.randint(0, 12),
    "max_tokens": lambda draw: draw.choice([None, 12, 16]),
    "stop": lambda draw: draw.choice(["a", ["b", "cd"], "~"]),
    "stop_token_ids": lambda draw: some(draw, 4),
    "include_stop_str_in_output": lambda draw: True,
    "ignore_eos": lambda draw: True,
    "seed": lambda draw: draw.randrange(100),
    "n": lambda draw: 1,
    "logprobs": lambda draw: draw.choice([-1, 0, 3]),
    "prompt_logprobs": lambda draw: draw.choice([-1, 0, 3]),
    "logits_processors": lambda draw: (favour_the_past,),
    "structured_outputs": lambda draw: draw.choice([*FORMS.values()])[0],
    "detokenize": lambda draw: True,
    "skip_special_tokens": lambda draw: False,
    "spaces_between_special_tokens": lambda draw: False,
    "output_kind": lambda draw: draw.choice([*RequestOutputKind]),
    "extra_args": lambda draw: {"a": 1},
}


def engine(drafter: Drafter | None) -> LLM:
    model = replace(loaded(), tokenizer=byte_tokenizer())
    return LLM(model, drafter=drafter, policy=Fixed(5, 16), max_model_len=48)


def test_every_field_is_tried():
    assert [one.name for one in fields(SamplingParams)] == list(FIELDS)


def said(llm: LLM, params: SamplingParams) -> tuple[object, ...]:
    """All that the user sees, or the error."""
    try:
        result = llm.generate(TEXT, params)[0]
    except Exception as error:
        return (str(error).split(" (row")[0],)
    one = result.outputs[0]
    return one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs, result.prompt_logprobs


def test_speculation_changes_nothing():
    """Of requests with a few fields each, drawn by seed, so that each field meets each other one."""
    right = Scripted({}, [None, 1], branching=True)
    lookup, *others = engine(PromptLookup()), engine(RandomTrees()), engine(right)
    prompt = lookup.encode(TEXT)
    for seed in range(40):
        draw = random.Random(seed)
        chosen = draw.sample([*FIELDS], 8)
        params = SamplingParams(**{"max_tokens": 20, "seed": 1, **{name: FIELDS[name](draw) for name in chosen}})
        want = said(lookup.plain(), params)
        if len(want) == 1:  # an error: every token was forbidden
            assert "forbid" in str(want[0])
            right.future = {tuple(prompt): [*prompt, *[4] * 60]}
        else:
            if params.allowed_token_ids:
                assert set(want[0]) <= set(params.allowed_token_ids)  # type: ignore[call-overload]
            right.future = {tuple(prompt): [*prompt, *want[0], *[4] * 60]}  # type: ignore[misc]
        for llm in (lookup, *others):
            assert said(llm, params) == want, (seed, params)


def test_a_forbidden_draft_is_found_out(monkeypatch):
    """Mutant: the mask of allowed tokens is left out where speculation asks for it."""
    params = SamplingParams(max_tokens=12, allowed_token_ids=list(range(50, 60)), ignore_eos=True)
    drafted, plain = engine(RandomTrees()), engine(RandomTrees()).plain()
    want = plain.generate(TEXT, params)[0].token_ids
    assert drafted.generate(TEXT, params)[0].token_ids == want
    monkeypatch.setattr(distribution, "is_edited", lambda seq: False)
    assert drafted.generate(TEXT, params)[0].token_ids != want


@pytest.mark.parametrize("chunk", [4, 512])
def test_prompt_logprobs_equal_a_plain_scoring(chunk):
    llm = engine(PromptLookup())
    llm.runner.chunk = chunk
    params = SamplingParams(max_tokens=3, prompt_logprobs=-1, logprobs=-1, temperature=0.5)
    result = llm.generate([TEXT, TEXT + "x"], params)[0]
    model = tiny_model("llama")
    with torch.inference_mode():
        scores = model(torch.tensor([result.prompt_token_ids])).logits[0].log_softmax(-1)
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)
    for row, entry, token in zip(scores, result.prompt_logprobs[1:], result.prompt_token_ids[1:], strict=False):
        assert entry is not None
        assert next(iter(entry)) == entry.token_id == token
        got = torch.tensor([entry[other].logprob for other in range(97)])
        torch.testing.assert_close(got, row, atol=1e-4, rtol=0)
        assert entry[token].rank == entry.rank == int((row > row[token]).sum()) + 1
        assert sorted(one.rank for one in entry.values()) == list(range(1, 98))
        assert entry[token].decoded_token == byte_tokenizer().decode([token])


def test_texts_with_and_without_their_end():
    llm = engine(PromptLookup())
    whole = llm.generate(TEXT, SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True))[0]
    stop, token = whole.text[4:6], whole.token_ids[9]
    end = whole.text.index(stop)
    for kind in RequestOutputKind:

        def text_of(**options: Any) -> str:
            given = {"max_tokens": 20, "temperature": 1.0, "seed": 3, "ignore_eos": True, **options}
            params = SamplingParams(output_kind=kind, **given)  # noqa: B023
            chunks = list(llm.stream(TEXT, params))
            result = llm.generate(TEXT, params)[0]
            if kind is RequestOutputKind.DELTA:  # noqa: B023
                assert [token for chunk in chunks for token in chunk.token_ids] == result.token_ids
            else:
                assert chunks[-1].token_ids == result.token_ids
                assert (len(chunks) == 1) == (kind is RequestOutputKind.FINAL_ONLY)  # noqa: B023
            streamed = "".join(c.text for c in chunks) if kind is RequestOutputKind.DELTA else chunks[-1].text  # noqa: B023
            assert streamed == result.text
            return result.text

        assert text_of(stop=stop) == whole.text[:end]
        assert text_of(stop=stop, include_stop_str_in_output=True) == whole.text[: end + 2]
        first = whole.token_ids.index(token)
        decode = byte_tokenizer().decode
        assert text_of(stop_token_ids=[token]) == decode(whole.token_ids[:first])
        assert text_of(stop_token_ids=[token], include_stop_str_in_output=True) == decode(whole.token_ids[: first + 1])
        both = {"stop_token_ids": [token], "stop": "\x7f"}
        assert text_of(**both) == decode(whole.token_ids[:first])
        assert text_of(**both, include_stop_str_in_output=True) == decode(whole.token_ids[: first + 1])
        assert text_of(detokenize=False) == ""
    ended = {"logit_bias": {2: 100.0}, "max_tokens": 4}
    assert llm.generate(TEXT, SamplingParams(**ended))[0].text == ""
    shown = SamplingParams(**ended, skip_special_tokens=False, include_stop_str_in_output=True)
    assert llm.generate(TEXT, shown)[0].text == "</s>"
