"""Every family of vision-language models answers as plain transformers does, with and without speculation.

Ids, positions, sight in both directions and features of several layers are each family's own: what is compared is the
answer, token by token, greedy in float32, and every token's log-probability, to `model.generate` of the untouched
model. What the comparison must notice is in `test_families_mutants.py`.
"""

import pytest

from paceline import SamplingParams
from paceline.errors import NumericsError
from tests.vision.contract import CHATS, GREEDY, drafters, drafting, engine, forget, holds, same, wanted
from tests.vision.families import NAMES, seeing

SAMPLED = SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.0, seed=7)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_all_sizes_is_answered_as_by_transformers(name):
    llm = engine(name)
    forget(llm)
    assert holds(llm, name)
    assert holds(llm, name), "from the caches"


@pytest.mark.parametrize("name", NAMES)
def test_speculation_changes_nothing(name):
    llm = engine(name)
    expected = [wanted(name, chat) for chat in CHATS]
    for kind, drafter in drafters(llm, name).items():
        results = drafting(llm, drafter).generate(list(CHATS.values()), GREEDY)
        assert same(results, expected), kind
        if kind == "scripted":
            assert min(one.outputs[0].num_accepted for one in results) >= 2  # 5, less the first and a placeholder


@pytest.mark.more
@pytest.mark.parametrize("name", NAMES)
def test_sampling_with_a_seed_is_that_of_plain_decoding(name):
    llm = engine(name)
    chats = [CHATS["two"], CHATS["none"], CHATS["turns"]]
    plain = [one.token_ids for one in llm.generate(chats, SAMPLED)]
    assert len({*map(tuple, plain)}) == 3
    assert plain != [wanted(name, chat)[0][:6] for chat in ("two", "none", "turns")]
    for kind in ("self int4", "wild"):
        forget(llm)
        drafted = drafting(llm, drafters(llm, name)[kind]).generate(chats, SAMPLED)
        assert [one.token_ids for one in drafted] == plain, kind


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_chat_alone_by_every_drafter(name):
    llm = engine(name)
    for chat in CHATS:
        for kind, drafter in {"none": None, **drafters(llm, name)}.items():
            for depth in (1, 4, 8):
                forget(llm)
                assert holds(llm if drafter is None else drafting(llm, drafter, depth), name, [chat]), (chat, kind)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_numerics_that_do_not_depend_on_the_rows(name):
    if seeing(name).mixes_rows:
        with pytest.raises(NumericsError, match="experts"):
            engine(name, "invariant")
        return
    llm = engine(name, "invariant")
    assert llm.numerics == "invariant"
    forget(llm)
    assert holds(llm, name)
    for drafter in drafters(llm, name).values():
        assert holds(drafting(llm, drafter), name)
