"""The law of dialects: the same request has the same tokens as in the OpenAI API, whole and streamed."""

import base64
import io
import json

import pytest

from paceline import LLM
from paceline.server.dialects import anthropic_chats, ollama_chats
from paceline.server.dialects.llama_cpp import LlamaCompletion
from tests.server.dialects.common import ANTHROPIC, LLAMA, OLLAMA, OPENAI, SAID, ask, told
from tests.server.test_tools import TOOL
from tests.vision.families import make_image, seeing

NAMES = {
    "/api/chat": {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"},
    "/v1/messages": {"stop": "stop_sequences"},
    "/completion": {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "seed": "seed"},
}
GREEDY, SEEDED = {"temperature": 0, "max_tokens": 24}, {"temperature": 0.9, "seed": 3, "max_tokens": 24}
OPTIONS = [
    GREEDY, SEEDED,
    {**SEEDED, "temperature": 2.0}, {**SEEDED, "top_k": 2}, {**SEEDED, "top_p": 0.3}, {**SEEDED, "min_p": 0.3},
    {**SEEDED, "seed": 4}, {**SEEDED, "max_tokens": 7}, {**SEEDED, "stop": ["O", "="]},
    {**SEEDED, "presence_penalty": 2}, {**SEEDED, "frequency_penalty": -1.5}, {**SEEDED, "repetition_penalty": 3.0},
    {"temperature": 1, "top_k": 1, "max_tokens": 25}, {"temperature": 1, "top_p": 1e-6, "max_tokens": 26},
    {**GREEDY, "stop": ["K"]},
]  # fmt: skip
PLAIN = {"prompt": "ab ab"}


def in_dialect(path, options):
    """The options with the names of a dialect; None where it has not all of them."""
    if path == ANTHROPIC and options.keys() & {"seed", "min_p"}:
        return None
    renamed = {NAMES[path].get(name, name): value for name, value in options.items()}
    return {"options": renamed} if path == OLLAMA else renamed


def check(path):
    """Answers of both APIs to the same requests, which differ from each other."""
    reference, said = ("/v1/completions", PLAIN) if path == LLAMA else (OPENAI, {"messages": SAID})
    taken = [one for one in OPTIONS if in_dialect(path, one) is not None]
    for is_stream in (False, True):
        usage = {"stream_options": {"include_usage": True}} if is_stream else {}
        asked = [(reference, {**said, **one, "stream": is_stream, **usage}) for one in taken]
        same = [(path, {**said, **in_dialect(path, one), "stream": is_stream}) for one in taken]
        answers = ask(*asked, *same)
        wanted, made = answers[: len(taken)], answers[len(taken) :]
        expected = [told(reference, one) for one in wanted]
        assert [told(path, one) for one in made] == expected
        assert len({text for text, *_ in expected}) == len(taken)


@pytest.mark.parametrize("path", NAMES)
def test_the_same_options_have_the_same_tokens(path):
    check(path)


@pytest.mark.parametrize("name", ["top_k", "min_p", "stop", "repetition_penalty"])
def test_a_translation_that_loses_an_option_is_seen(name, monkeypatch):
    original = ollama_chats.Options.sampling
    monkeypatch.setattr(ollama_chats.Options, "sampling", lambda self: {**original(self), name: None})
    with pytest.raises(AssertionError):
        check(OLLAMA)


def test_a_stream_that_loses_its_end_is_seen(monkeypatch):
    original = LlamaCompletion.as_completion
    monkeypatch.setattr(
        LlamaCompletion, "as_completion",
        lambda self, model: original(self, model).model_copy(update={"max_tokens": 5} if self.stream else {}),
    )  # fmt: skip
    with pytest.raises(AssertionError):
        check(LLAMA)


FUNCTION = TOOL["function"]
ARGUMENTS = {"x": 2}
TALK = {
    OPENAI: {
        "tools": [TOOL],
        "messages": [
            {"role": "system", "content": "be brief"}, *SAID,
            {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps(ARGUMENTS)}}]},
            {"role": "tool", "tool_call_id": "c", "content": "20"}, {"role": "user", "content": "and?"},
        ],
    },
    OLLAMA: {
        "tools": [TOOL],
        "messages": [
            {"role": "system", "content": "be brief"}, *SAID,
            {"role": "assistant", "content": "so", "thinking": "hm", "tool_calls": [
                {"function": {"name": "f", "arguments": ARGUMENTS}}]},
            {"role": "tool", "tool_name": "f", "content": "20"}, {"role": "user", "content": "and?"},
        ],
    },
    ANTHROPIC: {
        "tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}],
        "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            *SAID,
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "so"},
                {"type": "tool_use", "id": "c", "name": "f", "input": ARGUMENTS}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "20"}]},
                {"type": "text", "text": "and?"}]},
        ],
    },
}  # fmt: skip


def talks(paths=(OLLAMA, ANTHROPIC)):
    limits = {OPENAI: GREEDY, OLLAMA: in_dialect(OLLAMA, GREEDY), ANTHROPIC: GREEDY}
    asked = [(path, {**TALK[path], **limits[path], "stream": False}) for path in (OPENAI, *paths)]
    wanted, *made = [told(path, one) for (path, _), one in zip(asked, ask(*asked), strict=True)]
    assert made == [wanted] * len(paths)


def test_a_talk_with_tools_is_the_same_prompt():
    talks()


@pytest.mark.parametrize(
    "change", [{"role": "user"}, {"content": "2"}, {"reasoning_content": "h"}, {"tool_calls": None}]
)
def test_a_translation_that_loses_a_part_of_a_talk_is_seen(change, monkeypatch):
    original = anthropic_chats._chat
    lossy = lambda turns: [message.model_copy(update=change) for message in original(turns)]  # noqa: E731
    monkeypatch.setattr(anthropic_chats, "_chat", lossy)
    with pytest.raises(AssertionError):
        talks((ANTHROPIC,))


def test_images_are_the_same_prompt():
    file = io.BytesIO()
    make_image(1).save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    source = {"type": "base64", "media_type": "image/png", "data": data}
    text = {"type": "text", "text": "which?"}
    said = {
        OPENAI: {"role": "user", "content": [image, text]},
        OLLAMA: {"role": "user", "content": "which?", "images": [data]},
        ANTHROPIC: {"role": "user", "content": [{"type": "image", "source": source}, text]},
    }
    limits = {OPENAI: GREEDY, OLLAMA: in_dialect(OLLAMA, GREEDY), ANTHROPIC: GREEDY}
    asked = [(path, {"messages": [said[path]], "stream": False, **limits[path]}) for path in said]
    asked.append(("/api/generate", {"prompt": "which?", "images": [data], "stream": False, **limits[OLLAMA]}))
    answers = [
        told(path, one) for (path, _), one in zip(asked, ask(*asked, llm=LLM(seeing(), max_num_seqs=2)), strict=True)
    ]
    assert answers == answers[:1] * 4
    assert answers[0][3] > 20
