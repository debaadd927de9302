"""A dense model whose MLPs become identical experts (upcycling, arXiv 2212.05055) says what it said before."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from paceline import LLM, Fixed, SamplingParams, SelfExperts
from paceline.measure.prompts import EXAMPLES, user_prompt
from paceline.target.native import NativeDecoder
from tests.helpers import REPEATING, prompt
from tests.real_models import default_model
from tests.tiny import tiny_model

PARAMS = [SamplingParams(temperature=t, max_tokens=24, seed=5) for t in (0.0, 1.0)]
_OF_A_CLASS = ("model_type", "architectures", "transformers_version", "dtype")


def upcycled(dense: Any, kind: str, count: int = 4, **options: object) -> PreTrainedModel:
    """`count` copies of each MLP, which share memory, and random routers that choose two of them."""
    known = {key: value for key, value in dense.config.to_dict().items() if key not in _OF_A_CLASS}
    sizes = {"num_experts": count, "num_local_experts": count, "num_experts_per_tok": 2, "norm_topk_prob": True}
    sizes["moe_intermediate_size"] = known["intermediate_size"]
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**known, **sizes, **options}))
    state = {name: weight for name, weight in dense.state_dict().items() if ".mlp." not in name}
    torch.manual_seed(0)
    for index, layer in enumerate(dense.model.layers):
        block, mlp = f"model.layers.{index}.mlp", layer.mlp
        both = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        state[f"{block}.experts.gate_up_proj"] = both.expand(count, *both.shape)
        state[f"{block}.experts.down_proj"] = mlp.down_proj.weight.expand(count, *mlp.down_proj.weight.shape)
        state[f"{block}.gate.weight"] = torch.randn(count, dense.config.hidden_size)
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = dense.model.rotary_emb
    return model.eval().requires_grad_(False)


def answers(model: object, prompts: list, **options: Any) -> list:
    llm = LLM(model, max_num_seqs=2, **options)
    assert isinstance(llm.loaded.decoder, NativeDecoder)
    return [one for params in PARAMS for one in llm.generate(prompts, params)]


def tokens(model: object, prompts: list, **options: Any) -> list[list[int]]:
    return [one.token_ids for one in answers(model, prompts, **options)]


TEXTS = [REPEATING, prompt(20)]


@pytest.mark.parametrize(("dense", "kind"), [("llama", "mixtral"), ("qwen3", "qwen3_moe")])
def test_identical_experts_say_what_the_mlp_says(dense, kind):
    expected = tokens(tiny_model(dense), TEXTS)
    assert tokens(upcycled(tiny_model(dense), kind), TEXTS) == expected
    drafted = answers(upcycled(tiny_model(dense), kind), TEXTS, drafter=SelfExperts(), policy=Fixed(3))
    assert [one.token_ids for one in drafted] == expected
    assert all(r.num_accepted == r.num_drafted for one in drafted for r in one.rounds)  # one says it as well as two


def faulty_router(model: Any) -> PreTrainedModel:
    """One expert's weight stays when another is chosen: weights no longer add up to one."""
    model.config.norm_topk_prob = False
    for layer in model.model.layers:
        layer.mlp.gate.norm_topk_prob = False
    return model


def faulty_expert(model: Any) -> PreTrainedModel:
    """The last expert of the last layer is another."""
    down = model.model.layers[-1].mlp.experts.down_proj
    model.model.layers[-1].mlp.experts.down_proj = nn.Parameter(torch.stack([*down[:-1], -down[-1]]), False)
    return model


@pytest.mark.parametrize("fault", [faulty_router, faulty_expert])
def test_faults_are_seen(fault):
    dense = tiny_model("qwen3")
    assert tokens(fault(upcycled(dense, "qwen3_moe")), TEXTS) != tokens(dense, TEXTS)


@pytest.mark.slow
def test_the_default_model_with_its_real_weights():
    """In float32, where rounding ties are rare."""
    folder = default_model()
    plain = LLM(folder, dtype="float32", max_num_seqs=2)
    prompts = [plain.encode(user_prompt(plain.loaded, one.prompt)) for one in EXAMPLES[:4]]
    expected = [one.token_ids for params in PARAMS for one in plain.generate(prompts, params)]
    del plain
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert tokens(upcycled(dense, "mixtral", 3), prompts) == expected
