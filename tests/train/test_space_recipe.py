"""SPACE's recipe: what each mask token sees and learns, compared with texts read one by one; what training leaves."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from paceline.errors import ConfigError
from paceline.hf.load import KV_CACHE
from paceline.methods.space.adapter import SpaceAdapter, SpaceConfig
from paceline.methods.space.recipe import (
    SpaceLoss,
    SpaceRecipe,
    mask_groups,
    merge,
    whole,
    with_factors,
    without_factors,
)
from paceline.target import wrap_model
from paceline.train.models import linears_of
from paceline.train.recipe import Batch
from paceline.train.rounds import Rounds
from tests.helpers import prompt
from tests.tiny import tiny_model
from tests.train.toy import descend

TEXTS = [(prompt(6, 1), prompt(9, 2)), (prompt(3, 3), prompt(5, 4))]
"""Prompts and answers."""
K = 3


def batch_of(texts=TEXTS) -> Batch:
    width = max(len(p) + len(a) for p, a in texts)
    ids, answers = torch.zeros(len(texts), width, dtype=torch.long), torch.zeros(len(texts), width, dtype=torch.bool)
    for row, (p, a) in enumerate(texts):
        ids[row, : len(p) + len(a)] = torch.tensor(p + a)
        answers[row, len(p) : len(p) + len(a)] = True
    return Batch(ids, {}, answers)


def recipe(gated=True, lora=True, loss=None, transition=0, stirred=True, draft_ids=None, **how) -> SpaceRecipe:
    plain = tiny_model("llama", torch.float64).requires_grad_(False)
    linears, shapes = linears_of(plain, ())
    config = SpaceConfig(32, 2, plain.config.vocab_size, K, False, 4, linears, shapes, transition)
    torch.manual_seed(1)
    trained = (with_factors if lora else whole)(plain, config, None)
    trained.adapter.to(torch.float64)
    if stirred:  # a fresh adapter's factors do nothing
        with torch.no_grad():
            for parameter in trained.adapter.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    made = SpaceRecipe(trained, gated, None, SpaceLoss(loss or "token", **how), draft_ids)
    made.module.eval()
    return made


def merged_alone(made: SpaceRecipe) -> nn.Module:
    """The model with the factors in its weights."""
    model = copy.deepcopy(tiny_model("llama", torch.float64))
    with torch.no_grad():
        for index, layer in enumerate(model.base_model.layers):
            for name in made.adapter.config.linears:
                factors = made.adapter.factors(index, name)
                layer.get_submodule(name).weight.add_(factors.b @ factors.a)
    return model


def logits_by_hand(made: SpaceRecipe, text: list[int], t: int, depth: int, shift: int = 1) -> torch.Tensor:
    """Logits [depth, V] of masks below column t: first the prefix by the plain model, then they by the merged one."""
    plain, merged = tiny_model("llama", torch.float64), merged_alone(made)
    reader = plain if made.gated else merged
    cache = DynamicCache()
    reader(torch.tensor([text[: t + 1]]), **{KV_CACHE: cache})
    places = torch.arange(t + shift, t + shift + depth)[None]
    embeds = made.adapter.embed(torch.arange(depth))[None]
    return merged(inputs_embeds=embeds, position_ids=places, **{KV_CACHE: cache}).logits[0]


def by_hand(made: SpaceRecipe, soft: bool, shift: int = 1) -> tuple[float, list[float]]:
    """Weighted mean loss and agreement over every anchor of both texts."""
    plain = tiny_model("llama", torch.float64)
    losses, right = [[] for _ in range(K)], [[] for _ in range(K)]
    for p, a in TEXTS:
        text = p + a
        said = plain(torch.tensor([text])).logits[0]
        for t in range(len(p) - 1, len(text) - 2):
            depth = min(K, len(text) - 2 - t)
            for j, logits in enumerate(logits_by_hand(made, text, t, depth, shift)):
                predicted = t + 2 + j
                teacher = said[predicted - 1].softmax(-1) if soft else torch.tensor(text[predicted])
                losses[j].append(float(nn.functional.cross_entropy(logits, teacher)))
                right[j].append(float(logits.argmax() == text[predicted]))
    weights = [made.settings.decay**j * len(of) for j, of in enumerate(losses)]
    means = [sum(of) / len(of) for of in losses]
    total = sum(w * m for w, m in zip(weights, means, strict=True)) / sum(weights)
    return total, [sum(of) / len(of) for of in right]


@pytest.mark.parametrize("soft", [False, True])
@torch.no_grad()
def test_every_supervised_token_is_what_reading_the_text_up_to_its_anchor_says(soft):
    made = recipe(loss="ce" if soft else None)
    got = made.loss(batch_of())
    total, right = by_hand(made, soft)
    assert float(got.total) == pytest.approx(total, rel=1e-9)
    assert got.agreement.tolist() == pytest.approx(right)


@torch.no_grad()
def test_a_part_of_the_vocabulary_is_compared_by_itself():
    ids = torch.tensor(sorted({*TEXTS[0][1][3:], *TEXTS[1][1]}))
    every, some = recipe(loss="ce"), recipe(loss="ce", draft_ids=ids)
    batch = batch_of()
    layout = mask_groups(batch.is_answer, K, 512, 1.0, torch.Generator().manual_seed(0))
    cache = DynamicCache()
    text = every._plain(batch.token_ids, **{KV_CACHE: cache})
    logits = every._masked(batch.token_ids, layout, cache)[..., ids]
    predicted = (layout.column + 1).clamp(0, batch.token_ids.shape[1] - 1)
    total = weight = 0.0
    for j in range(K):
        for row, r in zip(*torch.where((layout.depth == j) & layout.counts), strict=True):
            if batch.token_ids[row, predicted[row, r]] in ids:
                teacher = text.logits[row, predicted[row, r] - 1][ids].softmax(-1)
                total += every.settings.decay**j * float(nn.functional.cross_entropy(logits[row, r], teacher))
                weight += every.settings.decay**j
    assert float(some.loss(batch).total) == pytest.approx(total / weight)


@torch.no_grad()
def test_a_mutant_with_masks_one_place_off_is_caught():
    made = recipe()
    assert float(made.loss(batch_of()).total) != pytest.approx(by_hand(made, False, shift=2)[0], rel=1e-3)


@pytest.mark.parametrize("mutant", ["later text", "other groups", "later masks"])
@torch.no_grad()
def test_mutants_that_see_too_much_are_caught(monkeypatch, mutant):
    made, true = recipe(), Rounds.visible

    def visible(layout, width):
        seen = true(layout, width)
        if mutant == "later text":
            seen[:, :, :width] |= torch.arange(width) <= layout.start[:, :, None]
        elif mutant == "other groups":
            seen[:, :, width:] |= (layout.column >= 0)[:, None, :]
        else:
            seen[:, :, width:] |= layout.start[:, :, None] == layout.start[:, None, :]
        return seen

    monkeypatch.setattr(Rounds, "visible", visible)
    assert float(made.loss(batch_of()).total) != pytest.approx(by_hand(made, False)[0], rel=1e-4)


@pytest.mark.parametrize("mutant", [None, "no shift", "one token off"])
@torch.no_grad()
def test_a_transition_adds_what_the_token_before_says(monkeypatch, mutant):
    made, (p, a) = recipe(transition=8), TEXTS[0]
    text, plain, true = p + a, tiny_model("llama", torch.float64), SpaceAdapter.shift
    embeddings, rows = plain.get_input_embeddings().weight, plain.get_output_embeddings().weight
    layout = mask_groups(batch_of(TEXTS[:1]).is_answer, K, 512, 1.0, torch.Generator().manual_seed(0))
    expected = []
    for column, mask in zip((layout.start[0] - 1).tolist(), layout.depth[0].tolist(), strict=True):
        before = embeddings[text[column + 1 + mask]][None]
        by_mask = logits_by_hand(made, text, column, mask + 1)[mask]
        expected.append(by_mask + (rows @ true(made.adapter, before)[0]))
    if mutant == "no shift":
        monkeypatch.setattr(SpaceAdapter, "shift", lambda adapter, before: 0 * true(adapter, before))
    elif mutant == "one token off":
        monkeypatch.setattr(SpaceAdapter, "shift", lambda adapter, before: true(adapter, before.roll(1, 1)))
    ids, cache = torch.tensor([text]), DynamicCache()
    made._plain(ids, **{KV_CACHE: cache})
    found = made._masked(ids, layout, cache)[0]
    assert torch.allclose(found, torch.stack(expected), atol=1e-9) == (mutant is None)


@torch.no_grad()
def test_shares_are_float32_and_zero_where_no_label_can_be_drafted():
    made = recipe(draft_ids=torch.tensor([TEXTS[0][1][2]]))
    last = mask_groups(batch_of(TEXTS[:1]).is_answer[:, : len(TEXTS[0][0]) + 3], K, 512, 1.0, None)
    assert sorted(last.depth[0].tolist()) == [0, 0, 1]
    for texts, expected in (([(TEXTS[0][0], TEXTS[0][1][:3])], [0.5, 1.0]), (TEXTS[1:], [0.0] * K)):
        got = made.loss(batch_of(texts)).agreement
        assert got.dtype == torch.float32
        assert got[: len(expected)].tolist() == expected


def test_groups_stay_whole_within_the_rows_and_begin_where_a_token_is_supervised():
    answers = batch_of().is_answer
    layout = mask_groups(answers, K, 7, 0.6, torch.Generator().manual_seed(3))
    for row, (p, a) in enumerate(TEXTS):
        kept = [(int(c), int(j)) for c, j in zip(layout.start[row] - 1, layout.depth[row], strict=True) if c >= 0]
        assert 0 < len(kept) <= 7 // 2
        assert all(len(p) - 1 <= c and c + 2 + j < len(p) + len(a) for c, j in kept)
        for c, j in kept:
            assert j == 0 or (c, j - 1) in kept


def test_gated_training_moves_nothing_but_the_adapter():
    made = recipe(stirred=False)
    before = [p.clone() for p in tiny_model("llama", torch.float64).parameters()]
    kept = copy.deepcopy(made.adapter.state_dict())
    made.module.train()
    for _ in range(2):
        made.loss(batch_of()).total.backward()
        torch.optim.SGD(made.module.parameters(), lr=0.5).step()
    after = tiny_model("llama", torch.float64).parameters()
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert all(not torch.equal(kept[name], now) for name, now in made.adapter.state_dict().items())
    assert all(p.grad is None for p in made._plain.parameters())


@pytest.mark.parametrize("lora", [True, False])
def test_a_full_run_trains_the_text_and_leaves_a_model_without_low_rank_layers(lora, tmp_path):
    made = recipe(gated=False, lora=lora, stirred=False, ar_share=0.0)
    target = wrap_model(tiny_model("llama", torch.float64), None, "tiny")
    got = descend(made, batch_of(), 12, lr=1e-2)
    assert float(got[-1].parts["text"]) < float(got[0].parts["text"])
    adapter, model = made.result(target, tmp_path / "model")
    assert adapter.config.rank == 0
    assert model.fingerprint != target.fingerprint
    ids = batch_of().token_ids[:1]
    expected = made._adapted.eval()(ids).logits
    found = merge(made._trained)(ids).logits
    assert torch.allclose(found, expected)
    bare = merge(made._trained)
    assert bare.state_dict().keys() == tiny_model("llama").state_dict().keys()
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_only_text_is_trained_on_some_batches_of_a_full_run():
    made = recipe(gated=False, ar_share=0.5)
    made.module.train()
    torch.manual_seed(0)
    kinds = [bool(made.loss(batch_of()).agreement.isnan().all()) for _ in range(40)]
    assert 8 < sum(kinds) < 32


def test_settings_out_of_range_are_refused():
    for wrong in ({"keep": 0.0}, {"decay": 1.5}, {"ar_share": 1.0}, {"rows": 1}):
        with pytest.raises(ConfigError):
            recipe(**wrong)
    with pytest.raises(ConfigError, match="q_proj"):
        linears_of(tiny_model("llama", torch.float64), ("nonsense",))


def test_what_is_left_of_a_merged_adapter_is_its_masks():
    adapter = recipe(transition=4).adapter
    bare = without_factors(adapter)
    assert isinstance(bare, SpaceAdapter)
    assert not len(bare.layers)
    assert torch.equal(bare.masks, adapter.masks.float())
    assert bare.config == replace(adapter.config, rank=0, linears=(), shapes=())
