"""What each row of a DSpark block is told and taught, held against the head written out one block at a time."""

import pytest
import torch
from torch import Tensor

from paceline.methods.dspark.head import DSparkConfig, DSparkHead
from paceline.methods.dspark.recipe import DSparkLoss, DSparkRecipe
from tests.methods.heads import block_states, told

from .test_dflash_recipe import LAST, LENGTH, ROWS, SIZE, VD, Batch, E, V, batch_of


def head_of(kind: str = "rnn") -> DSparkHead:
    torch.manual_seed(1)
    more = {"num_hidden_layers": 2, "qk_norm": True, "markov_rank": 4, "markov_head_type": kind}
    module = DSparkHead(DSparkConfig(E, (1, 3), VD, V, 16, 4, 2, 4, 15, SIZE, **more), torch.arange(VD)).double().eval()
    torch.nn.init.normal_(module.markov_head.markov_w2.weight)
    return module.attach(torch.randn(V, E, dtype=torch.float64), torch.randn(V, E, dtype=torch.float64))


def loss_by_hand(head: DSparkHead, batch: Batch, decay: float) -> tuple[Tensor, list[float]]:
    """The loss of blocks at every place, and the share of right drafts by row."""
    total, shares = torch.zeros((), dtype=torch.float64), list[float]()
    states = torch.cat([batch.states[layer] for layer in head.config.states], -1)
    for row in range(1, SIZE):
        values, right = [], []
        for text in range(len(batch.token_ids)):
            for anchor in range(1, LENGTH - row):
                label = anchor + row
                if batch.is_answer[text, anchor + 1] and batch.is_answer[text, label]:
                    ids = batch.token_ids[text].tolist()
                    hidden = block_states(head, states[text : text + 1], ids[: anchor + 1])
                    logits = told(head, hidden, ids[anchor:label])
                    teacher = (batch.states[LAST][text, label - 1] @ ROWS.T).softmax(-1)
                    values.append(-(teacher * logits.log_softmax(-1)).sum())
                    right.append(float(logits.argmax() == ids[label]))
        total = total + decay ** (row - 1) * torch.stack(values).mean()
        shares.append(sum(right) / len(right))
    return total, shares


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_the_loss_is_that_of_single_blocks(kind):
    head, batch = head_of(kind), batch_of()
    found = DSparkRecipe(head, ROWS, DSparkLoss(anchors=99, decay=0.7), LAST).loss(batch)
    total, shares = loss_by_hand(head, batch, 0.7)
    torch.testing.assert_close(found.total, total)
    assert found.agreement.tolist() == pytest.approx(shares)


@pytest.mark.parametrize("off", [-1, 1])
def test_a_mutant_that_is_told_another_token_is_caught(off, monkeypatch):
    head, batch, real = head_of(), batch_of(), DSparkHead.before
    monkeypatch.setattr(DSparkHead, "before", lambda self, tokens: real(self, tokens.roll(off, -1)))
    found = DSparkRecipe(head, ROWS, DSparkLoss(anchors=99, decay=0.7), LAST).loss(batch)
    assert (found.total - loss_by_hand(head, batch, 0.7)[0]).abs().item() > 1e-6
