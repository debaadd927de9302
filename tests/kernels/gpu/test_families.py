"""Families with more than attention and an MLP, images, and mask tokens: passes of a GPU against transformers."""

import copy
from functools import cache
from unittest.mock import patch

import pytest
import torch

from paceline import LLM, SamplingParams, kernels
from paceline.attention import recurrent as states
from paceline.attention.masks import PromptRows
from paceline.core.tree import TokenTree
from paceline.hf.describe import FORMS
from paceline.hf.described import has_kernels
from paceline.kernels import kernels_for as of_cpu
from paceline.kernels.gpu import corrections, passes, products
from paceline.target import LoadedModel, ModelRunner, wrap_model
from paceline.target.corrections import LowRank
from tests.helpers import changed
from tests.kernels.gpu.faults import with_fault
from tests.kernels.gpu.test_passes import DENSE
from tests.kernels.test_corrections import Owner, factors
from tests.kernels.test_passes import DTYPES, rows
from tests.kernels.test_recurrent import HYBRIDS, keeps_bits
from tests.methods.space.common import adapter, hung_chain
from tests.tiny import ARCHITECTURES, LATENT, NATIVE, RECURRENT, tiny_model
from tests.vision.contract import CHATS
from tests.vision.families import make, plain_scored

_FIRST = ("falcon_h1", "lfm2", "gemma4")
_ELSEWHERE = {"num_experts", "kv_lora_rank"}


def _runs_here(name: str) -> bool:
    """On a GPU torch runs experts, latent attention and rotations of neighbours."""
    kind, more = (ARCHITECTURES | RECURRENT | LATENT)[name]
    return not FORMS[kind].pairs and not _ELSEWHERE & more.keys()


_NAMES = (*_FIRST, *(name for name in NATIVE if name not in (*DENSE, *_FIRST) and _runs_here(name)))
MORE = [  # the first by default, half of the others with `more`; each in one of two types, in both with `slow`
    pytest.param(
        name,
        dtype,
        marks=() if i < 3 and not (i + j) % 2 else pytest.mark.slow if (i + j) % 2 or i % 4 > 1 else pytest.mark.more,
    )
    for i, name in enumerate(_NAMES)
    for j, dtype in enumerate(DTYPES[:2])
]
_DELTA = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
_FEWER = {  # layers; the last one of Gemma 4 shares keys
    "qwen3_5": _DELTA,
    "olmo_hybrid": _DELTA,
    "falcon_h1": {"num_hidden_layers": 1},
    "mamba2": {"num_hidden_layers": 1},
    "nemotron_h": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "mlp", "attention"]},
    "gemma3": {
        "num_hidden_layers": 3, "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "gemma4": {
        "num_hidden_layers": 3, "num_kv_shared_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "gemma4-k-is-v": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip
FAULTS = {
    "a correction of the row before": (
        corrections,
        "torch.where(self.takes[:, None] ==",
        "torch.where(self.takes.roll(-1)[:, None] ==",
    ),
    "a correction of another row's gate": (products, "tl.load(is_mask + row", "tl.load(is_mask + (row + 1) % rows"),
}


@pytest.mark.parametrize(("name", "dtype"), MORE, ids=str)
def test_logits_are_those_of_transformers(name, dtype):
    """On a path of a tree, within the rounding of the weights' type; its rows have the bits that they have alone."""
    model = tiny_model(name, dtype, **_FEWER.get(name, {}))
    ids = torch.randint(3, 97, (1, 10), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        want = copy.deepcopy(model).float()(ids).logits[0]
    runner = ModelRunner(wrap_model(model), 1, 64)
    assert runner.loaded.is_native
    slot, (first, second) = runner.cache.allocate(), ids[0, 8:].tolist()
    runner.extend_cache(slot, ids[0, :8].tolist())
    got = runner.forward([slot], TokenTree.from_lists([[first, 7, second]], [[-1, 0, 0]]))[0, [0, 2]]
    error = (got - want[8:]).abs().max() / want.std()
    assert (
        error < {torch.float32: 1e-4, torch.float16: 0.04, torch.bfloat16: 0.35}[dtype]
    )  # cut off, where a card rounds
    assert torch.equal(got, rows(runner, slot, [first, second]))


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_rounds_of_drafts_leave_the_states_of_plain_decoding(name, monkeypatch):
    """Every other family's states also stop at pages."""
    monkeypatch.setattr(states, "PAGE", 4)
    runner = ModelRunner(wrap_model(tiny_model(name, torch.bfloat16, **_FEWER.get(name, {}))), 3, 100)
    assert keeps_bits(runner, 2, 3, stops_at_pages=HYBRIDS.index(name) % 2 == 1, lengths=(5, 2), most=4)


@pytest.mark.parametrize("name", ["glm", "mixtral", "gpt_oss", "deepseek_v3", "minicpm3"])
def test_what_these_kernels_lack_runs_in_torch(name):
    """Nor are weights packed for them as they are read."""
    model = tiny_model(name)
    assert not has_kernels(model.config, model.dtype)
    assert not wrap_model(model).is_native


@cache
def target() -> LoadedModel:
    return wrap_model(tiny_model("llama", num_hidden_layers=1))


def logits_of(runner: ModelRunner, tree: TokenTree) -> torch.Tensor:
    slot = runner.cache.allocate()
    runner.extend_cache(slot, [3, 4, 5])
    return runner.forward([slot], tree)[0]


@cache
def expected() -> torch.Tensor:
    """The logits of `TREE` by the kernels of the CPU."""
    with patch.object(kernels, "kernels_for", of_cpu):
        runner = ModelRunner(wrap_model(tiny_model("llama", num_hidden_layers=1)), 1, 64)
        runner.attach_adapter(adapter("llama", num_hidden_layers=1))
        return logits_of(runner, TREE)


IMAGES = ["qwen3_vl", "gemma3", "gemma4", "qwen3_5"]
TREE = hung_chain([[5, 9]], [3])


def corrects() -> bool:
    """Whether mask rows have the logits that a CPU gives them, and plain rows the bits that they have without masks."""
    runner = ModelRunner(target(), 1, 64)
    plain = logits_of(runner, changed(TREE, token_ids=TREE.token_ids.where(~TREE.is_probe, 0).tolist()))
    runner = ModelRunner(target(), 1, 64)
    runner.attach_adapter(adapter("llama", num_hidden_layers=1))
    got = logits_of(runner, TREE)
    return torch.equal(got[:2], plain[:2]) and torch.allclose(got, expected(), atol=1e-3)


def test_masks_take_their_corrections_and_no_other_row_does():
    assert corrects()


def of_requests() -> torch.Tensor:
    """The logits of a tree in three slots: with two adapters, and without one."""
    model = tiny_model("llama", num_hidden_layers=1)
    runner = ModelRunner(wrap_model(copy.deepcopy(model)), 3, 64)
    owners = Owner(LowRank(factors(model, 5, 0, "qkvogud"))), Owner(LowRank(factors(model, 9, 1, "qd"))), None
    for slot, owner in enumerate(owners):
        runner.cache.allocate()
        runner.cache.adapters[slot] = owner
        runner.extend_cache(slot, [3, 4, 5])
    return runner.forward([0, 1, 2], TokenTree.from_lists([[5, 9, 7]] * 3, [[-1, 0, 0]] * 3))


def test_rows_take_the_corrections_of_their_requests():
    got = of_requests()
    with patch.object(kernels, "kernels_for", of_cpu):
        want = of_requests()
    assert torch.allclose(got, want, atol=1e-3)
    assert not torch.isclose(want[0], want[1], atol=0.1).all()
    assert torch.equal(got[2, :2], logits_of(ModelRunner(target(), 1, 64), TokenTree.chain([[5, 9]])))


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_corrections_are_seen(fault, monkeypatch, tmp_path):
    module, old, new = FAULTS[fault]
    faulty = with_fault(module, old, new, tmp_path)
    if module is corrections:
        monkeypatch.setattr(passes, "corrections", faulty)
    else:
        monkeypatch.setattr(corrections, "products", faulty)
    assert not corrects()


def prompt_with_images(name: str, rows: PromptRows) -> list[torch.Tensor]:
    """What a prompt of these rows leaves in the last layer's cache, and the logits after it."""
    runner = ModelRunner(wrap_model(tiny_model(name, **_FEWER.get(name, {}))), 1, 64)
    slot, count = runner.cache.allocate(), rows.embeds.shape[1]
    runner.prefill_chunk(slot, [5] * count, rows)
    return [runner.cache.keys[-1][slot, :, :count], runner.forward([slot], TokenTree.chain([[6]]))[0]]


@pytest.mark.parametrize("what", ["features and positions", "blocks beyond the window", "blocks within windows"])
def test_prompts_with_images_are_read_as_on_a_cpu(what):
    torch.manual_seed(2)
    embeds, is_image = torch.randn(1, 9, 32), torch.tensor([[False, True, True, True] + [False] * 5])
    if what == "features and positions":
        places = torch.tensor([[0, 1, 1, 4, 4, 5, 6, 7, 8]])
        rows = PromptRows(embeds, places, is_image, (torch.randn(3, 32), torch.randn(3, 32)))
    else:
        beyond = what == "blocks beyond the window"
        rows = PromptRows(embeds, blocks=((1, 4), (5, 8)), blocks_cross_window=beyond, windowed_blocks=not beyond)
    name = "qwen3" if rows.deepstack else "gemma3"
    got = prompt_with_images(name, rows)
    with patch.object(kernels, "kernels_for", of_cpu):
        want = prompt_with_images(name, rows)
    for one, other in zip(got, want, strict=True):
        assert torch.allclose(one, other, atol=1e-3)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if "gemma" in name else pytest.mark.more) for name in IMAGES],
)
def test_images(name):
    """Features of several layers, positions of three axes, blocks that are seen in both directions, states."""
    model, processor = make(name)
    loaded = wrap_model(copy.deepcopy(model), processor=processor)
    assert loaded.is_native
    ids, logps = plain_scored(name, CHATS["first"], 2)
    params = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=0)
    (one,) = LLM(loaded, max_num_seqs=1, max_model_len=128).generate([CHATS["first"]], params)
    assert one.token_ids == ids
    assert [each.logprob for each in one.logprobs or ()] == pytest.approx(logps, abs=1e-3)
