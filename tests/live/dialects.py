"""The clients of Ollama's, Anthropic's and llama.cpp's APIs; the last has none of its own."""

import json
import urllib.error
import urllib.request
from typing import Any

from tests.live.checks import MOST, RIVERS, TOOL, Target, Weather, assert_raises
from tests.live.nonsense import red_square

SAID: list[Any] = [{"role": "user", "content": RIVERS}]
RED = red_square(32).partition(",")[2]


def ollama(at: Target) -> None:
    """ollama, the official Python client."""
    from ollama import Client, ResponseError

    client = Client(host=at.root, headers={"Authorization": f"Bearer {at.api_key}"})
    asked: dict[str, Any] = {"model": at.model, "options": {"seed": 1, "num_predict": MOST, "num_ctx": 512}}
    whole: Any = None
    with at.check("ollama", "list, show, ps"):
        assert [one.model for one in client.list().models] == [at.model]
        assert "completion" in (client.show(at.model).capabilities or ())
        assert client.ps().models[0].model == at.model
    with at.check("ollama", "chat"):
        whole = client.chat(**asked, messages=SAID)
        assert whole.message.content
        assert whole.eval_count
    with at.check("ollama", "stream, the same answer"):
        pieces = list(client.chat(**asked, messages=SAID, stream=True))
        assert "".join(one.message.content or "" for one in pieces) == whole.message.content
        assert (pieces[-1].done, pieces[-1].eval_count) == (True, whole.eval_count)
    with at.check("ollama", "another name"):
        named = client.chat(**{**asked, "model": f"{at.model}:latest"}, messages=SAID)
        assert named.message.content == whole.message.content
    with at.check("ollama", "generate"):
        assert client.generate(**asked, prompt=RIVERS).response == whole.message.content
        assert client.generate(**asked, prompt="One, two,", raw=True).response
        assert client.generate(at.model, keep_alive="5m").done
    with at.check("ollama", "structured"):
        options = {"seed": 1, "num_predict": 200}
        made = client.chat(at.model, messages=SAID, options=options, format=Weather.model_json_schema())
        Weather.model_validate_json(made.message.content or "")
    with at.check("ollama", "tools"):
        said = [*SAID, client.chat(**asked, messages=SAID, tools=[TOOL]).message]
        called = {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Rome"}}}]}
        said += [called, {"role": "tool", "tool_name": "weather", "content": "20 degrees"}]
        assert client.chat(**asked, messages=said, tools=[TOOL]).done
    with at.check("ollama", "log-probabilities"):
        told = client.chat(**asked, messages=SAID, logprobs=True, top_logprobs=2).logprobs
        assert len(told or ()) == whole.eval_count
    with at.check("ollama", "embed"):
        made = client.embed(at.model, ["One.", "Two."])
        assert len(made.embeddings) == 2
        assert client.embed(at.model, "Two.").embeddings[0] == made.embeddings[1]
    with at.check("ollama", "image"):
        seen = [{"role": "user", "content": "Colour?", "images": [RED]}]
        if at.sees:
            assert client.chat(**asked, messages=seen).message.content
        else:
            assert_raises(ResponseError, lambda: client.chat(**asked, messages=seen))
    with at.check("ollama", "refusals"):
        assert_raises(ResponseError, lambda: client.chat("another", messages=SAID))
        assert_raises(ResponseError, lambda: client.chat(at.model, messages=SAID, options={"mirostat": 2}))
        assert_raises(ResponseError, lambda: client.generate(at.model, prompt="a", suffix="b"))


def anthropic(at: Target) -> None:
    """anthropic, the official Python client; and requests with all that coding agents send."""
    from anthropic import Anthropic, BadRequestError, NotFoundError

    client = Anthropic(base_url=at.root, api_key=at.api_key, max_retries=0, timeout=300)
    greedy: dict[str, Any] = {"model": at.model, "messages": SAID, "extra_body": {"temperature": 0}}
    tool: dict[str, Any] = {"name": "weather", "description": "Of a city.", "input_schema": Weather.model_json_schema()}
    whole: Any = None
    with at.check("anthropic", "message"):
        whole = client.messages.create(**greedy, max_tokens=MOST)
        assert whole.content[0].text
        assert whole.usage.output_tokens <= MOST
    with at.check("anthropic", "stream, the same answer"), client.messages.stream(**greedy, max_tokens=MOST) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        final = stream.get_final_message()
        assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    with at.check("anthropic", "count_tokens"):
        read = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
        assert client.messages.count_tokens(model=at.model, messages=SAID).input_tokens == read
    for is_stream in (False, True):
        with at.check("anthropic", f"agent, {'streams' if is_stream else 'two rounds'}"):
            said: list[Any] = [{"role": "user", "content": "How is Rome?"}]
            for choice in ("any", "any", "none"):
                step: dict[str, Any] = {"model": at.model, "messages": said, "tools": [tool], "max_tokens": 200}
                step |= {"tool_choice": {"type": choice}, "max_tokens": MOST if choice == "none" else 200}
                if is_stream:
                    with client.messages.stream(**step) as stream:
                        made = stream.get_final_message()
                else:
                    made = client.messages.create(**step)
                said.append({"role": "assistant", "content": made.content})
                calls = [one for one in made.content if one.type == "tool_use"]
                assert made.stop_reason == "tool_use" or choice == "none"
                for call in calls:
                    Weather.model_validate(call.input)
                results = [{"type": "tool_result", "tool_use_id": one.id, "content": "20 degrees"} for one in calls]
                said += [{"role": "user", "content": results}] if results else []
            assert [one["role"] for one in said] == ["user", *["assistant", "user"] * 2, "assistant"]
    with at.check("anthropic", "like a coding agent"):
        system = [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2;"},
            {"type": "text", "text": "You are an agent. " * 20, "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ]
        reminder = {"type": "text", "text": "<system-reminder>Today.</system-reminder>"}
        words = {"type": "text", "text": RIVERS, "cache_control": {"type": "ephemeral"}}
        result = {"type": "tool_result", "tool_use_id": "t1", "content": "no", "is_error": True}
        use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}
        body: dict[str, Any] = {
            "system": system,
            "messages": [
                {"role": "user", "content": [reminder, words]},
                {"role": "assistant", "content": [{"type": "text", "text": "Well."}, use]},
                {"role": "user", "content": [result, reminder]},
            ],
            "tools": [{**tool, "eager_input_streaming": True, "cache_control": {"type": "ephemeral"}}],
            "thinking": {"type": "disabled"},
            "output_config": {"effort": "medium"},
            "metadata": {"user_id": "user_1"},
            "extra_query": {"beta": "true"},
            "extra_headers": {"anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14"},
            "extra_body": {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        }
        with client.messages.stream(model=at.model, max_tokens=MOST, **body) as stream:
            assert stream.get_final_message().role == "assistant"
    with at.check("anthropic", "parse"):
        made: Any = client.messages.parse(**greedy, max_tokens=200, output_format=Weather)
        assert isinstance(made.parsed_output, Weather)
    with at.check("anthropic", "image"):
        source = {"type": "base64", "media_type": "image/png", "data": RED}
        parts: Any = [{"type": "image", "source": source}, {"type": "text", "text": "Colour?"}]
        seen: dict[str, Any] = {"model": at.model, "messages": [{"role": "user", "content": parts}], "max_tokens": 8}
        if at.sees:
            assert client.messages.create(**seen).content
        else:
            assert_raises(BadRequestError, lambda: client.messages.create(**seen))
    with at.check("anthropic", "refusals"):
        assert_raises(NotFoundError, lambda: client.messages.create(**{**greedy, "model": "another"}, max_tokens=1))
        assert_raises(BadRequestError, lambda: client.messages.create(**greedy, max_tokens=-1))


def llama_cpp(at: Target) -> None:
    """The examples of llama.cpp's server, by plain HTTP."""

    def ask(path: str, body: Any = None) -> Any:
        head = {"Authorization": f"Bearer {at.api_key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(at.root + path, data, head)) as answer:
            text = answer.read().decode()
        if "event-stream" not in answer.headers["content-type"]:
            return json.loads(text)
        return [json.loads(one.removeprefix("data: ")) for one in text.split("\n\n") if one]

    asked = {"prompt": "One, two,", "n_predict": MOST, "seed": 1, "cache_prompt": True}
    whole: Any = None
    with at.check("llama_cpp", "health and props"):
        assert ask("/health") == {"status": "ok"}
        props = ask("/props")
        assert props["default_generation_settings"]["n_ctx"] > 0
        assert props["total_slots"] > 0
    with at.check("llama_cpp", "completion"):
        whole = ask("/completion", {**asked, "return_tokens": True})
        assert whole["content"]
        assert len(whole["tokens"]) == whole["tokens_predicted"]
    with at.check("llama_cpp", "stream, the same answer"):
        pieces = ask("/completion", {**asked, "stream": True})
        assert "".join(one["content"] for one in pieces) == whole["content"]
        assert [token for one in pieces for token in one["tokens"]] == whole["tokens"]
        assert [one["stop"] for one in pieces[-2:]] == [False, True]
    with at.check("llama_cpp", "tokenize, there and back"):
        tokens = ask("/tokenize", {"content": asked["prompt"]})["tokens"]
        assert ask("/detokenize", {"tokens": tokens})["content"] == asked["prompt"]
        assert ask("/completion", {**asked, "prompt": tokens})["content"]
    with at.check("llama_cpp", "json_schema and grammar"):
        schema = {**asked, "json_schema": Weather.model_json_schema(), "n_predict": 200}
        Weather.model_validate_json(ask("/completion", schema)["content"])
        assert ask("/completion", {**asked, "grammar": 'root ::= "yes" | "no"'})["content"] in ("yes", "no")
    with at.check("llama_cpp", "probabilities"):
        told = ask("/completion", {**asked, "n_predict": 4, "n_probs": 3})["completion_probabilities"]
        assert [len(one["top_logprobs"]) for one in told] == [3] * 4
    with at.check("llama_cpp", "refusals"):
        assert_raises(urllib.error.HTTPError, lambda: ask("/completion", {**asked, "mirostat": 2}))
        assert_raises(urllib.error.HTTPError, lambda: ask("/completion", {**asked, "wat": 1}))
