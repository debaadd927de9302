"""What each step of EAGLE's training reads and is taught, drawn and then held against drafting step by step.

column          0      1      2      3      4      5
token           p0     p1     a2     a3     a4     a5       p: prompt, a: answer
state           f0     f1     f2     f3     f4     (a5 was never read)
step 0, t=1     f1 and a2 -> distribution of a3 = head(f2)
step 1, t=1     h  and a3 -> distribution of a4 = head(f3)
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from paceline.methods.eagle.head import EagleConfig, EagleHead
from paceline.methods.eagle.recipe import EagleLoss, EagleRecipe
from paceline.methods.heads.layers import attend_causally
from paceline.train import head_recipe as common
from paceline.train.losses import LOSSES
from paceline.train.recipe import Batch

E, V, VD, LAST = 8, 20, 12, 4
PROMPT, LENGTH = 2, 6
ROWS = torch.randn(VD, E, dtype=torch.float64, generator=torch.Generator().manual_seed(0))  # of the target's output


def head_of(version: int | str, **options: int) -> EagleHead:
    torch.manual_seed(1)
    states = (1, 2, 3) if version == 3 else (LAST,)
    config = EagleConfig(E, states, VD, V, 16, 4, 2, 4, version, E, **options)  # type: ignore[arg-type]
    module = EagleHead(config, torch.arange(VD)).double()
    if "mask_token_id" in options:
        nn.init.normal_(module.mask_hidden)
    rows = torch.randn(V, E, dtype=torch.float64)
    return module.attach(torch.randn(V, E, dtype=torch.float64), rows)


def batch_of(rows: int = 1) -> Batch:
    torch.manual_seed(7)
    tokens = torch.randint(0, VD, (rows, LENGTH))
    states = {layer: torch.randn(rows, LENGTH, E, dtype=torch.float64) for layer in (1, 2, 3, LAST)}
    for state in states.values():
        state[:, -1] = 0
    is_answer = torch.zeros(rows, LENGTH, dtype=torch.bool)
    is_answer[:, PROMPT:] = True
    return Batch(tokens, states, is_answer)


def recipe_of(head: EagleHead, steps: int = 1, **options: float) -> EagleRecipe:
    how = {"steps": steps, "regress": 0.0, "ce_weight": 1.0, "noise": 0.0, **options}
    return EagleRecipe(head, ROWS, EagleLoss(**how), LAST)  # type: ignore[arg-type]


def drafted_by_hand(head: EagleHead, batch: Batch, t: int, steps: int) -> list[Tensor]:
    """Hidden states that drafting from column t would have, fed the true tokens: one growing sequence, no batch."""
    states = torch.cat([batch.states[layer] for layer in head.config.states], -1)[:, : t + 1]
    hidden, tokens = head.begin(states), batch.token_ids[:, 1 : t + 2]
    found = []
    for step in range(steps):
        length = hidden.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril()

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor = mask) -> Tensor:
            return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

        # The prefix keeps its inputs; what a step put out becomes the input of one column more.
        out = head(tokens, hidden, torch.arange(length)[None], attend)[:, -1:]
        found.append(out[0, 0])
        if head.config.mask_token_id is None:
            hidden, following = torch.cat([hidden, out], 1), batch.token_ids[:, t + 2 + step, None]
        else:
            hidden = torch.cat([hidden, head.begin(head.mask_hidden)[None]], 1)
            following = torch.tensor([[head.config.mask_token_id]])
        tokens = torch.cat([tokens, following], 1)
    return found


def loss_by_hand(head: EagleHead, batch: Batch, steps: int, decay: float = 0.8) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for step in range(steps):
        values = []
        for t in range(LENGTH):
            label = t + 2 + step
            if label < LENGTH and label >= PROMPT:
                hidden = drafted_by_hand(head, batch, t, step + 1)[step]
                target = batch.states[LAST][0, label - 1] @ ROWS.T  # the target's logits for the label's token
                values.append(-(target.softmax(-1) * head.logits(hidden).log_softmax(-1)).sum())
        total = total + decay**step * torch.stack(values).mean()
    return total


class FewAnswers:
    """One answer, whose states have channels of different sizes."""

    has_states = True

    def __len__(self):
        return 1

    def batch(self, *_):
        batch = batch_of()
        return replace(batch, states={layer: state * torch.logspace(0, 3, E) for layer, state in batch.states.items()})


@pytest.mark.parametrize(("version", "options"), [(1, {}), (3, {}), (3, {"fc_norm": True})], ids=str)
def test_a_fresh_head_reads_all_inputs_at_one_size(version, options):
    head = head_of(version, **options)
    base = SimpleNamespace(norm=nn.RMSNorm(E, dtype=torch.float64))
    target = SimpleNamespace(model=SimpleNamespace(base_model=base), embeddings=torch.randn(V, E) / 10, device="cpu")
    recipe, before = recipe_of(head), head.fc.weight.detach().clone()
    recipe.initialise(target, FewAnswers(), is_fresh=True)
    (scale,) = recipe.input_scales.values()
    torch.testing.assert_close(head.fc.weight * scale, before)
    read = FewAnswers().batch().states[head.config.states[-1]][0, PROMPT - 1 : -1]
    if options:
        read = read / read.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(scale[-E:], read.square().mean(0).sqrt(), check_dtype=False)
    again = head.fc.weight.detach().clone()
    recipe.initialise(target, FewAnswers(), is_fresh=False)
    assert torch.equal(head.fc.weight, again)


FORMS = {
    "eagle": (1, {}), "eagle3": (3, {}), "mtp": ("mtp", {}), "eagle3.1": (3, {"fc_norm": True, "norm_output": True}),
    "eagle layers": (1, {"num_hidden_layers": 2}), "eagle3 layers": (3, {"num_hidden_layers": 2}),
}  # fmt: skip


@pytest.mark.parametrize(("version", "options"), FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_loss_is_that_of_drafting_step_by_step(version, options, steps):
    head, batch = head_of(version, **options), batch_of()
    given = recipe_of(head, steps).loss(batch).total
    torch.testing.assert_close(given, loss_by_hand(head, batch, steps))


def test_an_mtp_head_has_the_form_of_deepseek_v3():
    """Section 2.2 of arXiv 2412.19437, written out; with two of its norms exchanged it is another head."""
    head, batch = head_of("mtp"), batch_of()
    for parameter in head.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 2.0)
    layer, states, positions = head.layers[0], batch.states[LAST], torch.arange(LENGTH)[None]

    def norm(of: nn.RMSNorm, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + of.eps).sqrt() * of.weight

    pairs = torch.cat([norm(head.enorm, head.embed(batch.token_ids, states)), norm(head.hnorm, states)], -1)
    x, (cos, sin) = pairs @ head.fc.weight.T, head.rotation(positions)
    x = x + layer.self_attn(norm(layer.input_layernorm, x), cos, sin, attend_causally)
    x = x + layer.mlp(norm(layer.post_attention_layernorm, x))
    torch.testing.assert_close(head(batch.token_ids, states, positions, attend_causally), x)
    torch.testing.assert_close(head.logits(x), head.output(norm(head.norm, x)))
    head.enorm, head.hnorm = head.hnorm, head.enorm
    assert (head(batch.token_ids, states, positions, attend_causally) - x).abs().max() > 0.01


@pytest.mark.parametrize("steps", [2, 3])
def test_peagle_learns_what_its_masks_draft(steps):
    head, batch = head_of(3, mask_token_id=9, num_speculative_tokens=steps), batch_of()
    recipe = EagleRecipe(head, ROWS, EagleLoss(), LAST)
    losses = recipe.loss(batch)
    torch.testing.assert_close(losses.total, loss_by_hand(head, batch, steps))
    losses.total.backward()
    assert head.mask_hidden.grad.abs().min() > 0
    head.config = replace(head.config, mask_token_id=8)
    assert (recipe.loss(batch).total - loss_by_hand(head, batch, steps)).abs() < 1e-9
    wrong = EagleRecipe(head_of(3), ROWS, EagleLoss(steps=steps), LAST).loss(batch).total
    assert (wrong - losses.total).abs() > 1e-6


@pytest.mark.parametrize("off", [-1, 1])
def test_a_mutant_shifted_by_one_is_caught(monkeypatch, off):
    head, batch = head_of(3), batch_of()
    real = common.shifted

    def moved(x, by):  # labels of the neighbouring column
        is_place = x.dtype == torch.long and x is not batch.token_ids
        return real(x, by + off if is_place else by)

    monkeypatch.setattr(common, "shifted", moved)
    given = recipe_of(head, 1).loss(batch).total
    assert (given - loss_by_hand(head, batch, 1)).abs().item() > 1e-6


def test_a_mutant_whose_later_steps_see_no_prefix_is_caught(monkeypatch):
    head, batch = head_of(3), batch_of()

    def only_itself(self, query, key, value):
        return nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=torch.eye(LENGTH, dtype=torch.bool), enable_gqa=True
        )

    monkeypatch.setattr(common.Unrolled, "__call__", only_itself)
    given = recipe_of(head, 2).loss(batch).total
    assert (given - loss_by_hand(head, batch, 2)).abs().item() > 1e-6


def test_a_mutant_whose_layers_share_their_keys_is_caught(monkeypatch):
    head, batch = head_of(3, num_hidden_layers=2), batch_of()
    one = partial(common.Unrolled, num_layers=1)
    monkeypatch.setattr("paceline.methods.eagle.recipe.Unrolled", lambda length, device, _: one(length, device))
    given = recipe_of(head, 2).loss(batch).total
    assert (given - loss_by_hand(head, batch, 2)).abs().item() > 1e-6


def test_padding_and_neighbours_change_nothing():
    head = head_of(3)
    batch = batch_of(2)

    def changed(change) -> Batch:
        states = {layer: change(state) for layer, state in batch.states.items()}
        return Batch(change(batch.token_ids), states, change(batch.is_answer))

    padded = changed(lambda x: torch.cat([x, x.new_zeros(x.shape[0], 3, *x.shape[2:])], 1))
    recipe = recipe_of(head, 2)
    first, second = (recipe.loss(changed(lambda x, b=b: x[b : b + 1])).total for b in range(2))
    torch.testing.assert_close(recipe.loss(padded).total, (first + second) / 2)


def test_the_prompt_teaches_nothing():
    head, batch = head_of(1), batch_of()
    recipe = recipe_of(head)
    all_prompt = Batch(batch.token_ids, batch.states, torch.zeros_like(batch.is_answer))
    all_prompt.is_answer[0, -1] = True
    one = recipe.loss(all_prompt)
    hidden = drafted_by_hand(head, batch, LENGTH - 3, 1)[0]
    target = (batch.states[LAST][0, LENGTH - 2] @ ROWS.T).softmax(-1)
    torch.testing.assert_close(one.total, -(target * head.logits(hidden).log_softmax(-1)).sum())


def test_agreement_counts_tokens_outside_the_draft_vocabulary_as_misses():
    head, batch = head_of(3), batch_of()
    batch.token_ids[0, -1] = V - 1
    recipe = recipe_of(head)
    losses = recipe.loss(batch)
    right = 0
    for t in range(LENGTH - 2):
        if t + 2 >= PROMPT:
            hidden = drafted_by_hand(head, batch, t, 1)[0]
            right += int(head.logits(hidden).argmax() == batch.token_ids[0, t + 2])
    assert float(losses.agreement[0]) == pytest.approx(right / (LENGTH - PROMPT))


def test_regression_joins_the_law_for_eagle_1():
    head, batch = head_of(1), batch_of()
    both = recipe_of(head, 1, regress=1.0, ce_weight=0.1).loss(batch)
    expected = 0.1 * both.parts["loss0"] + both.parts["regress0"]
    torch.testing.assert_close(both.total.detach(), expected)


def test_losses_agree_with_their_definitions():
    torch.manual_seed(0)
    target, head = torch.randn(5, 7, dtype=torch.float64), torch.randn(5, 7, dtype=torch.float64)
    p, q = target.softmax(-1), head.softmax(-1)
    entropy = -(p * p.log()).sum(-1).mean()
    cross_entropy, kl, tv, lk = (LOSSES[name] for name in ("ce", "kl", "tv", "lk"))
    torch.testing.assert_close(cross_entropy(target, head), -(p * q.log()).sum(-1).mean())
    torch.testing.assert_close(kl(target, head), cross_entropy(target, head) - entropy)
    torch.testing.assert_close(tv(target, head), 1 - torch.minimum(p, q).sum(-1).mean())
    torch.testing.assert_close(lk(target, head), -torch.minimum(p, q).sum(-1).log().mean())
    assert float(kl(target, target)) == pytest.approx(0, abs=1e-12)
    assert set(LOSSES) == {"ce", "kl", "tv", "lk", "lk_hybrid", "coupled"}
