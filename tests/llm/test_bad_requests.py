"""Requests and options that cannot be: refused before anything is decoded, with what was expected instead."""

import inspect
import math
import pickle
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline import (
    LLM,
    AsyncLLM,
    Choose,
    CostModel,
    Coupled,
    DraftModel,
    Dynamic,
    Fixed,
    PromptLookup,
    SamplingParams,
    SelfQuantized,
    StructuredOutputsParams,
    Typical,
)
from paceline.errors import CacheFull, ConfigError, NumericsError
from paceline.integrations.other_names import INSTEAD
from paceline.methods import Blockwise, Eagle, Medusa, Space
from paceline.methods.spec import keys_of, spec_class
from paceline.methods.table import methods
from paceline.schema import validate
from tests.helpers import all_free, loaded, talking, tokenizer
from tests.tiny import tiny_model


def nothing_at(length):
    return lambda ids, scores: scores * (torch.nan if ids.shape[1] == length else 1)


FAULTS = {
    "NaN": {"logits_processors": (nothing_at(8),)},
    "sampled NaN": {"temperature": 1.0, "logits_processors": (nothing_at(8),)},
    "nothing allowed": {"bad_words": "b", "allowed_token_ids": tokenizer().encode("b", add_special_tokens=False)},
    "no scores": {"logits_processors": (lambda ids, scores: None,)},
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("drafter", [None, PromptLookup])
def test_an_error_is_the_same_beside_others(fault, drafter):
    """It tells the place in the request's own answer, not in the batch, nor in a pass or a draft."""
    llm = LLM(talking(), drafter=drafter and drafter(), policy=Fixed(4), max_num_seqs=3)
    wrong, others = SamplingParams(max_tokens=9, seed=1, **FAULTS[fault]), SamplingParams(max_tokens=9)
    told = list[str]()
    for prompts, params in ((["abab"], wrong), (["xyzxyz", "a", "abab"], [others, others, wrong])):
        with pytest.raises((ConfigError, NumericsError)) as caught:
            llm.generate(prompts, params)
        told.append(str(caught.value))
    assert told[0] == told[1]
    assert fault == "no scores" or " of the answer" in told[0]
    assert all_free(llm.runner)


HUGE = 10**5000  # repr() refuses it
BAD_PARAMS: dict[str, list[object]] = {
    "temperature": [-0.1, math.nan, math.inf, True, "0.5", None, 10**400],
    "top_k": [-2, 1.5, 2.0, True, -HUGE],
    "top_p": [0.0, -0.5, 1.01, math.nan],
    "min_p": [-0.1, 1.1, math.nan],
    "repetition_penalty": [0.0, -1.0, math.nan, math.inf],
    "presence_penalty": [math.nan, math.inf],
    "frequency_penalty": [math.nan, -math.inf],
    "no_repeat_ngram_size": [-1, 0.5],
    "logit_bias": [{5: math.nan}, {5: math.inf}, {"5": 1.0}, {True: 1.0}, [5], {5: "1"}],
    "min_tokens": [-1, 257, 1.5],
    "max_tokens": [0, -5, 4.5, True, "9", np.float32(3)],
    "stop": ["", ("a", ""), b"a", ["a", 3], 3, "\ud800"],
    "bad_words": ["", ("",), ["a\udcff"], 3],
    "stop_token_ids": [3, "3", [3.0], [True]],
    "ignore_eos": [1, "no"],
    "seed": [1.5, math.nan, True, "1"],
    "n": [0, 10**9, HUGE, 1.0],
    "logprobs": [-2, 0.5, True],
    "prompt_logprobs": [-2, "1"],
    "allowed_token_ids": [[], 3, ["3"]],
    "detokenize": [0, "no"],
    "output_kind": [1, "DELTA"],
    "extra_args": [3],
    "logits_processors": [3, [3]],
}


@pytest.mark.parametrize("name", BAD_PARAMS)
def test_sampling_options_out_of_range(name):
    for value in BAD_PARAMS[name]:
        with pytest.raises(ConfigError, match=rf"SamplingParams\.{name}.* (has a wrong|is above).*Got: .*Expected: "):
            SamplingParams(**{name: value})


def test_sampling_options_that_can_be():
    """Numbers of numpy and torch are numbers; -inf bars a token; the context cuts max_tokens."""
    given = SamplingParams(
        np.float32(0.5), torch.tensor(4), seed=np.int64(-3), max_tokens=10**12, logit_bias={np.int64(5): -math.inf},
        stop="x", bad_words=["a"], stop_token_ids=[np.int32(7)],
    )  # fmt: skip
    same = SamplingParams(
        0.5, 4, seed=-3, max_tokens=10**12, logit_bias={5: -math.inf}, stop=("x",), bad_words=("a",),
        stop_token_ids=(7,),
    )  # fmt: skip
    assert given == same == pickle.loads(pickle.dumps(same))
    assert (type(given.top_k), type(given.seed), type(given.temperature)) == (int, int, float)
    assert replace(given, n=2) == replace(same, n=2) != same
    llm = LLM(loaded())
    assert llm.generate([5, 6], replace(given, bad_words=(), stop=()))[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("temprature", r"one of temperature, .*did you mean 'temperature'\?"),
        ("max_new_tokens", "Fix: max_tokens"),
        ("do_sample", "temperature=0 is greedy"),
        ("guided_decoding", "Fix: structured_outputs"),
        ("num_return_sequences", "Fix: n"),
        ("something", "one of temperature, "),
    ],
)
def test_names_of_others_are_answered_with_ours(name, answer):
    with pytest.raises(ConfigError, match=rf"SamplingParams takes no '{name}'.*{answer}"):
        SamplingParams(**{name: 2})


def test_options_are_read_from_json():
    """Its keys are texts."""
    given = {"logit_bias": {"5": 1.5, "7": -2}, "stop": ["x"]}
    made = SamplingParams(logit_bias={5: 1.5, 7: -2.0}, stop=["x"])
    assert validate(SamplingParams, given, "options") == made
    with pytest.raises(ConfigError, match="logit_bias has a wrong value"):
        validate(SamplingParams, {"logit_bias": {"x": 1.0}}, "options")


def test_nothing_is_replaced_that_exists():
    places = {"SamplingParams": SamplingParams, "StructuredOutputsParams": StructuredOutputsParams, "LLM": LLM}
    places |= {"AsyncLLM": AsyncLLM}
    places |= {f"LLM.{name}": getattr(LLM, name) for name in ("generate", "chat", "stream", "embed", "score")}
    keys = {"num_draft_nodes", *(key for method in methods() for key in keys_of(spec_class(method)))}
    others = {
        "an attribute of LLM": {*dir(LLM), "decoder", "runner"},
        "speculative_config": {*keys, "num_speculative_tokens"},
    }
    for place, names in INSTEAD.items():
        known = set(inspect.signature(places[place]).parameters) if place in places else others[place]
        assert not known & set(names)
        for name, option in names.items():
            fix = option if isinstance(option, str) else option.instead
            if not fix:
                continue
            words = set(re.findall(r"\w+", fix))
            starts = ("leave", "cut", "give", "set", "merge", "load", "fetch", "not here", "change", "there is no")
            assert words & {*known, "SamplingParams"} or fix.startswith(starts), (name, fix)


def test_none_is_taken_where_vllm_takes_it():
    names = ("max_tokens", "stop", "stop_token_ids", "bad_words", "seed", "logprobs", "prompt_logprobs", "logit_bias",
             "allowed_token_ids", "extra_args")  # fmt: skip
    params = SamplingParams(top_k=-1, **dict.fromkeys(names))
    assert (params.stop, params.stop_token_ids, params.bad_words, params.top_k) == ((), (), (), 0)
    assert len(LLM(loaded(), max_model_len=64).generate([5, 6], params)[0].token_ids) == 62


def test_stop_strings_need_the_text():
    with pytest.raises(ConfigError, match=r"stop.*detokenize.*stop_token_ids"):
        SamplingParams(stop="x", detokenize=False)


@pytest.mark.parametrize(
    ("call", "error", "reason"),
    [
        (lambda llm: llm.generate([[]]), ConfigError, "prompt is empty"),
        (lambda llm: llm.generate(""), ConfigError, "prompt is empty"),
        (lambda llm: llm.generate([5, 97]), ConfigError, "0 to 96"),
        (lambda llm: llm.generate([5, -1]), ConfigError, "0 to 96"),
        (lambda llm: llm.generate([[5, 6], [5, "x"]]), ConfigError, "no token id"),
        (lambda llm: llm.generate([[5], [6]], [SamplingParams()]), ConfigError, "differ in number"),
        (lambda llm: llm.generate([5] * 64), CacheFull, "at most 63"),
        (lambda llm: llm.generate([5], SamplingParams(logit_bias={97: 1.0})), ConfigError, "names no token"),
        (lambda llm: llm.generate([5], SamplingParams(stop_token_ids=(-3,))), ConfigError, "names no token"),
        (lambda llm: next(llm.stream([5], SamplingParams(1.0, n=2))), ConfigError, "one answer"),
        (lambda llm: llm.generate([5], SamplingParams(allowed_token_ids=[97])), ConfigError, "names no token"),
        (lambda llm: next(llm.stream([5], SamplingParams(prompt_logprobs=0))), ConfigError, "use generate"),
    ],
)
def test_requests_that_cannot_be(call, error, reason):
    llm = LLM(talking(), max_model_len=64)
    with pytest.raises(error, match=reason):
        call(llm)
    assert all_free(llm.runner)
    assert len(llm.generate([5], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3


def test_one_bad_request_of_many_is_refused_before_any_is_decoded():
    llm = LLM(loaded())
    seen: list[int] = []
    params = SamplingParams(logits_processors=(lambda ids, scores: seen.append(1) or scores,), max_tokens=2)
    with pytest.raises(ConfigError):
        llm.generate([[5], [97]], params)
    assert not seen


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda llm: llm.generate("text"), "no tokenizer"),
        (lambda llm: llm.generate([5], SamplingParams(stop=("x",))), "stop_token_ids"),
        (lambda llm: llm.generate([5], SamplingParams(bad_words=("x",))), "no tokenizer"),
    ],
)
def test_text_without_a_tokenizer(call, reason):
    with pytest.raises(ConfigError, match=reason):
        call(LLM(loaded()))


def test_chat_without_a_template():
    llm = LLM(tiny_model("llama"), tokenizer=tokenizer(template=False))
    with pytest.raises(ConfigError, match="no chat template"):
        llm.generate([{"role": "user", "content": "hi"}])


BAD_ENGINE: dict[str, list[object]] = {
    "numerics": ["exact", True],
    "max_num_seqs": [0, 10**9, "x", 1.5, True, None],
    "max_model_len": [0, -4, "x", True, 1.5],
    "drafter": [PromptLookup, 5, Fixed()],
    "speculative_config": [5, ["ngram"]],
    "seed": ["x", 1.5],
    "generation_config": ["none", 3],
    "token": [3],
    "policy": ["fixed", Fixed, 5, PromptLookup()],
    "verifier": ["exact", Coupled, 5],
    "weights": ["int3", 4],
    "profile": [3],
    "dtype": [3],
    "device": [3],
    "tokenizer": [3],
    "processor": ["x"],
    "allow_lossy": ["no", 1],
    "trust_remote_code": ["false", 1],
    "model": [None, 5, b"x", LLM],
}


@pytest.mark.parametrize("name", BAD_ENGINE)
def test_engine_options(name):
    for value in BAD_ENGINE[name]:
        with pytest.raises(ConfigError, match=rf"LLM\.{name} has a wrong value.*Got: .*Expected: "):
            LLM(**{"model": loaded(), name: value})


BAD_PARTS: list[tuple[type, tuple[object, ...], dict[str, object]]] = [
    *((PromptLookup, (value,), {}) for value in ("x", 1.5, True, 0, 10**9, None)),
    (PromptLookup, (2, 3), {}),
    (PromptLookup, (), {"min_ngram": 0}),
    (PromptLookup, (), {"match": "last"}),
    (DraftModel, (None,), {}),
    (DraftModel, ("x",), {"weights": "int3"}),
    (DraftModel, ("x",), {"vision": "half"}),
    (DraftModel, ("x",), {"dtype": 3}),
    (SelfQuantized, ("32",), {}),
    (SelfQuantized, (), {"lm_head": "x"}),
    (SelfQuantized, (), {"weights": 3}),
    (Eagle, ("x", "dynamc"), {}),
    (Eagle, ("x",), {"top_k": 0}),
    (Medusa, ("x",), {"top_k": 1.5}),
    (Blockwise, (3,), {}),
    (Space, ("x",), {"top_k": 0}),
    (Choose, (5,), {}),
    (Choose, ([],), {}),
    (Choose, (["lookup"],), {}),
    (Choose, ([PromptLookup],), {}),
    *((Fixed, (value,), {}) for value in (-1, 1.5, "x", True)),
    (Fixed, (3, 1.5), {}),
    (Dynamic, (2, 3), {}),
    (Dynamic, (), {"min_chance": math.nan}),
    *((CostModel, (value,), {}) for value in ("x", 0, 65, 1.5)),
    (CostModel, (), {"profile": {}}),
    (CostModel, (), {"max_nodes": 64}),
    (Typical, (2.0,), {"allow_lossy": True}),
    (Typical, (), {"allow_lossy": 1}),
    (Coupled, ("x",), {}),
]


@pytest.mark.parametrize(("kind", "args", "options"), BAD_PARTS)
def test_options_of_drafters_policies_and_verifiers(kind, args, options):
    with pytest.raises(ConfigError, match=f"{kind.__name__}|range is empty|window is empty"):
        kind(*args, **options)


def test_what_only_the_model_can_tell():
    with pytest.raises(ConfigError, match="group size"):
        LLM(loaded(), drafter=SelfQuantized(33))
