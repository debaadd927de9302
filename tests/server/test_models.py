"""Several models in one server: loaded when asked for, unloaded to make room, and never while a request has one."""

import asyncio
import threading
import time
import weakref
from contextlib import asynccontextmanager

import httpx
import pytest

from paceline import LLM, PromptLookup, SamplingParams
from paceline.async_llm import AsyncLLM
from paceline.engine.loop import SpeculativeDecoder
from paceline.errors import ConfigError
from paceline.server.app import make_app
from paceline.server.models import Model, Models
from paceline.server.service import Settings
from paceline.system.turns import Turns
from paceline.target import runner
from tests.helpers import loaded
from tests.server.helpers import TEMPLATE, tiny_llm
from tests.server.test_metrics import read
from tests.structured.common import byte_tokenizer

PATH = "/v1/completions"
KINDS = {"a": "llama", "b": "qwen2", "c": "llama"}


def ask(model, **more):
    return {"model": model, "prompt": "ab ab", "seed": 3, "temperature": 1.0, "max_tokens": 12, **more}


def long(model):
    return ask(model, max_tokens=600, ignore_eos=True, temperature=0)


def llm_of(name):
    if KINDS[name] == "llama":
        return LLM(tiny_llm().loaded, drafter=PromptLookup(), max_num_seqs=2)
    made = loaded("qwen2", max_position_embeddings=2048)
    return LLM(made.model, tokenizer=byte_tokenizer(TEMPLATE), drafter=PromptLookup(), max_num_seqs=2)


@asynccontextmanager
async def serving(names="ab", wait=None, fails=(), settings=None, **limits):
    """A client of a server with these models, which may be loaded no sooner than `wait` is set."""
    engines = dict[str, list[weakref.ref[LLM]]]()

    def opener(name):
        def opened(adapters):
            if wait is not None and name != "a":
                assert wait.wait(30)
            if name in fails:
                raise ConfigError("no such weights", fix="find them")
            llm = llm_of(name)
            engines.setdefault(name, []).append(weakref.ref(llm))
            return AsyncLLM(llm)

        return opened

    made = [Model(Settings(model=name, **(settings or {})), opener(name), size=1) for name in names]
    models = Models(made, **{"most": 1, **limits})
    transport = httpx.ASGITransport(make_app(models), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://tiny", timeout=60) as client:
        client.models, client.made, client.llms = models, dict(zip(names, made, strict=True)), engines
        try:
            yield client
        finally:
            models.shutdown()


async def until(condition):
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


def text_of(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def want(name, body):
    params = {key: body[key] for key in ("seed", "temperature", "max_tokens")} | {"ignore_eos": "ignore_eos" in body}
    return llm_of(name).plain().generate(body["prompt"], SamplingParams(**params))[0].text


@pytest.mark.parametrize("most", [1, 2])
def test_each_model_gives_its_own_answers(most):
    async def main():
        async with serving(most=most) as client:
            bodies = [ask(name, seed=seed) for seed in range(3) for name in "ab"]
            answers = await asyncio.gather(*(client.post(PATH, json=body) for body in bodies))
            one_by_one = [await client.post(PATH, json=body) for body in bodies]
            loads = [model.num_loads for model in client.made.values()]
            return bodies, [*map(text_of, answers)], [*map(text_of, one_by_one)], loads

    bodies, together, one_by_one, loads = asyncio.run(main())
    assert together == one_by_one == [want(body["model"], body) for body in bodies]
    assert loads == ([1, 1] if most == 2 else [4, 4]), "those that wait for one model get it at once"


def stays_to_the_end():
    """Another model is asked for while one is in use; answers in the order in which they ended."""
    ended = []

    async def main():
        async with serving() as client:

            async def post(body):
                answer = await client.post(PATH, json=body)
                ended.append(body["model"] + str(body["max_tokens"]))
                return text_of(answer)

            running = asyncio.create_task(post(long("a")))
            await until(lambda: client.made["a"].num_held)
            other = asyncio.create_task(post(ask("b")))
            await until(lambda: client.made["a"].is_leaving or other.done())
            behind = asyncio.create_task(post(ask("a")))
            return await asyncio.gather(running, other, behind)

    texts = asyncio.run(main())
    return ended, texts


def test_a_model_stays_while_a_request_has_it_and_each_gets_its_turn():
    ended, texts = stays_to_the_end()
    assert ended == ["a600", "b12", "a12"]
    assert texts == [want("a", long("a")), want("b", ask("b")), want("a", ask("a"))]


def test_a_model_that_is_unloaded_while_held_is_noticed(monkeypatch):
    """Mutant: a request in progress does not count."""
    monkeypatch.setattr(Models, "_idle", lambda self: self._loaded())
    with pytest.raises(AssertionError):
        test_a_model_stays_while_a_request_has_it_and_each_gets_its_turn()


def test_requests_that_overtake_those_that_wait_are_noticed(monkeypatch):
    """Mutant: a model in use takes further requests while another waits for its room."""
    monkeypatch.setattr(Model, "is_leaving", property(lambda self: False, lambda self, value: None), raising=False)

    async def main():
        async with serving() as client:
            running = asyncio.create_task(client.post(PATH, json=long("a")))
            await until(lambda: client.made["a"].num_held)
            other = asyncio.create_task(client.post(PATH, json=ask("b")))
            await until(lambda: client.made["b"].turns)
            behind = asyncio.create_task(client.post(PATH, json=ask("a")))
            await asyncio.wait([other, behind], return_when=asyncio.FIRST_COMPLETED)
            overtakes = behind.done() and not other.done()
            await asyncio.gather(running, other, behind)
            return overtakes

    assert asyncio.run(main())


def test_waiting_has_limits():
    async def main():
        async with serving(max_waiting=1) as client:
            text_of(await client.post(PATH, json=ask("a")))
            client.made["a"].num_held += 1
            object.__setattr__(client.models.settings, "request_timeout_s", 0.5)
            waits = asyncio.create_task(client.post(PATH, json=ask("b")))
            await until(lambda: client.made["b"].turns)
            object.__setattr__(client.models.settings, "request_timeout_s", 600.0)
            refused, late = await client.post(PATH, json=ask("b")), await waits
            await until(lambda: not client.made["a"].is_leaving)
            text_of(await client.post(PATH, json=ask("a")))
            return refused, late, client.made["b"].num_loads

    refused, late, loads = asyncio.run(main())
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
    assert loads == 0, "nobody waits for it any more"


def test_a_model_that_is_being_loaded_when_its_client_goes():
    wait = threading.Event()

    async def main():
        async with serving(most=2, wait=wait) as client:
            text_of(await client.post(PATH, json=ask("a")))
            gone = asyncio.create_task(client.post(PATH, json=ask("b")))
            await until(lambda: client.models.is_loading)
            gone.cancel()
            meanwhile = text_of(await client.post(PATH, json=ask("a")))
            wait.set()
            await until(lambda: client.made["b"].service is not None)
            assert client.made["b"].num_held == 0
            return meanwhile, text_of(await client.post(PATH, json=ask("b"))), client.made["b"].num_loads

    meanwhile, text, loads = asyncio.run(main())
    assert (meanwhile, text, loads) == (want("a", ask("a")), want("b", ask("b")), 1)


def test_a_model_that_cannot_be_loaded_is_the_error_of_its_requests():
    fails = ["b"]

    async def main():
        async with serving(fails=fails) as client:
            text_of(await client.post(PATH, json=ask("a")))
            failed = await asyncio.gather(*(client.post(PATH, json=ask("b")) for _ in range(2)))
            healthy = (await client.get("/health")).status_code
            text_of(await client.post(PATH, json=ask("a")))
            fails.clear()
            return failed, healthy, text_of(await client.post(PATH, json=ask("b")))

    failed, healthy, text = asyncio.run(main())
    for answer in failed:
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "model_not_loaded"
        assert "'b' could not be loaded: no such weights. Fix: find them." in answer.json()["error"]["message"]
    assert (healthy, text) == (200, want("b", ask("b")))


def test_what_is_told_of_models():
    async def main():
        async with serving() as client:
            first = (await client.get("/v1/models")).json()["data"]
            text_of(await client.post(PATH, json=ask("b")))
            second = [(await client.get(f"/v1/models/{name}")).json() for name in "ab"]
            unknown = await client.post(PATH, json=ask("x"))
            text_of(await client.post(PATH, json=ask("a")))
            return first, second, unknown, (await client.get("/metrics")).text

    first, second, unknown, metrics = asyncio.run(main())
    assert [(one["id"], one["loaded"]) for one in first] == [("a", False), ("b", False)]
    assert [(one["loaded"], one["max_model_len"]) for one in second] == [(False, None), (True, 2048)]
    assert "This server has 'a', 'b'." in unknown.json()["error"]["message"]
    assert metrics.count("# TYPE paceline:request_success_total counter") == 1
    for name, is_loaded in (("a", 1), ("b", 0)):
        own = read("\n".join(line for line in metrics.splitlines() if line[0] == "#" or f'model_name="{name}"' in line))
        assert own["paceline:model_loaded",] == is_loaded
        assert own["paceline:model_loads_total",] == own["paceline:e2e_request_latency_seconds_count",] == 1


def test_shutting_down_while_a_model_is_loaded():
    wait = threading.Event()

    async def main():
        async with serving(wait=wait) as client:
            waits = asyncio.create_task(client.post(PATH, json=ask("b")))
            await until(lambda: client.models.is_loading)
            begin = time.monotonic()
            await client.models.drain(0.2)
            answer, ready = await waits, await client.get("/ready")
            seconds = time.monotonic() - begin
            wait.set()
            return answer, ready.status_code, seconds

    answer, ready, seconds = asyncio.run(main())
    assert (answer.status_code, answer.json()["error"]["code"], ready) == (503, "server_shutting_down", 503)
    assert seconds < 25


@pytest.mark.parametrize("most", [1, 2])
def test_a_model_whose_engine_broke_is_loaded_again(most):
    def plant(scheduler):
        step = scheduler.step

        def planted():
            if scheduler.is_idle:  # what an ended request left in the inbox may wake the thread for nothing
                return step()
            raise RuntimeError("planted")

        scheduler.step = planted

    async def main():
        async with serving(most=most) as client:
            for name in "ba":
                text_of(await client.post(PATH, json=ask(name)))
            plant(client.made["a"].service.engine._thread.scheduler)
            told = [await client.post(PATH, json=ask("a")), await client.get("/health")]
            texts = [text_of(await client.post(PATH, json=ask(name))) for name in "ab"]
            told.append(await client.get("/health"))
            return [one.status_code for one in told], texts, [client.made[name].num_loads for name in "ab"]

    told, texts, loads = asyncio.run(main())
    assert told == [503, 503, 200]
    assert texts == [want(name, ask(name)) for name in "ab"]
    assert loads == [2, 3 - most]


def passes_are_timed_alone(monkeypatch):
    """A model is measured while it is loaded and another one decodes."""
    is_decoding, overlaps, timed = threading.Event(), list[bool](), runner.median_seconds
    step = SpeculativeDecoder.step

    def slow_step(self, seqs):
        is_decoding.set()
        time.sleep(0.01)
        step(self, seqs)
        is_decoding.clear()

    def slow_median(run):
        if threading.current_thread().name.startswith("paceline-loader"):
            begins = is_decoding.is_set()
            time.sleep(0.03)
            overlaps.append(begins or is_decoding.is_set())
        return timed(run)

    async def main():
        async with serving(most=2) as client:
            text_of(await client.post(PATH, json=ask("a")))
            monkeypatch.setattr(SpeculativeDecoder, "step", slow_step)
            monkeypatch.setattr(runner, "median_seconds", slow_median)
            running = asyncio.create_task(client.post(PATH, json={**long("a"), "max_tokens": 1900}))
            await until(is_decoding.is_set)
            text_of(await client.post(PATH, json=ask("b")))
            running.cancel()

    asyncio.run(main())
    assert overlaps
    assert not any(overlaps)


def test_a_model_that_is_loaded_is_measured_while_no_other_one_decodes(monkeypatch):
    passes_are_timed_alone(monkeypatch)


def test_a_model_that_is_measured_beside_another_one_is_noticed(monkeypatch):
    """Mutant: the passes that are timed take turns of their own."""
    monkeypatch.setattr(runner, "SHARED", Turns())
    with pytest.raises(AssertionError):
        passes_are_timed_alone(monkeypatch)


def test_names_are_unique():
    one, other = Settings(model="a"), Settings(model="b")
    for second in (Model(one, lambda _: None), Model(other, lambda _: None, adapters={"a": "x"})):
        with pytest.raises(ConfigError, match="same name"):
            Models([Model(one, lambda _: None), second])
