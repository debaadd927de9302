"""Recurrent layers: states after rounds of drafts are those of one token after another, bit for bit."""

import random
from typing import Any, Literal

import pytest
import torch

from paceline.core.tree import TokenTree
from paceline.errors import IncompatibleModels
from paceline.hf.experts import split_experts
from paceline.kernels import load
from paceline.quant.blocks import BlockLinear
from paceline.quant.linears import quantize_target
from paceline.quant.packed import PackedMatrix, pack_linears
from paceline.target import ModelRunner, wrap_model
from tests.kernels.test_passes import assert_same_cache, random_tree
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}")

HYBRIDS = ["qwen3_5", "falcon_h1", "lfm2", "olmo_hybrid", "granitemoehybrid", "bamba", "nemotron_h", "mamba2", "lfm3"]
FIRST = [pytest.param(name, marks=() if i < 3 else pytest.mark.more) for i, name in enumerate(HYBRIDS)]


def decode(runner: ModelRunner, slot: int, tokens: list[int]) -> torch.Tensor:
    """Cache tokens one at a time; the logits after the last."""
    logits = torch.empty(0)
    for token in tokens:
        logits = runner.forward([slot], TokenTree.chain([[token]]))[0, 0]
        runner.commit([slot], [[]])
    return logits


def round_of(runner: ModelRunner, slots: list[int], rng: random.Random, most: int = 9) -> list[list[int]]:
    """A pass over random trees in all slots, of which random paths are committed; the tokens that each slot took."""
    trees = [random_tree(rng.randint(1, most), rng).rows[0] for _ in slots]
    runner.forward(slots, TokenTree.of(trees))
    paths = [tree.path_to(rng.randrange(len(tree))) for tree in trees]
    runner.commit(slots, paths)
    return [[tree.token_ids[node] for node in (0, *path)] for tree, path in zip(trees, paths, strict=True)]


def keeps_bits(
    runner: ModelRunner,
    rounds: int,
    seed: int,
    stops_at_pages: bool = False,
    lengths: tuple[int, int] = (20, 3),
    most: int = 9,
) -> bool:
    """Whether rounds over two sequences leave the columns, states and logits of plain decoding.

    lengths: of their texts. most: nodes of a tree.
    """
    rng, (plain, *slots) = random.Random(seed), [runner.cache.allocate() for _ in range(3)]
    recurrent = runner.cache.recurrent
    assert recurrent is not None
    recurrent.stops_at_pages = stops_at_pages
    try:
        texts = [[rng.randrange(3, 97) for _ in range(length)] for length in lengths]
        for slot, text in zip(slots, texts, strict=True):
            runner.extend_cache(slot, text)
        for _ in range(rounds):
            for text, more in zip(texts, round_of(runner, slots, rng, most), strict=True):
                text.extend(more)
            if rng.random() < 0.2:  # a draft by the same cache that is taken back
                with runner.tentative(slots):
                    for _ in range(2):
                        round_of(runner, slots, rng, most)
        recurrent.stops_at_pages = False
        for slot, text in zip(slots, texts, strict=True):
            runner.cache.release(plain)
            runner.cache.allocate()
            decode(runner, plain, text)
            if not torch.equal(decode(runner, plain, [7]), decode(runner, slot, [7])):
                return False
            for one in (plain, slot):
                decode(runner, one, [9])  # states move on a round later
            assert_same_cache(runner, plain, slot, len(text) + 1)
        return True
    finally:
        for slot in (plain, *slots):
            runner.cache.release(slot)


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("stops_at_pages", [False, True])
def test_rounds_of_drafts_leave_the_states_of_plain_decoding(name, stops_at_pages, isa):
    runner = ModelRunner(wrap_model(tiny_model(name, torch.bfloat16)), 3, 400)
    assert keeps_bits(runner, 12, 3, stops_at_pages)


def in_blocks(weights: Literal["int8", "int4", "q4_0"], size: int) -> tuple[ModelRunner, float]:
    """Native passes of a Qwen3-Next whose projections lie by key head, and how far they are from torch's."""
    sizes: Any = {"linear_key_head_dim": size, "linear_value_head_dim": size, "hidden_size": 64}
    model: Any = tiny_model("qwen3_next", num_experts_per_tok=4, **sizes)  # all, or near ties would decide
    split_experts(model)
    quantize_target(model, weights, 32)
    pack_linears(model)
    assert isinstance(model.model.layers[0].linear_attn.in_proj_qkvz, BlockLinear)
    ids = torch.tensor([[5, 9, 31, 7, 60, 2]])
    with torch.inference_mode():
        want = model(ids).logits[0].float().log_softmax(-1)
    loaded = wrap_model(model)
    assert loaded.is_native
    runner = ModelRunner(loaded, 3, 400)
    got = runner.forward([runner.cache.allocate()], TokenTree.chain(ids.tolist()))[0].log_softmax(-1)
    runner.cache.release(0)
    return runner, float((want.exp() * (want - got)).sum(-1).mean())


@pytest.mark.parametrize("weights", ["int8", "int4", "q4_0"])
@pytest.mark.parametrize("size", [8, 16])
def test_projections_that_lie_by_key_head_in_blocks(weights, size):
    """Heads of 16 numbers are moved as whole records, others are unpacked, and their inputs are not rounded."""
    runner, distance = in_blocks(weights, size)
    assert distance < 0.05
    assert keeps_bits(runner, 8, 3)


@pytest.mark.parametrize("size", [8, 16])
def test_records_in_another_order_are_seen(size, monkeypatch):
    rows = PackedMatrix.rows
    monkeypatch.setattr(PackedMatrix, "rows", lambda matrix, order: rows(matrix, torch.arange(len(order))))
    with pytest.raises(IncompatibleModels):
        in_blocks("int4", size)


@pytest.mark.more
@pytest.mark.parametrize("name", HYBRIDS)
def test_two_hundred_rounds(name):
    runner = ModelRunner(wrap_model(tiny_model(name, max_position_embeddings=2048)), 3, 1500)
    assert keeps_bits(runner, 200, 5)


def test_a_state_is_forgotten_with_its_sequence():
    """A slot that was used, and a text that is rolled back further than its state, begin anew."""
    runner = ModelRunner(wrap_model(tiny_model("qwen3_5")), 2, 100)
    slot, other = runner.cache.allocate(), runner.cache.allocate()
    decode(runner, slot, [5, 6, 7])
    runner.cache.truncate(slot, 2)
    assert runner.cache.lengths[slot] == 2, "the last token is not in the state yet"
    runner.cache.truncate(slot, 0)
    assert torch.equal(decode(runner, slot, [8, 9]), decode(runner, other, [8, 9]))
    runner.extend_cache(slot, [3, 4, 5])
    runner.cache.truncate(slot, 4)
    assert runner.cache.lengths[slot] == 0


def test_what_an_interrupt_left_goes_with_its_sequence():
    """A hold that did not end, and a state that moved on before it was noted."""
    runner = ModelRunner(wrap_model(tiny_model("qwen3_5")), 1, 64)
    slot, recurrent = runner.cache.allocate(), runner.cache.recurrent
    assert recurrent is not None
    runner.cache.held([slot]).__enter__()
    recurrent.states[0][slot] = 1
    runner.cache.truncate(slot, 0)
    assert not recurrent.states[0].any()
    runner.extend_cache(slot, [5] * 20)
    assert recurrent.bases[slot] == 20


def test_measuring_a_pass_moves_no_state():
    runner = ModelRunner(wrap_model(tiny_model("qwen3_5")), 1, 64)
    slot, recurrent = runner.cache.allocate(), runner.cache.recurrent
    assert recurrent is not None
    runner.extend_cache(slot, [5] * 20)
    runner.forward([slot], TokenTree.chain([[6] * 4]))
    runner.commit([slot], [[1, 2]])
    runner.pass_seconds(4)
    assert (recurrent.bases[slot], runner.cache.lengths[slot]) == (20, 23)


def test_rows_of_a_text_are_not_kept():
    """Rings hold what states lack, not prompts."""
    runner = ModelRunner(wrap_model(tiny_model("qwen3_5")), 2, 250)
    slot, recurrent = runner.cache.allocate(), runner.cache.recurrent
    assert recurrent is not None
    runner.extend_cache(slot, [5] * 200)
    runner.forward([slot], TokenTree.chain([[6] * 8]))
    assert recurrent.capacity == 16
