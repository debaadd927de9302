"""What torch computes on a CUDA device is what it computes on a CPU: models and heads without kernels."""

import pytest
import torch

from paceline import LLM, Fixed, SamplingParams
from paceline.core.tree import TokenTree
from paceline.methods import Eagle, Medusa
from paceline.target import ModelRunner, load_model, wrap_model
from tests.gpu.conftest import HAS_CUDA
from tests.methods.heads import medusa, modules, random_head
from tests.methods.modules import mistaken, written
from tests.tiny import tiny_model

pytestmark = HAS_CUDA
PROMPTS = [[5, 9, 31, 5, 9, 31, 5, 9], list(range(3, 60))]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_tree_rows_equal_the_cpu(name):
    tree = TokenTree.from_lists([[8, 10, 20, 30, 11]], [[-1, 0, 0, 1, 2]])
    rows = []
    for device in ("cpu", "cuda"):
        runner = ModelRunner(wrap_model(tiny_model(name).to(device)))
        slot = runner.admit(PROMPTS[1])
        runner.extend_cache(slot, PROMPTS[1])
        rows.append(runner.forward([slot], tree.to(torch.device(device))).float().cpu())
    torch.testing.assert_close(rows[0], rows[1], atol=1e-3, rtol=1e-3)


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
        answers = llm.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True))
        drafts.append([(one.token_ids, [r.num_accepted for r in one.outputs[0].rounds]) for one in answers])
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_modules_of_checkpoints_draft(name, tmp_path):
    oracle, on = written(tmp_path, name), load_model(str(tmp_path), device="cuda")
    assert not mistaken(on, oracle, Eagle(None, top_k=2, ngrams=False))
