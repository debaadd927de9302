"""Rows with adapters: the logits of merged weights, and bits that depend on the row alone."""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.core.tree import TokenTree
from paceline.target import LoadedModel, ModelRunner, make_runner
from paceline.target.lora import read_for
from tests import lora
from tests.helpers import loaded, on_torch, prompt
from tests.tiny import tiny_model

TEXT = prompt(21)
DENSE = ["llama", "qwen2", "phi3", "gemma3", "olmo2", "glm", "starcoder2", "granite", "smollm3"]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
NAMES = {  # where not all linear layers can be changed
    "qwen3_moe": ATTENTION, "gpt_oss": ATTENTION, "qwen2_moe": (*ATTENTION, "up_proj", "gate_proj", "down_proj"),
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
    "gemma4": (*ATTENTION, "gate_proj", "up_proj", "down_proj", "per_layer_input_gate", "per_layer_projection"),
    "qwen3_next": (*ATTENTION, "out_proj"),
    "hunyuan_v1_moe": ATTENTION,
}  # fmt: skip
HYBRIDS = ["qwen3_5", "granitemoehybrid", "falcon_h1", "bamba", "lfm2", "mamba2", "nemotron_h", "olmo_hybrid"]
IN_TORCH = ["torch llama", "gpt_neox", "cohere", "hunyuan_v1_moe", "stablelm"]


@cache
def target(name: str) -> LoadedModel:
    return on_torch(tiny_model(name.split()[1])) if " " in name else loaded(name)


@cache
def folder(name: str, number: int) -> Path:
    """Two adapters of different ranks and layers."""
    import tempfile

    kind = name.split()[-1]
    own = Path(tempfile.mkdtemp(prefix="adapter-"))
    return lora.save(own, tiny_model(kind), (4, 9)[number], NAMES.get(kind, ()), seed=number, lora_alpha=6)


@cache
def adapter(name: str, number: int):
    return read_for(target(name), str(number), folder(name, number))


def logits(name: str, number: int | None, tree: TokenTree, text: list[int] = TEXT, batch: bool = False) -> Tensor:
    """Of the first row of a tree after a text, alone or beside the other adapter and a plain row."""
    runner = make_runner(target(name), 4, invariant=None)
    for each in (0, 1):
        runner.correct_by(adapter(name, each).low_rank.factors)
    numbers = [number, 1 - (number or 0), None, number] if batch else [number]
    slots = [runner.admit(text) for _ in numbers]
    for slot, own in zip(slots, numbers, strict=True):
        runner.cache.adapters[slot] = None if own is None else adapter(name, own)
        runner.prefill(slot, [*text, 0])
    rows = TokenTree.from_lists([tree.rows[0].token_ids] * len(slots), [tree.rows[0].parents] * len(slots))
    return runner.forward(slots, rows)[0]


def wanted(name: str, number: int | None) -> Tensor:
    model = lora.merged(tiny_model(name.split()[-1]), None if number is None else folder(name, number))
    with torch.inference_mode():
        return model(torch.tensor([[*TEXT, 5, 9]])).logits[0, -2:]


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.std())


CHAIN, TREE = TokenTree.chain([[5, 9]]), TokenTree.from_lists([[5, 7, 9, 8]], [[-1, 0, 0, 2]])
_MORE = [
    pytest.param(name, marks=pytest.mark.more) for name in (*DENSE[4:], *[*NAMES][2:], *HYBRIDS[3:], *IN_TORCH[2:])
]


@pytest.mark.parametrize("name", [*DENSE[:4], *[*NAMES][:2], *HYBRIDS[:3], *IN_TORCH[:2], *_MORE])
def test_logits_are_those_of_merged_weights(name):
    for number in (0, 1, None):
        want = wanted(name, number)
        assert error(logits(name, number, CHAIN), want) < 1e-4
        assert error(logits(name, number, TREE, batch=True)[[0, 2]], want) < 1e-4
    assert error(wanted(name, 0), wanted(name, None)) > 0.1, "the adapter changes nothing"


@pytest.mark.parametrize("name", ["llama", "phi3", "qwen2_moe", "falcon_h1", "torch llama"])
def test_bits_of_a_row_depend_on_the_row_alone(name):
    assert beside_others(name)


def beside_others(name: str) -> bool:
    """Whether rows in trees and batches have the bits of one token after another without neighbours."""
    alone = {number: logits(name, number, CHAIN) for number in (0, 1, None)}
    plain = ModelRunner(target(name), 4)
    plain.prefill(plain.admit(TEXT), [*TEXT, 0])
    assert " " in name or torch.equal(alone[None], plain.forward([0], CHAIN)[0]), "without any adapter"
    return all(torch.equal(logits(name, n, TREE, batch=True)[[0, 2]], row) for n, row in alone.items())


def test_memory_is_counted_as_passes_hold_it():
    """The factors, and their copies, whose outputs are filled up to blocks of 32."""
    own = adapter("llama", 0)
    pairs = [factor for pair in own.low_rank.factors.values() for factor in pair]
    assert own.num_bytes == sum(one.nbytes + 4 * (len(one) + -len(one) % 32) * one.shape[1] for one in pairs)


# By peft itself

OPTIONS = {
    "all": {"target_modules": "all-linear"},
    "rsLoRA": {"target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    "patterns": {
        "target_modules": ["q_proj", "up_proj", "down_proj"], "lora_alpha": 5,
        "rank_pattern": {"up_proj": 7, "^model.layers.0.self_attn.q_proj": 2},
        "alpha_pattern": {r"layers\.1\..*q_proj": 3},
    },
    "some layers": {"target_modules": ["o_proj"], "layers_to_transform": [1]},
    "a pattern": {"target_modules": r".*\.(gate|k)_proj", "exclude_modules": r".*layers\.0\.mlp.*"},
}  # fmt: skip


@pytest.mark.parametrize("case", OPTIONS)
def test_folders_and_logits_of_peft(case, tmp_path):
    """In float32, after a text; the adapter is saved by peft, which computes B (A x) apart from W x as passes do."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(1)
    model = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(r=4, **OPTIONS[case])).eval()
    with torch.no_grad():
        for name, factor in model.named_parameters():
            if ".lora_" in name:
                factor.normal_(0, factor.shape[1] ** -0.5)
        model.save_pretrained(tmp_path)
        want = model(torch.tensor([[*TEXT, 5, 9]])).logits[0, -2:]
    runner, adapter = ModelRunner(target("llama"), 1), read_for(target("llama"), "one", tmp_path)
    slot = runner.admit(TEXT)
    runner.cache.adapters[slot] = adapter
    runner.prefill(slot, [*TEXT, 0])
    assert error(runner.forward([slot], CHAIN)[0], want) < 1e-5
    assert error(wanted("llama", None), want) > 0.1
