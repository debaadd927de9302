"""Log-probabilities name tokens: bytes and offsets are those of the text, and no entry overwrites another."""

import ast
import asyncio
from functools import cache

import pytest

from paceline import LLM, PromptLookup, SamplingParams
from paceline.core.request import TokenLogprob
from paceline.engine.request import with_texts
from paceline.server.completions import by_text
from tests.methods.tokenizers_made import reader
from tests.server.helpers import events, server

SAID = "true 😀! naïve 日本 fox"
FORCED = {"structured_outputs": {"choice": [SAID]}}
KINDS = ["byte level", "sentencepiece", "sentencepiece, no prefix"]
TOP = 20


@cache
def llm(kind: str) -> LLM:
    made = LLM(reader(kind, max_position_embeddings=512), drafter=PromptLookup(), max_num_seqs=2)
    made.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return made


def ask(kind: str, path: str, **body):
    """A choice as a whole, and its parts in a stream."""

    async def both():
        async with server(llm(kind)) as client:
            given = {"model": "tiny", "max_tokens": 60, "seed": 1, **body}
            whole = (await client.post(path, json=given)).json()["choices"][0]
            streamed = events((await client.post(path, json={**given, "stream": True})).text)
        return whole, [choice for piece in streamed for choice in piece["choices"] if choice["logprobs"]]

    return asyncio.run(both())


def chat(kind: str, **options):
    """The text of an answer and its tokens, the same in a stream."""
    body = {"messages": [{"role": "user", "content": "fox"}], "logprobs": True, "top_logprobs": TOP, **options}
    whole, parts = ask(kind, "/v1/chat/completions", **body)
    listed = whole["logprobs"]["content"]
    assert [one for part in parts for one in part["logprobs"]["content"]] == listed
    return whole["message"]["content"], listed


def data_of(token: str) -> bytes:
    """Its bytes, read back from its text."""
    return ast.literal_eval(f"b'{token[6:]}'") if token.startswith("bytes:") else token.encode()


@pytest.mark.parametrize("kind", KINDS)
def test_joined_bytes_are_the_text(kind):
    text, listed = chat(kind, **FORCED)
    assert b"".join(bytes(one["bytes"]) for one in listed).decode() == text == SAID
    for one in listed:
        assert data_of(one["token"]) == bytes(one["bytes"])
        special = [top for top in one["top_logprobs"] if not top["bytes"]]
        assert all(data_of(top["token"]) == bytes(top["bytes"]) or top in special for top in one["top_logprobs"])
        assert {top["token"] for top in special} <= {"", "<pad>", "<image>", "<|im_end|>", "<s>", "</s>", "<unk>"}
    assert any(one["token"].startswith("bytes:") for one in listed)


def test_a_special_token_has_bytes_where_the_text_shows_it():
    for is_skipped in (True, False):
        text, listed = chat("byte level", logit_bias={"1": 100}, max_tokens=2, skip_special_tokens=is_skipped)
        assert [one["token"] for one in listed] == ["<|im_end|>"] * 2
        assert b"".join(bytes(one["bytes"]) for one in listed).decode() == text == "<|im_end|>" * 2 * (not is_skipped)
    text, (end,) = chat("byte level", logit_bias={"2": 100})  # the model's end of text
    assert (text, end["token"], end["bytes"]) == ("", "<image>", [])


@pytest.mark.parametrize("options", [{}, {"stop": ["日"]}], ids=["to its end", "to a stop string"])
@pytest.mark.parametrize("kind", KINDS)
def test_offsets_and_entries_of_completions(kind, options):
    whole, parts = ask(kind, "/v1/completions", prompt="fox", logprobs=TOP, **FORCED, **options)
    told = whole["logprobs"]
    assert {name: [one for part in parts for one in part["logprobs"][name]] for name in told} == told
    assert whole["text"] == (SAID[: SAID.index("日")] if options else SAID)
    said = list(map(data_of, told["tokens"]))
    before = [b"".join(said[:place]).decode(errors="ignore") for place in range(len(said))]
    assert told["text_offset"] == list(map(len, before))
    assert all(TOP <= len(top) <= TOP + 1 for top in told["top_logprobs"])
    assert all(text in top for text, top in zip(told["tokens"], told["top_logprobs"], strict=True))


def test_tokens_of_one_text_have_entries_of_their_own():
    """The position's own token has the text."""
    ids = llm("sentencepiece").tokenizer.convert_tokens_to_ids(["<0x61>", "a"])
    one = TokenLogprob(ids[0], -2.0, {ids[1]: -1.0, ids[0]: -2.0, 5: -3.0})
    (named,) = with_texts([one], llm("sentencepiece").loaded, SamplingParams())
    assert [named[token].decoded_token for token in named] == ["a", "a", "\x02"]
    assert by_text(named) == {"a": -2.0, f"token_id:{ids[1]}": -1.0, "\x02": -3.0}
