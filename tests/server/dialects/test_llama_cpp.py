"""llama.cpp's API: shapes of answers and events, and what is refused."""

import pytest

from tests.server.dialects.common import LLAMA, ask, get, pieces, told
from tests.server.helpers import calling_llm

BODY = {"prompt": "ab ab", "n_predict": 12, "seed": 3}


def test_an_answer():
    whole, streamed = ask((LLAMA, {**BODY, "return_tokens": True}), (LLAMA, {**BODY, "stream": True}))
    made, (first, *_, last) = whole.json(), pieces(streamed)
    assert told(LLAMA, whole) == told(LLAMA, streamed)
    assert made["tokens"] == [token for part in pieces(streamed) for token in part["tokens"]]
    assert first.keys() == {
        *("index", "content", "tokens", "stop", "id_slot", "tokens_predicted", "tokens_evaluated"),
    }  # fmt: skip
    assert last.keys() == made.keys()
    assert (made["stop_type"], made["stopping_word"], made["prompt"]) == ("limit", "", "ab ab")
    assert made["generation_settings"]["seed"] == 3
    timings = made["timings"]
    assert (timings["prompt_n"] + timings["cache_n"], timings["predicted_n"]) == (5, 12)
    assert "[DONE]" not in streamed.text


def test_tokens_are_a_prompt():
    ids = calling_llm().encode("ab ab")
    text, tokens = ask((LLAMA, BODY), (LLAMA, {**BODY, "prompt": ids}))
    assert tokens.json()["content"] == text.json()["content"]
    assert tokens.json()["prompt"]


def test_forms_and_why_it_ended():
    base = {**BODY, "n_predict": 100}
    grammar, schema, word, biased = ask(
        (LLAMA, {**base, "grammar": 'root ::= "abcd"'}),
        (LLAMA, {**base, "json_schema": {"enum": ["ab"]}}),
        (LLAMA, {**base, "grammar": 'root ::= "abcd"', "stop": ["c"]}),
        (LLAMA, {**base, "n_predict": 3, "temperature": 0, "logit_bias": [[7, 100]]}),
    )
    assert (grammar.json()["content"], grammar.json()["stop_type"]) == ("abcd", "eos")
    assert schema.json()["content"] == '"ab"'
    assert [word.json()[name] for name in ("content", "stop_type", "stopping_word")] == ["ab", "word", "c"]
    assert biased.json()["content"] == calling_llm().tokenizer.decode([7]) * 3


def test_probabilities():
    body = {**BODY, "n_probs": 2}
    whole, streamed = ask((LLAMA, body), (LLAMA, {**body, "stream": True}))
    entries = whole.json()["completion_probabilities"]
    assert [one for part in pieces(streamed) for one in part.get("completion_probabilities", ())] == entries
    assert entries[0].keys() == {"id", "token", "bytes", "logprob", "top_logprobs"}
    assert [len(one["top_logprobs"]) for one in entries] == [2] * 12


def test_text_and_tokens():
    ids = calling_llm().tokenizer.encode("ab 12", add_special_tokens=False)
    one, whole, text = ask(
        ("/tokenize", {"content": "ab 12"}), ("/tokenize", {"content": "ab 12", "add_special": True}),
        ("/detokenize", {"tokens": ids}),
    )  # fmt: skip
    assert one.json()["tokens"] == ids
    assert whole.json()["tokens"] == calling_llm().encode("ab 12")
    assert text.json()["content"] == "ab 12"
    both, surrogate = ask(("/tokenize", {"content": "a", "prompt": "a"}), ("/tokenize", {"content": "\ud800"}))
    assert (both.status_code, surrogate.status_code) == (400, 400)


def test_health_and_props():
    health, props = get("/health", "/props")
    assert health.json() == {"status": "ok"}
    told = props.json()
    assert told["default_generation_settings"]["n_ctx"] == 2048
    assert told["default_generation_settings"]["params"]["temperature"] == 1.0
    assert told["total_slots"] == 2
    assert told["chat_template"] == calling_llm().tokenizer.chat_template


REFUSED = {
    "an unknown field": ({"wat": 1}, "wat"),
    "what changes answers": ({"mirostat": 2}, "mirostat"),
    "a penalty of the last tokens": ({"repeat_last_n": 64}, "repeat_last_n"),
    "an order": ({"samplers": ["top_k"]}, "samplers"),
    "several prompts": ({"prompt": ["a", "b"]}, "prompt"),
    "no prompt": ({"prompt": []}, "prompt"),
    "no such token": ({"prompt": [10**9]}, "token"),
    "no tokens": ({"n_predict": 0}, "max_tokens"),
    "two forms": ({"grammar": 'root ::= "a"', "json_schema": {}}, "one form"),
    "no grammar": ({"grammar": "wat"}, ""),
    "a bias of a text": ({"logit_bias": [["a", 1.0]]}, "logit_bias"),
    "too many probabilities": ({"n_probs": 21}, "n_probs"),
    "another model": ({"model": "other"}, "does not exist"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(fields, words, stream):
    (answer,) = ask((LLAMA, {**BODY, "stream": stream, **fields}))
    error = answer.json()["error"]
    assert answer.status_code == error["code"] == (404 if "model" in fields else 400)
    assert error["type"] == ("not_found_error" if "model" in fields else "invalid_request_error")
    assert words in error["message"]


def test_a_prompt_that_does_not_fit():
    (answer,) = ask((LLAMA, {**BODY, "prompt": "a" * 4000}))
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "exceed_context_size_error")


def test_keys():
    (none,) = get("/props", api_keys=["k"])
    assert (none.status_code, none.json()["error"]["type"]) == (401, "authentication_error")
