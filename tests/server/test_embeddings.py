"""Embeddings, scores and reranking over HTTP: the numbers of the library in the formats of others."""

import asyncio
import base64

import numpy as np
import pytest

from paceline import PoolingParams
from paceline.server import embeddings
from tests.server.helpers import ASK, listening, server, tiny_llm

EMBEDDINGS, QUERY = "/v1/embeddings", "ab ab"
DOCUMENTS = ["ab", "the cat", "ab ab ab", "x"]


def post(path: str, body: dict, **options):
    """The status and the answer."""

    async def ask():
        async with server(**options) as client:
            answer = await client.post(path, json={"model": "tiny", **body})
            return answer.status_code, answer.json()

    return asyncio.run(ask())


def embed(**body) -> dict:
    status, answer = post(EMBEDDINGS, body)
    assert status == 200, answer
    return answer


def vectors(answer: dict) -> list[list[float]]:
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    return [one["embedding"] for one in answer["data"]]


def alone(texts, **params) -> list[list[float]]:
    return [one.outputs.embedding for one in tiny_llm().embed(texts, PoolingParams(**params))]


def test_numbers_are_those_of_the_library():
    llm = tiny_llm()
    answer = embed(input=DOCUMENTS, user="me")
    assert vectors(answer) == alone(DOCUMENTS)
    ids = [llm.encode(text) for text in DOCUMENTS]
    count = sum(map(len, ids))
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert (answer["object"], answer["data"][0]["object"], answer["model"]) == ("list", "embedding", "tiny")
    assert vectors(embed(input=ids)) == vectors(answer)
    assert vectors(embed(input=DOCUMENTS[1])) == vectors(embed(input=ids[1])) == vectors(answer)[1:2]
    assert vectors(embed(input="ab", dimensions=8)) == alone("ab", dimensions=8)
    assert vectors(embed(input="ab", pooling="mean", normalize=False)) == alone("ab", pooling="mean", normalize=False)
    packed = vectors(embed(input=DOCUMENTS, encoding_format="base64"))
    assert [np.frombuffer(base64.b64decode(one), "<f4").tolist() for one in packed] == vectors(answer)


def test_beside_chats():
    """Answers and embeddings are those that each has alone."""

    async def main():
        async with server() as client:
            chat = [client.post("/v1/chat/completions", json=ASK) for _ in range(3)]
            many = [client.post(EMBEDDINGS, json={"model": "tiny", "input": DOCUMENTS}) for _ in range(3)]
            return [one.json() for one in await asyncio.gather(*chat, *many)]

    *chats, first, second, third = asyncio.run(main())
    status, whole = post("/v1/chat/completions", ASK)
    assert status == 200
    assert {one["choices"][0]["message"]["content"] for one in chats} == {whole["choices"][0]["message"]["content"]}
    assert vectors(first) == vectors(second) == vectors(third) == alone(DOCUMENTS)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_best_first(path):
    scores = [one.outputs.score for one in tiny_llm().score(QUERY, DOCUMENTS)]
    best = sorted(range(4), key=lambda index: -scores[index])
    asked = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, *DOCUMENTS[2:]]
    status, answer = post(path, {"query": QUERY, "documents": asked, "top_n": 3})
    assert status == 200
    assert answer["results"] == [
        {"index": index, "relevance_score": scores[index], "document": {"text": DOCUMENTS[index]}} for index in best[:3]
    ]
    assert answer["id"].startswith("rerank-")
    assert answer["usage"]["total_tokens"] == sum(len(o.prompt_token_ids) for o in tiny_llm().score(QUERY, DOCUMENTS))
    status, answer = post(path, {"query": QUERY, "documents": asked, "return_documents": False})
    assert [set(one) for one in answer["results"]] == [{"index", "relevance_score"}] * 4


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores(path):
    want = [one.outputs.score for one in tiny_llm().score(QUERY, DOCUMENTS)]
    status, answer = post(path, {"text_1": QUERY, "text_2": DOCUMENTS})
    assert status == 200
    assert [one["score"] for one in answer["data"]] == want
    assert [one["index"] for one in answer["data"]] == [0, 1, 2, 3]
    status, answer = post(path, {"text_1": [QUERY] * 4, "text_2": DOCUMENTS})
    assert [one["score"] for one in answer["data"]] == want


WRONG = {
    "no input": (EMBEDDINGS, {}, "missing_required_parameter", "input"),
    "an empty text": (EMBEDDINGS, {"input": ""}, "invalid_value", "input"),
    "an empty list": (EMBEDDINGS, {"input": []}, "invalid_value", "input"),
    "an empty text in a list": (EMBEDDINGS, {"input": ["a", ""]}, "invalid_value", "input"),
    "an empty list of ids": (EMBEDDINGS, {"input": [[]]}, "invalid_value", "input"),
    "a number": (EMBEDDINGS, {"input": 3}, "invalid_type", "input"),
    "no token": (EMBEDDINGS, {"input": [97]}, "invalid_value", None),
    "many inputs": (EMBEDDINGS, {"input": ["a"] * 2049}, "invalid_value", "input"),
    "a long input": (EMBEDDINGS, {"input": "a" * 3000}, "context_length_exceeded", None),
    "a far too long input": (EMBEDDINGS, {"input": ["a", "a" * 200_000]}, "context_length_exceeded", None),
    "many dimensions": (EMBEDDINGS, {"input": "a", "dimensions": 4096}, "invalid_value", None),
    "no dimensions": (EMBEDDINGS, {"input": "a", "dimensions": 0}, "invalid_value", "dimensions"),
    "another encoding": (EMBEDDINGS, {"input": "a", "encoding_format": "hex"}, "invalid_value", "encoding_format"),
    "another pooling": (EMBEDDINGS, {"input": "a", "pooling": "cls"}, "invalid_value", "pooling"),
    "an image": (EMBEDDINGS, {"input": [{"type": "image_url"}]}, "invalid_type", "input[0]"),
    "an unknown field": (EMBEDDINGS, {"input": "a", "wat": 1}, "unknown_parameter", "wat"),
    "no documents": ("/rerank", {"query": "a", "documents": []}, "invalid_value", "documents"),
    "an empty query": ("/rerank", {"query": " ", "documents": ["a"]}, "invalid_value", None),
    "no top": ("/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "invalid_value", "top_n"),
    "an instruction": ("/rerank", {"query": "a", "documents": ["a"], "instruction": "x"}, "invalid_value", None),
    "other numbers": ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "invalid_value", None),
    "a judge without words": ("/score", {"text_1": "a", "text_2": "b", "method": "yes_no"}, "invalid_value", None),
}


@pytest.mark.parametrize("name", WRONG)
def test_refusals(name):
    path, body, code, param = WRONG[name]
    status, answer = post(path, body)
    assert status == 400
    assert (answer["error"]["code"], answer["error"]["param"]) == (code, param), answer


def test_the_tokens_of_a_request_are_limited(monkeypatch):
    monkeypatch.setattr(embeddings, "MAX_TOKENS", 40)
    assert post(EMBEDDINGS, {"input": ["ab"] * 3})[0] == 200
    for path, body in (
        (EMBEDDINGS, {"input": ["ab ab ab ab ab"] * 9}),
        ("/rerank", {"query": "a", "documents": ["the cat sat"] * 9}),
    ):
        status, answer = post(path, body)
        assert status == 400
        assert answer["error"]["code"] == "max_tokens_per_request"


def test_another_model_is_not_found():
    assert post(EMBEDDINGS, {"model": "other", "input": "a"})[0] == 404


def test_a_client_that_leaves_frees_its_slots():
    with listening() as (url, engine, _):
        import httpx

        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url + EMBEDDINGS, json={"input": ["ab" * 500] * 500}, timeout=0.3)
        asyncio.run(_idle(engine))
        assert engine.stats().free_slots == 2
        assert httpx.post(url + EMBEDDINGS, json={"input": "ab"}, timeout=30).status_code == 200


async def _idle(engine) -> None:
    for _ in range(3000):
        if engine.num_running == engine.num_waiting == 0:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("requests are left over")
