"""The same guarantees on a CUDA device: `pytest -m gpu`."""

import pytest
import torch

from paceline import LLM, DraftModel, Fixed, PromptLookup, SamplingParams, SelfQuantized
from paceline.core.tree import TokenTree
from paceline.methods import Eagle, Medusa
from paceline.quant.fp8 import Fp8Linear
from paceline.quant.int4 import quantize_int4, to_int4
from paceline.target import ModelRunner, load_model, wrap_model
from tests.adversaries import RandomTrees
from tests.methods.heads import medusa, modules, random_head
from tests.methods.modules import mistaken, written
from tests.quant.helpers import dequantize_int4
from tests.tiny import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PROMPTS = [[5, 9, 31, 5, 9, 31, 5, 9], list(range(3, 60)), [7]]
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}  # shapes that the INT4 kernel takes


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2"])
def test_tree_rows_equal_the_cpu(name):
    tree = TokenTree.from_lists([[8, 10, 20, 30, 11]], [[-1, 0, 0, 1, 2]])
    rows = []
    for device in ("cpu", "cuda"):
        runner = ModelRunner(wrap_model(tiny_model(name).to(device)))
        slot = runner.admit(PROMPTS[1])
        runner.extend_cache(slot, PROMPTS[1])
        rows.append(runner.forward([slot], tree.to(torch.device(device))).float().cpu())
    torch.testing.assert_close(rows[0], rows[1], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", [PromptLookup, SelfQuantized, RandomTrees, None])
def test_answers_are_identical(drafter, temperature):
    model = tiny_model("llama", torch.bfloat16, **WIDE).to("cuda")
    made = (
        DraftModel(wrap_model(tiny_model("llama", torch.bfloat16, seed=1).to("cuda"))) if drafter is None else drafter()
    )
    llm = LLM(model, drafter=made, policy=Fixed(4, 32))
    params = SamplingParams(temperature=temperature, max_tokens=24, seed=3)
    plain = [r.token_ids for r in llm.plain().generate(PROMPTS, params)]
    if llm.numerics != "invariant":
        pytest.skip("this device gives no invariant rows; `paceline check` tells ties from bugs")
    assert [r.token_ids for r in llm.generate(PROMPTS, params)] == plain


@pytest.mark.parametrize("rows", [1, 4, 17])
def test_int4_equals_its_dequantised_weights(rows):
    linear = torch.nn.Linear(256, 128, dtype=torch.bfloat16, device="cuda")
    packed = to_int4(linear, 32)
    weight = dequantize_int4(*quantize_int4(linear.weight, 32), 32)
    x = torch.randn(rows, 256, dtype=torch.bfloat16, device="cuda")
    expected = x.float() @ weight.t() + linear.bias.float()
    torch.testing.assert_close(packed(x).float(), expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("rows", [1, 4, 17])
def test_fp8_equals_its_dequantised_weights(rows):
    linear = torch.nn.Linear(256, 128, dtype=torch.bfloat16, device="cuda")
    packed = Fp8Linear(linear)
    x = torch.randn(rows, 256, dtype=torch.bfloat16, device="cuda")
    expected = x.float() @ packed.weight.float().T + linear.bias.float()
    torch.testing.assert_close(packed(x).float(), expected, atol=0.05, rtol=0.05)


def chain(length: int, seed: int) -> TokenTree:
    tokens = torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(seed)).tolist()
    return TokenTree.chain(tokens, "cuda")


def test_a_pass_does_not_wait_for_the_device():
    runner = ModelRunner(wrap_model(tiny_model("llama").to("cuda")), 4)
    slots = [runner.admit(ids) for ids in PROMPTS[:2]]
    for slot, ids in zip(slots, PROMPTS, strict=False):
        runner.extend_cache(slot, ids)
    trees = [chain(n, 1) for n in (1, 4)]
    both = TokenTree.chain([[5, 6], [7, 8]], "cuda")
    try:
        for mode in ("default", "error"):  # the first turn captures
            torch.cuda.set_sync_debug_mode(mode)
            for tree in trees:
                runner.forward(slots[:1], tree)
            runner.forward(slots, both)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_fp8_target_with_an_int4_draft_of_its_own(temperature):
    drafter = SelfQuantized(lm_head="shared")
    llm = LLM(tiny_model("llama", torch.bfloat16, **WIDE).to("cuda"), weights="fp8", drafter=drafter, policy=Fixed(4))
    assert drafter.report is not None
    assert drafter.report.num_quantized == 14  # seven of each layer
    params = SamplingParams(temperature=temperature, max_tokens=24, seed=3, ignore_eos=True)
    drafted = llm.generate(PROMPTS[:1], params)[0]
    assert sum(r.num_accepted for r in drafted.rounds) > 0
    if llm.numerics == "invariant":
        assert drafted.token_ids == llm.plain().generate(PROMPTS[:1], params)[0].token_ids


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (Eagle, lambda t: random_head(t, 3)),
        (Eagle, lambda t: random_head(t, "mtp")),
        (Eagle, lambda t: modules(t, 2)),
        (Medusa, medusa),
    ],
)
def test_heads_draft_as_on_the_cpu(kind, make):
    drafts = []
    for device in ("cpu", "cuda"):
        target = wrap_model(tiny_model("llama", torch.float64).to(device))
        llm = LLM(target, drafter=kind(make(target).to(device)), policy=Fixed(3, 9))
        answers = llm.generate(PROMPTS[:2], SamplingParams(max_tokens=12, ignore_eos=True))
        drafts.append([(one.token_ids, [r.num_accepted for r in one.outputs[0].rounds]) for one in answers])
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_modules_of_checkpoints_draft(name, tmp_path):
    oracle, on = written(tmp_path, name), load_model(str(tmp_path), device="cuda")
    assert not mistaken(on, oracle, Eagle(None, top_k=2, ngrams=False))
