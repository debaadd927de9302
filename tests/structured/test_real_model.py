"""The default model with its real weights: whatever it says is JSON of the schema, the same with and without drafts."""

import json

import pytest

from paceline import LLM, Fixed, SamplingParams
from tests.real_models import default_model

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"type": "array", "items": {"enum": ["music", "chess", "rain"]}, "maxItems": 2},
        "is_tall": {"type": "boolean"},
    },
    "required": ["name", "age", "likes", "is_tall"],
}
ASKED = ["Invent a person. Answer in JSON.", "Write a haiku about rain."]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(default_model(), drafter="jump-forward+lookup", policy=Fixed(5), max_num_seqs=4)


@pytest.mark.more
def test_every_answer_is_json_of_its_schema(llm):
    form = {"json": SCHEMA, "disable_any_whitespace": True, "disable_additional_properties": True}
    prompts = [[{"role": "user", "content": text}] for text in ASKED]
    params = [SamplingParams(temperature=t, n=1 + (t > 0), seed=5, structured_outputs=form) for t in (0, 1.0)]
    results = llm.generate(prompts, params)
    for result in results:
        for one in result.outputs:
            made = json.loads(one.text)
            assert one.finish_reason == "stop"
            assert list(made) == SCHEMA["required"]
            assert isinstance(made["name"], str)
            assert len(made["name"]) <= 12
            assert type(made["age"]) is int
            assert 0 <= made["age"] <= 150
            assert set(made["likes"]) <= {"music", "chess", "rain"}
            assert len(made["likes"]) <= 2
            assert type(made["is_tall"]) is bool
    assert max(one.mean_acceptance_length for result in results for one in result.outputs) > 1.5
    if llm.numerics == "invariant":
        plain = llm.plain().generate(prompts, params)
        assert [[o.token_ids for o in r.outputs] for r in results] == [[o.token_ids for o in r.outputs] for r in plain]
