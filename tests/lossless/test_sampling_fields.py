"""Every field of `SamplingParams` with speculation gives what it gives without, and does what vLLM says it does."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline import LLM, Fixed, PromptLookup, RequestOutputKind, SamplingParams
from paceline.core.interfaces import Drafter
from paceline.sampling import distribution
from tests.adversaries import RandomTrees, Scripted
from tests.helpers import tokenizer
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("unchecked_types")
TEXT = "abcabcabcab"
TOKENS = st.integers(3, 96)
_SOME = st.lists(TOKENS, min_size=1, max_size=40, unique=True)


def favour_the_past(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    scores[:, int(ids.sum()) % 7 :: 7] += 3
    return scores


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    "top_k": st.sampled_from([-1, 0, 1, 5]),
    "top_p": st.sampled_from([1.0, 0.9, 0.2]),
    "min_p": st.sampled_from([0.0, 0.1]),
    "repetition_penalty": st.sampled_from([1.0, 1.3, 0.7]),
    "presence_penalty": st.sampled_from([0.0, 1.5, -2.0]),
    "frequency_penalty": st.sampled_from([0.0, 0.5]),
    "no_repeat_ngram_size": st.sampled_from([0, 1, 2]),
    "logit_bias": st.none() | st.dictionaries(TOKENS, st.sampled_from([-torch.inf, -3.0, 4.0]), max_size=4),
    "allowed_token_ids": st.none() | _SOME,
    "bad_words": st.none() | st.lists(st.sampled_from(["a", "bc", "Q"]), max_size=2),
    "min_tokens": st.integers(0, 12),
    "max_tokens": st.none() | st.integers(12, 20),
    "stop": st.none() | st.sampled_from(["a", ["b", "cd"], "~"]),
    "stop_token_ids": st.none() | st.lists(TOKENS, max_size=4),
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "seed": st.integers(0, 99),
    "n": st.just(1),
    "logprobs": st.sampled_from([None, -1, 0, 3]),
    "prompt_logprobs": st.sampled_from([None, -1, 0, 3]),
    "logits_processors": st.sampled_from([(), (favour_the_past,)]),
    "detokenize": st.just(True),
    "skip_special_tokens": st.booleans(),
    "spaces_between_special_tokens": st.booleans(),
    "output_kind": st.sampled_from(RequestOutputKind),
    "extra_args": st.none() | st.just({"a": 1}),
}


def engine(drafter: Drafter | None) -> LLM:
    return LLM(tiny_model("llama"), tokenizer=tokenizer(), drafter=drafter, policy=Fixed(5, 16), max_model_len=48)


@pytest.fixture(scope="module")
def engines() -> list[LLM]:
    return [engine(PromptLookup()), engine(RandomTrees())]


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


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(options=st.fixed_dictionaries({}, optional=FIELDS))
def test_speculation_changes_nothing(engines, options):
    options = {"max_tokens": 20, "seed": 1, **options}
    if options.get("n", 1) > 1:
        options["temperature"] = 1.0
    params = SamplingParams(**options)
    want = said(engines[0].plain(), params)
    for llm in engines:
        assert said(llm, params) == want
    if len(want) == 1:  # an error: every token was forbidden
        assert "forbid" in str(want[0])
        return
    if params.allowed_token_ids:
        assert set(want[0]) <= set(params.allowed_token_ids)  # type: ignore[call-overload]
    future = {tuple(engines[0].encode(TEXT)): [*engines[0].encode(TEXT), *want[0], *[4] * 30]}  # type: ignore[misc]
    assert said(engine(Scripted(future, [None, 1], branching=True)), params) == want


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
        assert entry[token].decoded_token == tokenizer().decode([token])


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
        decode = tokenizer().decode
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
