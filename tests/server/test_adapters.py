"""LoRA adapters as models of a server: each request gets the answer of the one that it names, and they come and go."""

import asyncio
import threading
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import httpx
import pytest

from paceline import LLM, LoRARequest, PromptLookup, SamplingParams
from paceline.async_llm import AsyncLLM
from paceline.errors import ConfigError
from paceline.server.app import make_app
from paceline.server.models import Model, Models
from paceline.server.service import Service, Settings
from tests import lora
from tests.server.helpers import events, joined, tiny_llm
from tests.server.test_models import PATH, ask, text_of
from tests.tiny import tiny_model

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@cache
def folder():
    """With the folders of three adapters."""
    top, model = Path(mkdtemp(prefix="adapters-")), tiny_model("llama", max_position_embeddings=2048)
    for seed, name in enumerate(("x", "y", "z")):
        lora.save(top / name, model, rank=4 + seed, seed=seed, strength=1.0)
    (top / "empty").mkdir()
    (top / "out").symlink_to("/")
    return top


def open_llm(adapters, max_loras=16):
    return LLM(tiny_llm().loaded, drafter=PromptLookup(), max_num_seqs=3, adapters=adapters, max_loras=max_loras)


@asynccontextmanager
async def serving(names="xy", models=("m",), opened=True, **more):
    """A client of a server with these adapters of the first model."""
    settings = {"adapter_dir": folder() if opened else None}
    own = {name: str(folder() / name) for name in names}
    made = [
        Model(Settings(model=name, **settings), lambda given: AsyncLLM(open_llm(given, **more)),
              adapters=own if name == models[0] else {})
        for name in models
    ]  # fmt: skip
    held = Models(made, most=1)
    transport = httpx.ASGITransport(make_app(held), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://tiny", timeout=60) as client:
        client.models = held
        try:
            yield client
        finally:
            held.shutdown()


def want(adapter, body):
    params = {key: body[key] for key in ("seed", "temperature", "max_tokens")}
    extra = {"extra_args": {"adapter": adapter}} if adapter != "m" else {}
    plain = open_llm({name: str(folder() / name) for name in "xyz"}).plain()
    return plain.generate(body["prompt"], SamplingParams(**params, **extra))[0].text


def each_adapter_answers():
    bodies = [ask(name, seed=seed) for seed in range(2) for name in ("m", "x", "y")]

    async def main():
        async with serving() as client:
            answers = await asyncio.gather(*(client.post(PATH, json=body) for body in bodies))
            stream = await client.post(PATH, json={**bodies[1], "stream": True})
            return [*map(text_of, answers)], [one.json()["model"] for one in answers], joined(events(stream.text))

    texts, names, streamed = asyncio.run(main())
    expected = [want(body["model"], body) for body in bodies]
    assert len(set(expected)) == len(bodies)
    assert texts == expected
    assert streamed == texts[1]
    assert names == [body["model"] for body in bodies]


def test_each_adapter_gives_its_own_answers():
    each_adapter_answers()


@pytest.mark.parametrize("wrong", ["", "x"])
def test_the_wrong_adapter_is_noticed(wrong, monkeypatch):
    """Mutants: none acts, or the first one acts for all."""
    real = Service.adapted
    monkeypatch.setattr(Service, "adapted", lambda self, name: real(self, wrong) if wrong else self)
    with pytest.raises(AssertionError):
        each_adapter_answers()


def test_chats_and_responses_name_an_adapter():
    async def main():
        async with serving() as client:
            chat = {"messages": [{"role": "user", "content": "ab"}], "temperature": 0, "max_tokens": 12}
            texts = list[str]()
            for name in "mxy":
                answer = await client.post("/v1/chat/completions", json={"model": name, **chat})
                texts.append(answer.json()["choices"][0]["message"]["content"])
                body = {"model": name, "input": "ab", "temperature": 0, "max_output_tokens": 12}
                answer = (await client.post("/v1/responses", json=body)).json()
                assert answer["output"][0]["content"][0]["text"] == texts[-1]
                assert answer["model"] == name
            return texts

    assert len(set(asyncio.run(main()))) == 3


def test_embeddings_and_scores_name_an_adapter():
    async def main():
        async with serving(names="x") as client:
            asks = [
                client.post(path, json={"model": name, **body})
                for name in "mx"
                for path, body in (
                    ("/v1/embeddings", {"input": ["ab", "ab ab ab"]}),
                    ("/score", {"text_1": "ab", "text_2": "ab ab"}),
                )
            ]
            return [answer.json() for answer in await asyncio.gather(*asks)]

    llm = open_llm({"x": str(folder() / "x")})
    answers = asyncio.run(main())
    for name, vectors, scores in zip("mx", answers[::2], answers[1::2], strict=True):
        how = {"lora_request": None if name == "m" else LoRARequest(name, 1)}
        want = [one.outputs.embedding for one in llm.embed(["ab", "ab ab ab"], **how)]
        assert [one["embedding"] for one in vectors["data"]] == want
        assert scores["data"][0]["score"] == llm.score("ab", "ab ab", **how)[0].outputs.score
        assert vectors["model"] == scores["model"] == name


def test_they_are_listed_as_in_vllm():
    async def main():
        async with serving(names="xy") as client:
            return (await client.get("/v1/models")).json()["data"], (await client.get("/v1/models/y")).json()

    listed, one = asyncio.run(main())
    assert [(entry["id"], entry["parent"]) for entry in listed] == [("m", None), ("x", "m"), ("y", "m")]
    assert one == listed[2]
    assert one["root"] == str(folder() / "y")


def test_they_come_and_go():
    async def main():
        async with serving(names="x", models=("m", "other")) as client:
            z = {"lora_name": "z", "lora_path": "z", "base_model_name": "m"}
            told = [await client.post(LOAD, json=z), await client.post(LOAD, json=z)]
            text = text_of(await client.post(PATH, json=ask("z")))
            text_of(await client.post(PATH, json=ask("other")))
            again = text_of(await client.post(PATH, json=ask("z")))
            running = asyncio.create_task(client.post(PATH, json=ask("x", max_tokens=60)))
            while not (running.done() or client.models.models[0].service.engine.num_running):  # it has its adapter
                await asyncio.sleep(0.001)
            told += [await client.post(UNLOAD, json={"lora_name": name}) for name in ("z", "z", "m", "x")]
            gone = [await client.post(PATH, json=ask(name)) for name in "zx"]
            return told, (text, again), await running, gone, client.models.names

    told, texts, running, gone, names = asyncio.run(main())
    assert [answer.status_code for answer in told] == [200, 400, 200, 404, 404, 200]
    assert told[0].text == "Success: LoRA adapter 'z' added successfully."
    assert told[2].text == "Success: LoRA adapter 'z' removed successfully."
    assert texts == (want("z", ask("z")),) * 2, "it is there again when its model is"
    assert text_of(running) == want("x", ask("x", max_tokens=60)), "a request in progress ends with its adapter"
    assert [answer.status_code for answer in gone] == [404, 404]
    assert names == ["m", "other"]


def answers_after_a_change(monkeypatch, change):
    """What an adapter's request gets that is read no sooner than the adapter was changed."""
    real, begun, may_read = LLM.open_request, threading.Event(), threading.Event()

    def paused(self, *args, **options):
        begun.set()
        assert may_read.wait(30)
        return real(self, *args, **options)

    async def main():
        async with serving(names="x") as client:
            text_of(await client.post(PATH, json=ask("m")))
            monkeypatch.setattr(LLM, "open_request", paused)
            asked = asyncio.create_task(client.post(PATH, json=ask("x")))
            await asyncio.to_thread(begun.wait, 30)
            told = (await change(client)).status_code
            may_read.set()
            return told, text_of(await asked), client.models.names

    return asyncio.run(main())


CHANGES = {
    "removed": (lambda client: client.post(UNLOAD, json={"lora_name": "x"}), ["m"]),
    "replaced": (
        lambda client: client.post(LOAD, json={"lora_name": "x", "lora_path": "y", "load_inplace": True}),
        ["m", "x"],
    ),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_request_has_its_adapter_from_its_arrival_on(how, monkeypatch):
    change, names = CHANGES[how]
    assert answers_after_a_change(monkeypatch, change) == (200, want("x", ask("x")), names)


@pytest.mark.parametrize("how", CHANGES)
def test_an_adapter_that_is_looked_up_by_name_when_a_request_is_read_is_noticed(how, monkeypatch):
    """Mutant: the name alone is kept until then."""
    real = Service.adapted

    def by_name(self, name):
        other = real(self, name)
        other.defaults = {**self.defaults, "extra_args": {"adapter": name}}
        return other

    monkeypatch.setattr(Service, "adapted", by_name)
    with pytest.raises(AssertionError):
        test_a_request_has_its_adapter_from_its_arrival_on(how, monkeypatch)


def test_an_adapter_that_is_removed_while_its_request_waits_for_its_model():
    async def main():
        async with serving(names="x", models=("m", "other")) as client:
            text_of(await client.post(PATH, json=ask("other")))
            model, other = client.models.models
            other.num_held += 1
            asked = asyncio.create_task(client.post(PATH, json=ask("x")))
            while not model.turns:
                await asyncio.sleep(0.001)
            told = (await client.post(UNLOAD, json={"lora_name": "x"})).status_code
            client.models._release(other)
            return told, await asked

    told, answer = asyncio.run(main())
    assert (told, answer.status_code, answer.json()["error"]["code"]) == (200, 404, "model_not_found")


def test_an_adapter_of_another_model_is_refused():
    one, other = open_llm({"x": str(folder() / "x")}), open_llm({})
    held = one.runner.adapters.get("x")
    one.remove_adapter("x")
    params = SamplingParams(max_tokens=4, extra_args={"adapter": held})
    one.generate("ab", params)
    with pytest.raises(ConfigError, match="of another model"):
        other.generate("ab", params)


def test_an_adapter_in_the_place_of_another():
    async def main():
        async with serving(names="x") as client:
            body = {"lora_name": "x", "lora_path": str(folder() / "y"), "load_inplace": True}
            answer = await client.post(LOAD, json=body)
            return answer.status_code, text_of(await client.post(PATH, json=ask("x")))

    assert asyncio.run(main()) == (200, want("y", ask("y")))


def test_a_load_goes_on_when_its_client_goes_and_others_wait_for_it(monkeypatch):
    real, begun, may_end = LLM.add_adapter, threading.Event(), threading.Event()

    def slow(self, name, path):
        begun.set()
        assert may_end.wait(30)
        real(self, name, path)

    async def main():
        async with serving(names="x") as client:
            text_of(await client.post(PATH, json=ask("m")))
            monkeypatch.setattr(LLM, "add_adapter", slow)
            gone = asyncio.create_task(client.post(LOAD, json={"lora_name": "z", "lora_path": "z"}))
            await asyncio.to_thread(begun.wait, 30)
            gone.cancel()
            begun.clear()
            again = asyncio.create_task(
                client.post(LOAD, json={"lora_name": "x", "lora_path": "y", "load_inplace": True})
            )
            await asyncio.to_thread(begun.wait, 30)
            unload = asyncio.create_task(client.post(UNLOAD, json={"lora_name": "x"}))
            await asyncio.sleep(0.05)
            may_end.set()
            told = [(await one).status_code for one in (again, unload)]
            while "z" not in client.models.names:
                await asyncio.sleep(0.01)
            return told, client.models.names, client.models.services[0].llm.adapters

    assert asyncio.run(main()) == ([200, 200], ["m", "z"], ("z",))


BAD = {
    "no name": ({"lora_path": "x"}, 400, "lora_name"),
    "no folder": ({"lora_name": "n"}, 400, "lora_path"),
    "not there": ({"lora_name": "n", "lora_path": "nowhere"}, 404, "lora_path"),
    "above": ({"lora_name": "n", "lora_path": "../.."}, 404, "lora_path"),
    "absolute": ({"lora_name": "n", "lora_path": "/etc"}, 404, "lora_path"),
    "by a link": ({"lora_name": "n", "lora_path": "out/etc"}, 404, "lora_path"),
    "a null byte": ({"lora_name": "n", "lora_path": "a\0b"}, 404, "lora_path"),
    "too long": ({"lora_name": "n", "lora_path": "a/" * 2000}, 404, "lora_path"),
    "no adapter in it": ({"lora_name": "n", "lora_path": "empty"}, 400, None),
    "a model's name": ({"lora_name": "m", "lora_path": "z"}, 400, "lora_name"),
    "another base": ({"lora_name": "n", "lora_path": "z", "base_model_name": "no"}, 404, "model"),
    "an adapter as base": ({"lora_name": "n", "lora_path": "z", "base_model_name": "x"}, 400, "base_model_name"),
}


def test_bad_adapters_are_refused():
    async def main():
        async with serving(names="x") as client:
            return [await client.post(LOAD, json=body) for body, _, _ in BAD.values()], client.models.names

    answers, names = asyncio.run(main())
    for answer, (body, status, param) in zip(answers, BAD.values(), strict=True):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param), (body, error)
    assert names == ["m", "x"]


def test_their_number_is_limited():
    async def main():
        async with serving(names="xy", max_loras=2) as client:
            return await client.post(LOAD, json={"lora_name": "z", "lora_path": "z"}), client.models.names

    answer, names = asyncio.run(main())
    assert answer.status_code == 400
    assert "too many adapters" in answer.json()["error"]["message"]
    assert names == ["m", "x", "y"]


def test_clients_change_nothing_unless_a_folder_is_opened_to_them():
    async def main():
        async with serving(names="x", opened=False) as client:
            bodies = {LOAD: {"lora_name": "z", "lora_path": "z"}, UNLOAD: {"lora_name": "x"}}
            return [await client.post(path, json=body) for path, body in bodies.items()]

    for answer in asyncio.run(main()):
        assert answer.status_code == 403
        assert "--adapter-dir DIR" in answer.json()["error"]["message"]
