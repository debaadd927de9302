"""What several models of a server take, and who makes room."""

import asyncio
import gc
import time

import numpy as np

from paceline import LLM
from paceline.server.models import Model
from paceline.server.service import Settings
from tests.server.test_models import PATH, ask, serving, text_of, until


def test_the_budget_decides_how_many_are_loaded():
    async def main(**limits):
        async with serving("abc", most=3, **limits) as client:
            for name in "abc":
                text_of(await client.post(PATH, json=ask(name)))
            await until(lambda: client.models._work.done())
            return {name: model.num_bytes for name, model in client.made.items() if model.service is not None}

    sizes = asyncio.run(main())
    assert [*sizes] == ["a", "b", "c"]
    two = asyncio.run(main(budget=sum(sizes.values()) - 1))
    assert [*two] == ["b", "c"], "the least recently used goes"
    assert [*asyncio.run(main(budget=1))] == ["c"]


def loaded_last(monkeypatch):
    """Of two models that fit beside each other, of which the second takes much for a moment while it is loaded."""
    opened, much = LLM.__init__, 300 << 20

    def heavy(self, model, *args, **more):
        opened(self, model, *args, **more)
        if self.loaded.model.config.model_type == "qwen2":
            held = np.ones(much, np.uint8)
            time.sleep(0.2)
            del held

    async def main():
        async with serving("abc", most=2, budget=200 << 20) as client:
            for name in "abcab":
                text_of(await client.post(PATH, json=ask(name)))
            assert client.made["b"].num_loads == 2
            return [name for name, model in client.made.items() if model.service is not None]

    monkeypatch.setattr(LLM, "__init__", heavy)
    return asyncio.run(main())


def test_what_loading_takes_for_a_moment_counts(monkeypatch):
    assert Model(Settings(model="m"), lambda _: None, size=5).peak == 10
    assert loaded_last(monkeypatch) == ["b"]


def test_what_loading_takes_is_noticed_where_it_does_not_count(monkeypatch):
    """Mutant: only what stays counts."""
    monkeypatch.setattr(Model, "peak", property(lambda self: self.size, lambda self, value: None), raising=False)
    assert loaded_last(monkeypatch) == ["a", "b"]


def test_a_model_above_the_budget_that_was_given():
    async def main():
        async with serving(budget=1, is_strict=True) as client:
            return await client.post(PATH, json=ask("b"))

    message = asyncio.run(main()).json()["error"]["message"]
    assert "b does not fit. Got: " in message
    assert "--memory-budget" in message


def test_nothing_of_an_unloaded_model_is_left():
    async def main():
        async with serving() as client:
            for name in "abab":
                text_of(await client.post(PATH, json=ask(name)))
            return {name: [ref() is not None for ref in refs] for name, refs in client.llms.items()}

    gc.collect()
    assert asyncio.run(main()) == {"a": [False, False], "b": [False, True]}
