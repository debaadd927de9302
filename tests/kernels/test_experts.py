"""Layers of experts against the oracle of one row, and bit for bit against one row at a time."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline.core.tree import TokenTree
from paceline.kernels import load
from paceline.kernels.library import BlockFormat, library
from paceline.target import ModelRunner, wrap_model
from tests.kernels.expert_layers import Layer, Rules, run
from tests.kernels.test_passes import assert_same_cache
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}")

Q8, INT4, Q4_K, Q6_K, FP4 = (BlockFormat[name] for name in ("Q8_0", "INT4", "Q4_K", "Q6_K", "MXFP4"))
FORMS = {
    **{str(form): Rules(form=form) for form in (torch.float32, torch.float16, torch.bfloat16, "BF12")},
    "INT8": Rules(6, hidden=64, inner=96, form=Q8),
    "INT4": Rules(6, hidden=64, inner=96, form=INT4, bits=16, shared=20),
    "MXFP4": Rules(6, hidden=64, inner=96, form=FP4, biases=True),
    "MXFP4 of 16 bits": Rules(6, hidden=64, inner=96, form=FP4, bits=16),
    "Q4_K and Q6_K": Rules(6, hidden=256, inner=256, form=Q4_K, second=(Q6_K, 8)),
    "Q6_K of both widths": Rules(6, hidden=256, inner=256, form=Q6_K, bits=16, second=(Q4_K, 8)),
    "Q4_K and INT8": Rules(6, hidden=256, inner=96, form=Q4_K, second=(Q8, 16)),
    "Q4_K and floats": Rules(6, hidden=256, inner=40, form=Q4_K, second=(torch.float16, 8)),
}
FOUR_NORMS = ("router_norm", "experts_norm", "after_shared", "after_experts")
RULES = {
    "softmax": Rules(divides=False),
    "divided": Rules(),
    "sigmoid": Rules(scoring="sigmoid", times=2.5),
    "deepseek": Rules(
        8,
        scoring="sigmoid",
        choice_bias=True,
        groups=4,
        chosen_groups=2,
        of_group=2,
        more_sum=1e-2,
        times=1.5,
        shared=24,
    ),
    "groups by their best": Rules(8, 2, groups=4, chosen_groups=2, of_group=1, divides=False),
    "groups by two scores": Rules(9, 2, groups=3, chosen_groups=1, of_group=2),
    "groups by two sigmoids": Rules(9, 2, scoring="sigmoid", groups=3, chosen_groups=2, of_group=2),
    "a least sum": Rules(choice_bias=True, scale=True, scoring="sigmoid", least_sum=0.8),
    "gpt-oss": Rules(biases=True, alpha=1.702, limit=0.6, plus=1.0),
    "gemma": Rules(
        shared=56, activation="gelu_pytorch_tanh", scale=True, norms=("before_mlp", *FOUR_NORMS, "after_mlp")
    ),
    "a norm of the router": Rules(norms=("before_mlp", "router_norm")),
    "a norm of the experts": Rules(norms=("experts_norm",)),
    "a shared expert": Rules(shared=33),
    "a shared expert behind a gate": Rules(
        shared=40, shared_gate=True, norms=("before_mlp", "router_norm", "after_shared")
    ),
    "plain": Rules(is_plain=True, activation="relu2", biases=True, scoring="sigmoid", divides=False),
    "all of them": Rules(5, 5),
    "one": Rules(1, 1, scoring="sigmoid", divides=False),
    "many": Rules(1024, 2, 32, 4),
}


def close(layer: Layer, rows: Tensor) -> bool:
    """Whether a pass over rows [R, E] makes of each what the oracle does, and counts the experts that it read."""
    got, read = run([layer], rows[None])
    want, chosen = zip(*map(layer.of_row, rows.double()), strict=True)
    error = (got[0] - torch.stack(want)).abs().max() / torch.stack(want).sub(rows).std()
    rounds = isinstance(layer.rules.form, BlockFormat) or library().paceline_isa() in (b"avx512_bf16", b"amx")
    return bool(error < (5e-3 if rounds else 2e-5)) and read == len(set().union(*chosen))


def rows_of(count: int, rules: Rules, seed: int = 1) -> Tensor:
    return torch.randn(count, rules.hidden, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rules", [*RULES.values(), *FORMS.values()], ids=[*RULES, *FORMS])
def test_a_layer_is_what_the_oracle_says(isa, rules):
    assert close(Layer(rules), rows_of(20, rules))


def breaks_ties() -> bool:
    """Whether a tie goes to the first, and NaN comes last."""
    rows, router = rows_of(12, Rules()), rows_of(3, Rules(), 2)[[0, 1, 0, 2, 1, 0, 2]] / 8
    right = True
    for scoring in ("softmax", "sigmoid"):
        right &= close(Layer(Rules(scoring=scoring), router=router), rows)
        grouped = Rules(6, groups=3, chosen_groups=2, of_group=2, scoring=scoring)
        right &= close(Layer(grouped, router=router[:6]), rows)
    router[1] = float("nan")
    right &= close(Layer(Rules(chosen=6, scoring="sigmoid"), router=router), rows)
    for rules in (Rules(), Rules(chosen=7, scoring="sigmoid")):
        right &= not run([Layer(rules, router=router)], rows[None])[0].isfinite().any()
    return right


def test_a_tie_goes_to_the_first_and_nan_comes_last(isa):
    assert breaks_ties()


def has_the_bits_of_one_row(layers: Sequence[Layer], rows: Tensor, rng: random.Random) -> bool:
    """Whether rows [R, E] have the bits that each has alone: among some of the others, in batches, on any threads."""
    alone, threads = torch.cat([run(layers, row[None, None])[0][0] for row in rows]), torch.get_num_threads()
    try:
        for count, number in zip((1, 1, 2, 7, 64, 200), rng.sample((1, 2, 3, 4, 5, 8), 6), strict=True):
            torch.set_num_threads(number)
            sizes = [rng.randint(1, count) for _ in range(3)]
            for some in ([count], sizes):
                picked = [rng.choices(range(len(rows)), k=count) for _ in some]
                together = run(layers, rows[torch.tensor(picked)], some)[0]
                for got, size, places in zip(together, some, picked, strict=True):
                    if not torch.equal(got[:size], alone[places[:size]]):
                        return False
        return True
    finally:
        torch.set_num_threads(threads)


TRIALS = [1, pytest.param(8, marks=pytest.mark.more)]


@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize("name", FORMS)
def test_a_row_has_the_same_bits_beside_any_others_and_on_any_threads(isa, name, trials):
    for trial in range(trials):
        layers = [Layer(FORMS[name], seed) for seed in (trial, trial + 1)]
        assert has_the_bits_of_one_row(layers, rows_of(24, FORMS[name], trial), random.Random(trial))


@pytest.mark.parametrize("name", ["gpt-oss", "gemma", "deepseek", "a shared expert behind a gate", "many", "one"])
def test_a_row_has_the_same_bits_with_all_rules(isa, name):
    assert has_the_bits_of_one_row([Layer(RULES[name])], rows_of(24, RULES[name]), random.Random(name))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["torch.float32", "torch.bfloat16", "INT4", "Q4_K and Q6_K"])
def test_a_broken_row_breaks_no_other_and_does_not_heal(isa, name, value):
    layers, rows = [Layer(FORMS[name], seed) for seed in range(2)], rows_of(9, FORMS[name])
    good = run(layers, rows[None])[0][0]
    rows[4, 7] = value
    got = run(layers, rows[None])[0][0]
    assert not got[4].isfinite().any()
    assert torch.equal(got[[0, 1, 2, 3, 5, 6, 7, 8]], good[[0, 1, 2, 3, 5, 6, 7, 8]])


def test_a_broken_expert_breaks_the_rows_that_chose_it(isa):
    layer, rows = Layer(Rules()), rows_of(20, Rules())
    good = run([layer], rows[None])[0][0]
    weights = layer.downs[2].matrix.packed
    assert isinstance(weights, Tensor)
    weights.fill_(float("nan"))
    got, broken = run([layer], rows[None])[0][0], torch.tensor([2 in layer.of_row(row)[1] for row in rows.double()])
    assert 0 < broken.sum() < len(rows)
    assert torch.equal(got[~broken], good[~broken])
    assert got[broken].isnan().all()


@pytest.mark.parametrize("name", ["torch.float32", "INT8", "MXFP4", "Q4_K and Q6_K"])
def test_the_instruction_sets_agree(name):
    """Without norms, whose sums are divided among the lanes; the portable kernels have no fused products."""
    layer, rows, made = Layer(replace(FORMS[name], norms=(), shared=24)), rows_of(9, FORMS[name]), []
    try:
        for one in load().isas[1:]:
            library().paceline_select(one.encode())
            made.append(run([layer], rows[None])[0])
    finally:
        library().paceline_select(str(load().isa).encode())
    assert all(torch.equal(one, made[0]) for one in made)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_prompts_in_pieces(isa, name):
    """Of a model: columns and logits are those of one row after another, whatever the rows of a pass."""
    rng, threads = random.Random(name), torch.get_num_threads()
    runner = ModelRunner(wrap_model(tiny_model(name, torch.bfloat16)), 2, 256)
    text, (one, other) = [rng.randrange(3, 97) for _ in range(200)], [runner.cache.allocate() for _ in range(2)]
    assert runner.loaded.is_native

    def read(slot: int, size: int) -> Tensor:
        runner.cache.truncate(slot, 0)
        for first in range(0, len(text), size):
            runner.extend_cache(slot, text[first : first + size])
        return runner.forward([slot], TokenTree.chain([[5]])).clone()

    try:
        want = read(one, 1)
        for size in (7, 64, 200):
            torch.set_num_threads(rng.choice((1, 2, 3)))
            assert torch.equal(read(other, size), want)
            assert_same_cache(runner, one, other, len(text))
    finally:
        torch.set_num_threads(threads)
