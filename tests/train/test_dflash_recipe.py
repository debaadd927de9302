"""What each row of a block reads and is taught, held against the head written out one block at a time."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline.methods.dflash.head import DFlashConfig, DFlashHead
from paceline.methods.dflash.recipe import DFlashLoss, DFlashRecipe, JetSpecLoss
from paceline.train import head_recipe as common
from paceline.train.recipe import Batch
from tests.methods.heads import block_of

E, V, VD, LAST = 8, 20, 12, 4
PROMPT, LENGTH, SIZE = 3, 9, 4
ROWS = torch.randn(VD, E, dtype=torch.float64, generator=torch.Generator().manual_seed(0))  # of the target's output


def head_of(**options) -> DFlashHead:
    torch.manual_seed(1)
    config = DFlashConfig(E, (1, 3), VD, V, 16, 4, 2, 4, 15, SIZE, num_hidden_layers=2, qk_norm=True, **options)
    module = DFlashHead(config, torch.arange(VD)).double().eval()
    return module.attach(torch.randn(V, E, dtype=torch.float64), torch.randn(V, E, dtype=torch.float64))


def batch_of(rows: int = 2, vocab: int = VD) -> Batch:
    torch.manual_seed(7)
    states = {layer: torch.randn(rows, LENGTH, E, dtype=torch.float64) for layer in (1, 3, LAST)}
    is_answer = (torch.arange(LENGTH) >= PROMPT).repeat(rows, 1)
    is_answer[-1, LENGTH - 2 :] = False  # a shorter text
    return Batch(torch.randint(0, vocab, (rows, LENGTH)), states, is_answer)


def loss_by_hand(head: DFlashHead, batch: Batch, decay: float, reads: bool = False) -> tuple[Tensor, list[float]]:
    """The loss of blocks at every place, and the share of right drafts by row. reads: it knows all tokens before."""
    total, shares = torch.zeros((), dtype=torch.float64), list[float]()
    states = torch.cat([batch.states[layer] for layer in head.config.states], -1)
    for row in range(1, SIZE):
        values, right, count = [], 0, 0
        for text in range(len(batch.token_ids)):
            for anchor in range(1, LENGTH - 1):
                label = anchor + row
                if not batch.is_answer[text, anchor + 1] or label >= LENGTH or not batch.is_answer[text, label]:
                    continue
                count += 1
                token = int(batch.token_ids[text, label])
                if token >= VD:
                    continue
                known, path = batch.token_ids[text, :label].split([anchor + 1, row - 1])
                path = path.tolist() if reads else ()
                logits = block_of(head, states[text : text + 1], known.tolist(), path)[row - 1]
                teacher = (batch.states[LAST][text, label - 1] @ ROWS.T).softmax(-1)
                values.append(-(teacher * logits.log_softmax(-1)).sum())
                right += int(logits.argmax()) == token
        total = total + decay ** (row - 1) * torch.stack(values).mean()
        shares.append(right / count)
    return total, shares


@pytest.mark.parametrize("vocab", [VD, V])
def test_the_loss_is_that_of_single_blocks(vocab):
    """Whatever else is in the batch, with tokens that the head cannot draft."""
    head, batch = head_of(), batch_of(vocab=vocab)
    found = DFlashRecipe(head, ROWS, DFlashLoss(anchors=99, decay=0.7), LAST).loss(batch)
    total, shares = loss_by_hand(head, batch, 0.7)
    torch.testing.assert_close(found.total, total)
    assert found.agreement.tolist() == pytest.approx(shares)


def jetspec_loss(head: DFlashHead, batch: Batch, alone: float = 0.0):
    return DFlashRecipe(head, ROWS, JetSpecLoss(anchors=99, decay=0.7, alone=alone), LAST).loss(batch)


@pytest.mark.parametrize("vocab", [VD, V])
def test_causal_blocks_learn_behind_true_tokens_and_behind_masks(vocab):
    head, batch = head_of(causal=True), batch_of(vocab=vocab)
    found, (total, shares) = jetspec_loss(head, batch), loss_by_hand(head, batch, 0.7, reads=True)
    torch.testing.assert_close(found.total, total)
    assert found.agreement.tolist() == pytest.approx(shares)
    both, first = jetspec_loss(head, batch, 0.5), found.parts["loss0"]
    alone = loss_by_hand(head, batch, 0.7)[0] - first  # whose first row reads no mask, and counts once
    torch.testing.assert_close(both.total, total + 0.5 * alone)


@pytest.mark.parametrize("mutant", [torch.ones_like, lambda sees: sees | sees.roll(1, 0)])
def test_mutants_of_what_a_causal_row_sees_are_caught(mutant):
    head, batch = head_of(causal=True), batch_of()
    recipe = DFlashRecipe(head, ROWS, JetSpecLoss(anchors=99, decay=0.7, alone=0.0), LAST)
    recipe._block = replace(recipe._block, sees=mutant(recipe._block.sees))
    assert (recipe.loss(batch).total - loss_by_hand(head, batch, 0.7, reads=True)[0]).abs().item() > 1e-6


@pytest.mark.parametrize("off", [-1, 1])
def test_a_mutant_whose_labels_are_shifted_is_caught(monkeypatch, off):
    head, batch, real = head_of(), batch_of(), common.shifted
    monkeypatch.setattr(common, "shifted", lambda x, by: real(x, by + off) if x.dtype == torch.long else real(x, by))
    found = DFlashRecipe(head, ROWS, DFlashLoss(anchors=99, decay=0.7), LAST).loss(batch)
    assert (found.total - loss_by_hand(head, batch, 0.7)[0]).abs().item() > 1e-6


def test_a_mutant_that_reads_the_state_of_its_anchor_is_caught(monkeypatch):
    head, batch, real = head_of(), batch_of(), DFlashHead.context
    moved = lambda self, states, positions: real(self, states.roll(-1, 1), positions)  # noqa: E731
    monkeypatch.setattr(DFlashHead, "context", moved)
    found = DFlashRecipe(head, ROWS, DFlashLoss(anchors=99, decay=0.7), LAST).loss(batch)
    assert (found.total - loss_by_hand(head, batch, 0.7)[0]).abs().item() > 1e-6


def test_anchors():
    """Distinct, ascending, each before a supervised token and behind a state; the same in every evaluation."""
    recipe, batch = DFlashRecipe(head_of(), ROWS, DFlashLoss(anchors=3), LAST), batch_of()
    first, again = recipe._anchors(batch)[0], recipe._anchors(batch)[0]
    assert torch.equal(first, again)
    recipe.head.train()
    seen = set()
    for _ in range(40):
        anchors, mask = recipe._anchors(batch)
        assert (anchors.diff(dim=1) > 0).all()
        assert mask.sum(1).tolist() == [3, 3]
        assert batch.is_answer.gather(1, anchors + 1).all()
        assert anchors.min() >= 1
        seen |= set(anchors[0].tolist())
    assert seen == set(range(PROMPT - 1, LENGTH - 1))


def test_where_nothing_is_supervised_the_loss_is_zero():
    head, batch = head_of(), batch_of()
    empty = Batch(batch.token_ids, batch.states, torch.zeros_like(batch.is_answer))
    found = DFlashRecipe(head, ROWS, DFlashLoss(), LAST).loss(empty)
    found.total.backward()
    assert found.total.item() == 0
    assert found.agreement.isnan().all()
