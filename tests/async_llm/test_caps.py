"""A request may say how much is drafted for it; what its neighbours have stays as it is."""

import asyncio

import pytest

from paceline import CostModel, Fixed, SamplingParams
from paceline.errors import ConfigError
from tests.async_llm.common import TEXTS, answer, facts, serve, tiny_llm
from tests.exactness.drafters import DRAFTERS


def capped(most: object, **options) -> SamplingParams:
    return SamplingParams(
        temperature=0.7, seed=4, max_tokens=24, ignore_eos=True, extra_args={"num_speculative_tokens": most}, **options
    )


@pytest.mark.diagonal
@pytest.mark.parametrize("policy", [lambda: Fixed(5), CostModel], ids=["fixed", "cost model"])
@pytest.mark.parametrize("name", ["lookup recent", "draft model, same weights", "lookahead", "space", "recycling"])
def test_caps_hold_side_by_side(name, policy):
    llm = tiny_llm(slots=3)
    llm = tiny_llm(DRAFTERS[name](llm.loaded, {}), slots=3, policy=policy())
    caps = (0, 2, 64)
    want = facts(llm.plain().generate(TEXTS[0], capped(0))[0])

    got = serve(llm, lambda engine: asyncio.gather(*(answer(engine, TEXTS[0], capped(cap)) for cap in caps)))
    assert [facts(one) for one in got] == [want] * 3
    for cap, one in zip(caps, got, strict=True):
        assert max(record.num_drafted for record in one.rounds) <= cap
    assert {record.num_nodes for record in got[0].rounds} == {0}


def test_without_a_cap_more_is_drafted():
    llm = tiny_llm(DRAFTERS["draft model, same weights"](tiny_llm().loaded, {}), policy=Fixed(5))
    depth = {most: max(r.num_drafted for r in llm.generate(TEXTS[0], capped(most))[0].rounds) for most in (1, 3, 64)}
    assert depth == {1: 1, 3: 3, 64: 5}


@pytest.mark.parametrize("most", [-1, 1.5, "2", None, True])
def test_a_cap_is_a_number_of_tokens(most):
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        capped(most)
