"""Self-drafts of mixtures: what they draft is what transformers says with fewer experts, over the target's columns."""

import pytest

from paceline import LLM, Fixed, SamplingParams, SelfExperts, SelfQuantized
from paceline.config import parse
from paceline.core.interfaces import Drafter
from paceline.errors import ConfigError
from paceline.methods import self_experts
from paceline.target import ModelRunner
from tests.cli.helpers import answer, save
from tests.helpers import REPEATING, assert_identical, loaded, prompt, reading_apart, run, runner, sequence
from tests.methods.common import said_over
from tests.tiny import tiny_model

MIXTURES = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "gemma4-experts", "qwen3_5_moe"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=5)
MANY = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 3, "top_k_experts": 3}


def drafts(name: str, drafter: Drafter, texts: list[list[int]], depth: int = 3) -> list[list[int]]:
    """What is drafted after each text, and its root."""
    on = reading_apart(ModelRunner(loaded(name, **MANY), len(texts)))
    seqs = run(on, drafter, [sequence(on.loaded, ids, GREEDY) for ids in texts], depth)
    return [[*seq.rounds[0].token_ids] for seq in seqs]


def said(name: str, experts: int, ids: list[int]) -> list[int]:
    """What transformers says after a text whose columns are those of all experts."""
    fewer = tiny_model(name, **{**MANY, "num_experts_per_tok": experts, "top_k_experts": experts})
    return said_over(tiny_model(name, **MANY), fewer, ids)


TEXTS = [REPEATING, *(prompt(length, length) for length in (4, 9, 20, 33))]


@pytest.mark.parametrize("experts", [1, 2])
@pytest.mark.parametrize("name", MIXTURES)
def test_drafts_are_what_fewer_experts_say(name, experts):
    assert drafts(name, SelfExperts(experts), TEXTS) == [said(name, experts, ids) for ids in TEXTS]


def test_a_draft_with_all_experts_is_told(monkeypatch):
    monkeypatch.setattr(self_experts, "choose_fewer", lambda model, experts: None)
    with pytest.raises(AssertionError):
        test_drafts_are_what_fewer_experts_say("qwen3_moe", 1)


@pytest.mark.parametrize("make", [SelfExperts, lambda: SelfQuantized(lm_head="shared", experts=1)])
@pytest.mark.parametrize("name", MIXTURES)
def test_answers_are_those_of_the_target(name, make):
    asked = [([*REPEATING, 3 + t], SamplingParams(t, max_tokens=16)) for t in (0, 1)]
    seqs = assert_identical(runner(loaded(name)), make(), asked)
    assert any(record.num_accepted for seq in seqs for record in seq.rounds)


def test_the_draft_takes_no_memory():
    drafter = SelfExperts()
    llm = LLM(tiny_model("qwen3_moe"), drafter=drafter)
    models = drafter._runner.loaded.model, llm.loaded.model
    draft, target = ({id(tensor) for tensor in (*model.parameters(), *model.buffers())} for model in models)
    assert draft == target


def test_int4_experts_of_which_fewer_are_chosen():
    drafter = SelfQuantized(lm_head="shared", experts=2)
    llm = LLM(tiny_model("qwen3_moe", moe_intermediate_size=32, **MANY), drafter=drafter, policy=Fixed(3))
    draft = drafter._runner.loaded.model
    assert drafter.report.num_quantized == 2 * (4 + 4 * 3)  # of attention and of each expert, in two layers
    chosen = [llm.loaded.model.config.num_experts_per_tok, draft.config.num_experts_per_tok]
    routers = [llm.loaded.model.model.layers[0].mlp.gate.top_k, draft.model.layers[0].mlp.gate.top_k]
    assert chosen == routers == [3, 2]


@pytest.mark.parametrize("make", [SelfExperts, lambda count=1: SelfQuantized(experts=count)])
def test_what_cannot_draft_with_fewer_experts_is_refused(make):
    for dense in ("llama", "granitemoehybrid"):  # whose config names a number all the same
        with pytest.raises(ConfigError, match=r"only a mixture.*self-int4"):
            LLM(loaded(dense), drafter=make())
    with pytest.raises(ConfigError, match=r"fewer experts than its target.*Got: 2.*Expected: fewer than 2"):
        LLM(loaded("qwen3_moe"), drafter=make(2))
    with pytest.raises(ConfigError, match="experts"):
        make(0)


def test_names():
    assert [parse(word).name for word in ("self-top1", "self-top1:experts=2")] == ["self-top1", "self-top2"]
    assert parse({"method": "self_top1", "experts": 3}).drafter.build().experts == 3
    both = parse({"method": "self_int4", "experts": 1, "bits": 3})
    assert (both.name, both.drafter.build().experts) == ("self-int3-top1", 1)
    with pytest.raises(ConfigError, match="experts"):
        parse({"method": "self_top1", "experts": 0})


@pytest.mark.more
def test_tune_tries_it_with_a_mixture(tmp_path):
    folder = save(tmp_path / "mixture", tiny_model("qwen3_moe"))
    tried = "tune", folder, "--num-prompts", "1", "--max-tokens", "8", "--out", str(tmp_path / "tuned.json")
    names = [one["drafter"] for one in answer(*tried)["candidates"]]
    assert names[-2:] == ["self-top1", "suffix+recycling+self-int4+self-top1"]
