"""Mask tokens in the target's pass, held against plain transformers; all other rows keep their bits."""

import copy
import dataclasses
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from paceline.attention.masks import PassLayout
from paceline.core.tree import TokenTree
from paceline.errors import IncompatibleModels
from paceline.hf.load import KV_CACHE
from paceline.methods.space.adapter import SpaceAdapter
from paceline.target import LoadedModel, ModelRunner, corrections, wrap_model
from paceline.target.native import NativeDecoder
from tests.attention.common import NoWindow, TreePlusOne, with_layout
from tests.helpers import VOCAB, changed, on_torch, prompt
from tests.methods.space.common import adapter, decoder_layers, hung, hung_chain
from tests.tiny import tiny_model

K = 3
PREFIX = prompt(11)
CANDIDATES, PARENTS = [5, 9, 31, 7, 9], [-1, 0, 1, 0, 3]  # two branches of two
FAMILIES = [
    *("llama", "qwen2", "qwen2-sliding", "mistral", "qwen3", "gpt_neox", "gemma", "gemma2", "granite", "phi", "phi3"),
    "minicpm3",
    *("torch llama", "torch qwen2-sliding", "torch qwen3", "torch gemma2"),
]
NAMES = {
    "phi": ("self_attn.q_proj", "self_attn.dense", "mlp.fc1", "mlp.fc2"),
    "phi3": ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"),
    "minicpm3": (
        *(f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    ),
    "falcon": ("self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
}


@cache
def model(name: str):
    """With biases that matter where there are any."""
    made = tiny_model(name)
    for key, parameter in made.named_parameters():
        if key.endswith(".bias"):
            nn.init.normal_(parameter, std=0.25)
    return made


@cache
def target(name: str = "llama") -> LoadedModel:
    return on_torch(model(name.split()[1])) if name.startswith("torch ") else wrap_model(model(name))


def attached(name: str = "llama", given: SpaceAdapter | None = None, **options) -> ModelRunner:
    runner, name = ModelRunner(target(name), 3, **options), name.split()[-1]
    runner.attach_adapter(given or adapter(name, K, linears=NAMES.get(name)))
    return runner


def read(runner: ModelRunner, *texts: list[int]) -> list[int]:
    slots = [runner.admit(text) for text in texts]
    for slot, text in zip(slots, texts, strict=True):
        runner.extend_cache(slot, text)
    return slots


def merged(plain: nn.Module, on: SpaceAdapter) -> nn.Module:
    """W + b a everywhere: for rows of masks alone."""
    made = copy.deepcopy(plain)
    for index, layer in enumerate(decoder_layers(made)):
        for name in on.config.linears:
            factors = on.factors(index, name)
            layer.get_submodule(name).weight.add_(factors.b @ factors.a)
    return made


@torch.inference_mode()
def mask_logits(plain: nn.Module, on: SpaceAdapter, text: list[int], count: int = K) -> Tensor:
    """Plain transformers reads the text, then a copy with merged weights reads the masks. [count, V]."""
    past = DynamicCache()
    plain(input_ids=torch.tensor([text]), **{KV_CACHE: past})
    embeddings = on.embed(torch.arange(count))[None]
    places = len(text) + torch.arange(count)[None]
    return merged(plain, on)(inputs_embeds=embeddings, position_ids=places, **{KV_CACHE: past}).logits[0]


def worst(runner: ModelRunner, name: str, on: SpaceAdapter, tree: TokenTree | None = None) -> float:
    """The largest difference between mask rows of a tree and the oracle's, in standard deviations."""
    slot = read(runner, PREFIX)[0]
    tree = tree if tree is not None else hung([CANDIDATES], [PARENTS], [K])
    logits = runner.forward([slot], tree)[0]
    runner.cache.release(slot)
    error = 0.0
    for node in range(len(CANDIDATES)):
        path = [CANDIDATES[i] for i in [0, *tree.rows[0].path_to(node)]]
        expected = mask_logits(model(name), on, PREFIX + path)
        group = len(CANDIDATES) + node * K
        error = max(error, float((logits[group : group + K] - expected).abs().max() / expected.std()))
    return error


@pytest.mark.parametrize("name", [*FAMILIES, "falcon"])
def test_masks_say_what_transformers_says_with_merged_weights(name):
    kind = name.split()[-1]
    on = adapter(kind, K, linears=NAMES.get(kind))
    assert worst(attached(name, on), kind, on) < 2e-4


@pytest.mark.parametrize("rank", [33, 256])
@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_ranks_of_several_blocks(name, rank):
    on = adapter(name, K, rank=rank, linears=NAMES.get(name), strength=0.5 / rank**0.5)
    runner = attached(name, on)
    assert runner.loaded.is_native
    assert worst(runner, name, on) < 2e-4


def test_ranks_that_do_not_fit_a_native_pass_are_refused():
    with pytest.raises(IncompatibleModels, match=r"rank[\s\S]*257[\s\S]*256"):
        attached("llama", adapter("llama", K, rank=257))


@pytest.mark.parametrize(
    ("name", "linear", "about"),
    [
        ("minicpm3", "self_attn.kv_b_proj", "kv_b_proj"),
        ("gemma4-experts", "router.proj", r"router\.proj"),
        ("qwen3_moe", "mlp.experts.1.up_proj", "not all rows reach"),
    ],
)
def test_layers_that_native_passes_cannot_correct_are_refused(name, linear, about):
    """A correction is that of a row: experts have some rows, and what makes keys of latents those of others."""
    layer = ModelRunner(target(name), 1).loaded.model.base_model.layers[0].get_submodule(linear)
    shape = int(layer.out_features), int(layer.in_features)
    one = SpaceAdapter(dataclasses.replace(adapter(name, K, rank=0).config, rank=2, linears=(linear,), shapes=(shape,)))
    with pytest.raises(IncompatibleModels, match=rf"{about}[\s\S]*train (it|the adapter) without"):
        attached(name, one)


KINDS = [
    {"rank": 0},
    {"shared_mask": True},
    {"linears": ("self_attn.q_proj", "self_attn.v_proj")},
    {"linears": ("mlp.up_proj",)},
]


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_kinds_of_adapters(options):
    on = adapter("llama", K, **options)
    assert worst(attached("llama", on), "llama", on) < 2e-4


def test_learned_positions_are_added_to_mask_embeddings():
    on = adapter("gpt2", K, rank=0)  # its linear layers are of a kind of their own, so it adds embeddings only
    assert worst(attached("gpt2", on), "gpt2", on) < 2e-4


def every_row(monkeypatch) -> None:
    """The factors act on all rows."""
    right = corrections.LowRank.correct
    monkeypatch.setattr(
        corrections.LowRank, "correct", lambda self, path, _, *rows: right(self, path, slice(None), *rows)
    )


def one_row_off(monkeypatch) -> None:
    """The factors act one row too early."""
    right = corrections.LowRank.correct

    def wrong(self, path, rows, out, x):
        off = slice(rows.start - 1, rows.stop - 1) if isinstance(rows, slice) else rows
        right(self, path, off, out, x)

    monkeypatch.setattr(corrections.LowRank, "correct", wrong)


def next_mask(monkeypatch) -> None:
    """Mask j has the embedding of another mask."""
    right = SpaceAdapter.embed
    monkeypatch.setattr(SpaceAdapter, "embed", lambda self, which: right(self, (which + 1) % K))


def layout_of(wrong: type[PassLayout]):
    return lambda monkeypatch: with_layout(monkeypatch, target("torch llama"), wrong)


class OtherGroupsSeen(PassLayout):
    """Masks see the masks of the group before theirs."""

    def _visible(self, row, window):
        mask = super()._visible(row, window)
        if self.is_mask is not None:
            first, start = int(self.is_mask[row].int().argmax()), self.starts[row]
            mask[first + K : first + 2 * K, start + first : start + first + K] = True
        return mask


class MasksOneFurther(PassLayout):
    """Masks stand one place too far on."""

    @property
    def position_ids(self):
        right = self.columns
        return right if self.is_mask is None else right + self.is_mask.long()


MUTANTS = [every_row, one_row_off, next_mask, *map(layout_of, (OtherGroupsSeen, MasksOneFurther, TreePlusOne))]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(monkeypatch, mutant):
    on = adapter("llama", K)
    runner, oracle = attached("torch llama", on), mask_logits(model("llama"), on, PREFIX)
    with monkeypatch.context() as patch:
        mutant(patch)
        if mutant is next_mask:  # the oracle asks for embeddings too
            slot = read(runner, PREFIX[:-1])[0]
            logits = runner.forward([slot], hung_chain([PREFIX[-1:]], [K]))[0, 1:]
            assert not torch.allclose(logits, oracle, atol=1e-2)
        else:
            assert worst(runner, "llama", on) > 0.01


@pytest.mark.parametrize("wrong", [torch.ones_like, lambda takes: takes.roll(-1, 1), torch.zeros_like])
def test_native_passes_take_the_rows_of_masks(monkeypatch, wrong):
    """All rows, each one row too early, none."""
    right = NativeDecoder.logits

    def run(self, ids, layout, *rest):
        if layout.corrections is not None:
            layout.corrections = dataclasses.replace(layout.corrections, takes=wrong(layout.corrections.takes))
        return right(self, ids, layout, *rest)

    monkeypatch.setattr(NativeDecoder, "logits", run)
    on = adapter("llama", K)
    assert worst(attached("llama", on), "llama", on) > 0.01


def test_a_window_holds_for_masks(monkeypatch):
    runner, on = attached("torch mistral"), adapter("mistral", K)
    with_layout(monkeypatch, target("torch mistral"), NoWindow)
    assert worst(runner, "mistral", on) > 0.01


@pytest.mark.parametrize("name", [*FAMILIES, "falcon"])
def test_other_rows_have_the_bits_of_a_pass_without_adapter(name):
    """The same tree with ordinary probes in the place of the masks; the second row has fewer of either kind."""
    tree = hung([CANDIDATES, [8, 3]], [PARENTS, [-1, 0]], [K, 2])
    is_mask = tree.token_ids >= VOCAB
    plain = changed(tree, token_ids=tree.token_ids.masked_fill(is_mask, 0).tolist())
    without, runner = ModelRunner(target(name), 3), attached(name)
    texts = PREFIX, prompt(5, seed=1)
    expected = without.forward(read(without, *texts), plain)
    logits = runner.forward(read(runner, *texts), tree)
    assert torch.equal(logits[~is_mask], expected[~is_mask])
    assert not torch.isclose(logits[is_mask], expected[is_mask]).all(-1).any()


def test_every_row_is_noticed_by_the_bits_too(monkeypatch):
    runner, without = attached("torch llama"), ModelRunner(target("torch llama"), 3)
    tree = hung_chain([[5, 9]], [K])
    plain = changed(tree, token_ids=[[*row[:2], *[0] * (len(row) - 2)] for row in tree.lists.token_ids])
    every_row(monkeypatch)
    expected = without.forward(read(without, PREFIX), plain)
    assert not torch.equal(runner.forward(read(runner, PREFIX), tree)[:, :2], expected[:, :2])


def test_a_batch_is_its_rows():
    """Rows with other numbers of candidates and masks, one of them without masks, on slots out of order."""
    on, runner = adapter("llama", K), attached()
    texts = [PREFIX, prompt(70, seed=2), prompt(3, seed=3)]
    slots = read(runner, *texts)[::-1]
    tokens, counts = [[5, 9, 31], [8], [7, 4]], [1, K, 0]
    logits = runner.forward(slots, hung_chain(tokens, counts))
    for row, (own, count, text) in enumerate(zip(tokens, counts, texts[::-1], strict=True)):
        for node in range(len(own)):
            expected = mask_logits(model("llama"), on, text + own[: node + 1], count) if count else logits[:0, 0]
            group = len(own) + node * count
            assert torch.allclose(logits[row, group : group + count], expected, atol=1e-3), (row, node)
