"""Do clients of the OpenAI API, and of others, work with `paceline serve` as they are? Runs them, and prints a table.

    paceline serve smollm2-135m &
    python -m tests.live.clients --base-url http://127.0.0.1:8000/v1
    python -m tests.live.clients --base-url http://127.0.0.1:8000/v1 openai langchain --image

Without names all run: openai, langchain (langchain-openai), llama_index (llama-index-llms-openai-like), litellm,
instructor, curl, ollama, anthropic, llama_cpp (plain HTTP), and in a folder (--node-dir) where
`npm install openai ai @ai-sdk/openai-compatible zod ollama @anthropic-ai/sdk` was run openai_node, ai_sdk, ollama_node
and anthropic_node. One that is not installed is skipped. --image: the model sees. Exit code 1 where a check failed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.live.checks import MOST, RIVERS, TOOL, Target, Weather, assert_raises
from tests.live.dialects import anthropic, llama_cpp, ollama
from tests.live.nonsense import red_square


def openai(at: Target) -> None:
    """The official Python client."""
    from openai import BadRequestError, NotFoundError, OpenAI

    client = OpenAI(base_url=at.base_url, api_key=at.api_key, max_retries=0, timeout=300)
    asked: dict[str, Any] = {"model": at.model, "messages": [{"role": "user", "content": RIVERS}], "seed": 1}
    whole = None
    with at.check("openai", "models"):
        assert [one.id for one in client.models.list()] == [at.model]
    with at.check("openai", "chat"):
        whole = client.chat.completions.create(**asked, max_completion_tokens=MOST)
        assert whole.choices[0].message.content
        assert whole.usage is not None
    with at.check("openai", "stream, the same answer"):
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        pieces = list(client.chat.completions.create(**asked, **options, max_completion_tokens=MOST))
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        assert whole is not None
        assert text == whole.choices[0].message.content
        assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
    with at.check("openai", "stream helper"), client.chat.completions.stream(**asked, max_tokens=MOST) as events:
        assert {"chunk", "content.delta", "content.done"} <= {event.type for event in events}
    with at.check("openai", "completion"):
        made = client.completions.create(model=at.model, prompt=["One, two,", "A, B,"], max_tokens=8, seed=1)
        assert len(made.choices) == 2
    with at.check("openai", "log-probabilities"):
        told = client.chat.completions.create(**asked, max_tokens=4, logprobs=True, top_logprobs=2).choices[0].logprobs
        assert told is not None
        assert len(told.content or []) == 4
    with at.check("openai", "tools, forced"):
        calls = client.chat.completions.create(**asked, tools=[TOOL], tool_choice="required").choices[0].message
        Weather.model_validate_json(calls.tool_calls[0].function.arguments)  # type: ignore
        answered = {"role": "tool", "tool_call_id": calls.tool_calls[0].id, "content": "20 degrees"}  # type: ignore
        client.chat.completions.create(
            model=at.model, messages=[*asked["messages"], calls, answered], tools=[TOOL], max_tokens=4
        )
    with at.check("openai", "tools, in a stream"):
        pieces = list(client.chat.completions.create(**asked, tools=[TOOL], tool_choice="required", stream=True))
        found = [one for piece in pieces for one in piece.choices[0].delta.tool_calls or ()]
        Weather.model_validate_json("".join(one.function.arguments for one in found))
        assert pieces[-1].choices[0].finish_reason == "tool_calls"
    with at.check("openai", "tools, free"):
        client.chat.completions.create(**asked, tools=[TOOL], max_tokens=8, parallel_tool_calls=True)
    for is_stream in (False, True):
        with at.check("openai", f"agent, {'streams' if is_stream else 'two rounds'}"):
            said: list[Any] = [{"role": "user", "content": "How is Rome?"}]
            for choice in ("required", "required", "none"):
                step: dict[str, Any] = {"model": at.model, "messages": said, "tools": [TOOL], "tool_choice": choice}
                step |= {"max_tokens": MOST} if choice == "none" else {}
                made = client.chat.completions.create(**step, seed=1, stream=is_stream)
                said.append(joined(made) if is_stream else made.choices[0].message.model_dump())
                for call in said[-1]["tool_calls"] or ():
                    said.append({"role": "tool", "tool_call_id": call["id"], "content": "20 degrees"})
            assert [one["role"] for one in said] == ["user", *["assistant", "tool"] * 2, "assistant"]
    with at.check("openai", "responses, sent back"):
        given: list[Any] = [{"role": "user", "content": RIVERS}]
        for _ in range(2):
            answer = client.responses.create(model=at.model, input=given, max_output_tokens=MOST)
            given += [one.model_dump() for one in answer.output] + [{"role": "user", "content": "And more?"}]
            assert answer.output_text
    with at.check("openai", "embeddings"):
        assert len(client.embeddings.create(model=at.model, input=["One.", "Two."]).data) == 2
    with at.check("openai", "parse"):
        parsed = client.chat.completions.parse(**asked, response_format=Weather).choices[0].message.parsed
        assert isinstance(parsed, Weather)
    with at.check("openai", "image"):
        parts = [{"type": "text", "text": "Colour?"}, {"type": "image_url", "image_url": {"url": red_square(32)}}]
        seen = {"model": at.model, "messages": [{"role": "user", "content": parts}], "max_tokens": 8}
        if at.sees:
            assert client.chat.completions.create(**seen).choices[0].message.content
        else:
            assert_raises(BadRequestError, lambda: client.chat.completions.create(**seen))
    with at.check("openai", "refusals"):
        assert_raises(NotFoundError, lambda: client.chat.completions.create(**{**asked, "model": "another"}))
        assert_raises(BadRequestError, lambda: client.chat.completions.create(**asked, extra_body={"wat": 1}))


def joined(pieces: Any) -> dict[str, Any]:
    """The message of a stream, as a client that knows only this API puts it together."""
    deltas = [piece.choices[0].delta.model_dump() for piece in pieces if piece.choices]
    calls = list[dict[str, Any]]()
    for part in (call for one in deltas for call in one["tool_calls"] or ()):
        if part["index"] == len(calls):
            calls.append(part)
        else:
            calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    return {**deltas[0], "content": "".join(one["content"] or "" for one in deltas), "tool_calls": calls}


def langchain(at: Target) -> None:
    """langchain-openai."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=at.base_url, api_key=at.api_key, model=at.model, seed=1, max_tokens=MOST, max_retries=0)  # type: ignore
    forms = ChatOpenAI(base_url=at.base_url, api_key=at.api_key, model=at.model, seed=1, max_retries=0)  # type: ignore
    with at.check("langchain", "invoke"):
        assert chat.invoke(RIVERS).content
    with at.check("langchain", "stream"):
        assert "".join(str(one.content) for one in chat.stream(RIVERS)) == chat.invoke(RIVERS).content
    with at.check("langchain", "batch"):
        assert len(chat.batch([RIVERS, "Hello"])) == 2
    with at.check("langchain", "bind_tools"):
        called: Any = forms.bind_tools([Weather], tool_choice="any").invoke("How is Rome?")
        Weather.model_validate(called.tool_calls[0]["args"])
    for is_stream in (False, True):
        with at.check("langchain", f"agent, {'streams' if is_stream else 'two rounds'}"):
            said: list[Any] = [HumanMessage("How is Rome?")]
            for choice in ("any", "any", "none"):
                asked = (chat if choice == "none" else forms).bind_tools([Weather], tool_choice=choice)
                pieces: list[Any] = list(asked.stream(said)) if is_stream else [asked.invoke(said)]
                said.append(sum(pieces[1:], pieces[0]))
                said += [ToolMessage("20 degrees", tool_call_id=one["id"]) for one in said[-1].tool_calls]
            assert [one.type.removesuffix("MessageChunk").lower() for one in said] == [
                "human",
                *["ai", "tool"] * 2,
                "ai",
            ]
    for method in ("json_schema", "function_calling"):
        with at.check("langchain", f"structured {method}"):
            made = forms.with_structured_output(Weather, method=method).invoke("How is Rome?")  # type: ignore
            assert isinstance(made, Weather)


def llama_index(at: Target) -> None:
    """llama-index-llms-openai-like."""
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    options: dict[str, Any] = {"api_base": at.base_url, "api_key": at.api_key, "model": at.model, "max_retries": 0}
    chat = OpenAILike(**options, is_chat_model=True, max_tokens=MOST)
    forms = OpenAILike(**options, is_chat_model=True, is_function_calling_model=True, max_tokens=200)
    with at.check("llama_index", "complete"):
        assert OpenAILike(**options, max_tokens=8).complete("One, two,").text
    with at.check("llama_index", "chat"):
        assert chat.chat([ChatMessage(role="user", content=RIVERS)]).message.content
    with at.check("llama_index", "stream_chat"):
        assert list(chat.stream_chat([ChatMessage(role="user", content=RIVERS)]))[-1].message.content
    with at.check("llama_index", "chat_with_tools"):
        tool = FunctionTool.from_defaults(lambda city, is_warm: "", name="weather", fn_schema=Weather)
        answer = forms.chat_with_tools([tool], user_msg="How is Rome?", tool_required=True)
        assert forms.get_tool_calls_from_response(answer)[0].tool_name == "weather"
    with at.check("llama_index", "structured"):
        made = forms.as_structured_llm(Weather).complete("How is Rome?")
        assert isinstance(made.raw, Weather)


def litellm(at: Target) -> None:
    """litellm, by its generic provider and by the one for vLLM."""
    import litellm as library

    said: dict[str, Any] = {"messages": [{"role": "user", "content": RIVERS}], "seed": 1}
    said |= {"api_base": at.base_url, "api_key": at.api_key, "num_retries": 0}
    for provider in ("openai", "hosted_vllm"):
        asked = {**said, "model": f"{provider}/{at.model}"}
        with at.check("litellm", f"{provider} chat"):
            whole: Any = library.completion(**asked, max_tokens=MOST)
            assert whole.choices[0].message.content
        with at.check("litellm", f"{provider} stream"):
            pieces: Any = library.completion(**asked, max_tokens=MOST, stream=True)
            assert "".join(piece.choices[0].delta.content or "" for piece in pieces)
        with at.check("litellm", f"{provider} tools"):
            made: Any = library.completion(**asked, tools=[TOOL], tool_choice="required")
            Weather.model_validate_json(made.choices[0].message.tool_calls[0].function.arguments)
        with at.check("litellm", f"{provider} json_schema"):
            made = library.completion(**asked, response_format=Weather)
            Weather.model_validate_json(made.choices[0].message.content)


def instructor(at: Target) -> None:
    """instructor, in each of its modes for the OpenAI API."""
    import instructor as library
    from openai import OpenAI

    client = OpenAI(base_url=at.base_url, api_key=at.api_key, max_retries=0)
    for mode in (library.Mode.TOOLS, library.Mode.JSON_SCHEMA, library.Mode.TOOLS_STRICT):
        with at.check("instructor", mode.name):
            said: Any = [{"role": "user", "content": "How is Rome?"}]
            made = library.from_openai(client, mode=mode).chat.completions.create(
                model=at.model, messages=said, response_model=Weather, max_retries=0, max_tokens=400
            )
            assert isinstance(made, Weather)


def curl(at: Target) -> None:
    """curl, as docs/serving.md shows it."""
    if shutil.which("curl") is None:
        raise ModuleNotFoundError("curl")
    body = {"model": at.model, "messages": [{"role": "user", "content": RIVERS}], "max_tokens": MOST, "seed": 1}
    head = ["curl", "-sS", "--fail-with-body", "-N", f"{at.base_url}/chat/completions"]
    head += ["-H", "Content-Type: application/json", "-H", f"Authorization: Bearer {at.api_key}", "-d"]
    with at.check("curl", "chat"):
        out = subprocess.run([*head, json.dumps(body)], capture_output=True, text=True, check=True).stdout
        assert json.loads(out)["choices"][0]["message"]["content"]
    with at.check("curl", "stream"):
        streamed = [*head, json.dumps({**body, "stream": True})]
        out = subprocess.run(streamed, capture_output=True, text=True, check=True).stdout
        assert out.endswith("data: [DONE]\n\n")


def _node(at: Target, client: str) -> None:
    package = PACKAGES[client]
    if shutil.which("node") is None or not (at.node_dir / "node_modules" / package).is_dir():
        raise ModuleNotFoundError(f"{package} in node_modules of --node-dir")
    env = {**os.environ, "AT_URL": at.base_url, "AT_KEY": at.api_key, "AT_MODEL": at.model}
    command = ["node", str(Path(__file__).with_suffix(".mjs").resolve()), package]
    done = subprocess.run(command, cwd=at.node_dir, env=env, capture_output=True, text=True)
    for what, error in map(json.loads, done.stdout.splitlines()):
        with at.check(client, what):
            assert error is None, error
    with at.check(client, "runs to its end"):
        assert done.returncode == 0, done.stderr


def openai_node(at: Target) -> None:
    """The official client for JavaScript."""
    _node(at, "openai_node")


def ai_sdk(at: Target) -> None:
    """Vercel's AI SDK."""
    _node(at, "ai_sdk")


def ollama_node(at: Target) -> None:
    """Ollama's client for JavaScript."""
    _node(at, "ollama_node")


def anthropic_node(at: Target) -> None:
    """Anthropic's client for JavaScript."""
    _node(at, "anthropic_node")


CLIENTS = (
    *(openai, langchain, llama_index, litellm, instructor, curl, openai_node, ai_sdk),
    *(ollama, ollama_node, anthropic, anthropic_node, llama_cpp),
)
PACKAGES = {
    "langchain": "langchain-openai",
    "llama_index": "llama-index-llms-openai-like",
    "openai_node": "openai",
    "ai_sdk": "ai",
    "ollama_node": "ollama",
    "anthropic_node": "@anthropic-ai/sdk",
}


def version(client: str, node_dir: Path) -> str:
    """Of what is installed; "" where nothing says it."""
    package = PACKAGES.get(client, client)
    if (listed := node_dir / "node_modules" / package / "package.json").exists() and client.endswith(("_node", "_sdk")):
        return json.loads(listed.read_text())["version"]
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return ""


def main() -> None:
    """Run the clients one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", required=True, help="with /v1")
    parser.add_argument("--api-key", default=os.environ.get("PACELINE_API_KEY", "none"))
    parser.add_argument("--image", action="store_true", help="the model sees")
    parser.add_argument("--node-dir", type=Path, default=Path())
    parser.add_argument("client", nargs="*", help=", ".join(one.__name__ for one in CLIENTS))
    options = parser.parse_args()
    at = Target(options.base_url.rstrip("/"), options.api_key, options.image, options.node_dir)
    at.find_model()
    for client in CLIENTS:
        if not options.client or client.__name__ in options.client:
            try:
                client(at)
                print(f"{client.__name__:12} {version(client.__name__, at.node_dir)}", flush=True)
            except ModuleNotFoundError as error:
                at.rows.append((client.__name__, "", f"skipped: not installed: {error}"))
                print(f"{client.__name__:12} {'':22} {at.rows[-1][2]}", flush=True)
    failed = sum(told.startswith("FAILED") for *_, told in at.rows)
    print(f"{sum(told == 'passed' for *_, told in at.rows)} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
