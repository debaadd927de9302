"""What clients ask about a model of several, which is not loaded for it."""

import asyncio

import pytest

from paceline.errors import ConfigError
from paceline.hf.model_files import ModelFiles
from paceline.server.service import About, Settings
from tests.server.helpers import TEMPLATE
from tests.server.test_models import llm_of, serving

SHOW, PROPS = ("POST", "/api/show"), ("GET", "/props")


@pytest.mark.parametrize("told_by", ["files", "loading", "broken files"])
def test_what_clients_ask_about_a_model_loads_it_only_where_its_files_do_not_tell(told_by):
    def tell():
        if told_by == "broken files":
            raise ConfigError("no such file", fix="find it")
        llm = llm_of("b")
        files = ModelFiles(llm.loaded.model.config, None, llm.loaded.dtype, llm.tokenizer)
        return About(files, Settings(model="b"), 77, 3)

    async def main():
        async with serving() as client:
            client.made["b"].tell = None if told_by == "loading" else tell
            asked = [
                await client.request(*SHOW, json={"model": "b:latest"}),
                await client.request(*PROPS, params={"model": "b"}),
            ]
            return asked, client.made["b"].num_loads, await client.request(*SHOW, json={"model": "x"})

    (shown, props), loads, unknown = asyncio.run(main())
    assert (loads, unknown.status_code) == (told_by == "loading", 404)
    if told_by == "broken files":
        assert [shown.status_code, props.status_code] == [500, 500]
        assert "no such file" in shown.json()["error"]
        return
    length, slots = (2048, 2) if loads else (77, 3)
    assert shown.json()["model_info"]["qwen2.context_length"] == length
    assert shown.json()["template"] == props.json()["chat_template"] == TEMPLATE
    assert (props.json()["model_alias"], props.json()["total_slots"]) == ("b", slots)
    assert props.json()["default_generation_settings"]["n_ctx"] == length
