"""Families with more than attention and an MLP, images, and mask tokens: passes of a GPU against transformers."""

import copy
import random

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.core.tree import TokenTree
from paceline.kernels.gpu import corrections, passes, products
from paceline.target import ModelRunner, wrap_model
from tests.helpers import changed, on_torch
from tests.kernels.gpu.faults import with_fault
from tests.kernels.gpu.test_passes import DENSE
from tests.kernels.test_passes import DTYPES, random_tree, rows
from tests.kernels.test_recurrent import HYBRIDS, keeps_bits
from tests.methods.space.common import adapter, hung_chain
from tests.tiny import NATIVE, tiny_model
from tests.vision.contract import CHATS
from tests.vision.families import make, plain_scored

_FIRST = ("falcon_h1", "lfm2", "gemma4")
MORE = [*_FIRST, *(pytest.param(name, marks=pytest.mark.more) for name in NATIVE if name not in (*DENSE, *_FIRST))]
FAULTS = {
    "a correction of the row before": (
        corrections,
        "torch.where(is_mask[:, None]",
        "torch.where(is_mask.roll(-1)[:, None]",
    ),
    "a correction of another row's gate": (products, "tl.load(is_mask + row", "tl.load(is_mask + (row + 1) % rows"),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MORE)
def test_logits_are_those_of_transformers(name, dtype):
    """After a prompt and along a chain, within the rounding of the weights' type."""
    model = tiny_model(name, dtype)
    ids = torch.randint(3, 97, (1, 12), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        want = copy.deepcopy(model).float()(ids).logits[0]
    runner = ModelRunner(wrap_model(model), 2, 64)
    assert runner.loaded.is_native
    slot = runner.cache.allocate()
    runner.extend_cache(slot, ids[0, :9].tolist())
    got = runner.forward([slot], TokenTree.chain([ids[0, 9:].tolist()]))[0]
    error = (got - want[9:]).abs().max() / want.std()
    assert error < {torch.float32: 1e-4, torch.float16: 0.04, torch.bfloat16: 0.15}[dtype]


@pytest.mark.parametrize("name", ["gemma4", pytest.param("gemma4-k-is-v", marks=pytest.mark.more)])
def test_a_row_of_a_tree_has_the_bits_that_it_has_alone(name):
    rng = random.Random(name)
    runner = ModelRunner(wrap_model(tiny_model(name, torch.bfloat16)), 2, 64)
    slots = [runner.cache.allocate() for _ in range(2)]
    for slot in slots:
        runner.extend_cache(slot, [5, 6, 7])
    tree = random_tree(4, rng)
    together = runner.forward([slots[1], slots[0]], TokenTree.of((random_tree(2, rng).rows[0], tree.rows[0])))[1]
    path = [0, *tree.rows[0].path_to(3)]
    assert torch.equal(together[path], rows(runner, slots[1], tree.token_ids[0, path].tolist()))


@pytest.mark.more
@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("stops_at_pages", [False, True])
def test_rounds_of_drafts_leave_the_states_of_plain_decoding(name, stops_at_pages):
    assert keeps_bits(ModelRunner(wrap_model(tiny_model(name, torch.bfloat16)), 3, 100), 3, 3, stops_at_pages)


def corrects(runner: ModelRunner, plain: ModelRunner, oracle: ModelRunner) -> bool:
    """Whether mask rows have the logits that transformers' layers give them, and plain rows the bits without an adapter."""
    on, tree = adapter("llama"), hung_chain([[5, 9]], [3])
    runner.attach_adapter(on)
    oracle.attach_adapter(on)
    without = changed(tree, token_ids=tree.token_ids.where(~tree.is_probe, 0).tolist())
    logits = []
    for one, read in ((runner, tree), (plain, without), (oracle, tree)):
        slot = one.cache.allocate()
        one.extend_cache(slot, [3, 4, 5])
        logits.append(one.forward([slot], read)[0])
    got, bits, want = logits
    return torch.equal(got[:2], bits[:2]) and torch.allclose(got, want, atol=1e-3)


def runners(dtype: torch.dtype = torch.float32) -> tuple[ModelRunner, ModelRunner, ModelRunner]:
    """Two on the kernels, and one on torch."""
    model = tiny_model("llama", dtype)
    loaded = wrap_model(model)
    return ModelRunner(loaded, 1, 64), ModelRunner(loaded, 1, 64), ModelRunner(on_torch(model), 1, 64)


def test_masks_take_their_corrections_and_no_other_row_does():
    assert corrects(*runners())


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_corrections_are_seen(fault, monkeypatch, tmp_path):
    three, (module, *change) = runners(), FAULTS[fault]
    faulty = with_fault(module, *change, tmp_path)
    if module is corrections:
        monkeypatch.setattr(passes, "corrections", faulty)
    else:
        monkeypatch.setattr(corrections, "products", faulty)
    assert not corrects(*three)


@pytest.mark.parametrize(
    "name", ["qwen3_vl", "gemma3", *(pytest.param(n, marks=pytest.mark.more) for n in ("gemma4", "qwen3_5"))]
)
def test_images(name):
    """Features of several layers, positions of three axes, blocks that are seen in both directions, states."""
    model, processor = make(name)
    loaded = wrap_model(copy.deepcopy(model), processor=processor)
    assert loaded.is_native
    ids, logps = plain_scored(name, CHATS["first"], 2)
    out = LLM(loaded, max_num_seqs=1, max_model_len=128).generate(
        CHATS["first"], SamplingParams(max_tokens=2, ignore_eos=True, logprobs=0)
    )
    one = out[0] if isinstance(out, list) else out
    assert one.token_ids == ids
    assert [each.logprob for each in one.logprobs or ()] == pytest.approx(logps, abs=1e-3)
