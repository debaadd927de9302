"""Recipes of the prediction heads: their losses token by token; what is learnt is what the drafter asks for."""

import pytest
import torch
from torch import nn

from paceline import SamplingParams
from paceline.methods.dflash.drafter import DFlash
from paceline.methods.dflash.recipe import DFlashLoss, DFlashRecipe
from paceline.methods.dspark.drafter import DSpark
from paceline.methods.dspark.recipe import DSparkLoss, DSparkRecipe
from paceline.methods.eagle.drafter import Eagle
from paceline.methods.eagle.recipe import EagleLoss, EagleRecipe
from paceline.methods.parallel.drafter import Blockwise, Medusa
from paceline.methods.parallel.recipe import ParallelLoss, ParallelRecipe
from paceline.target import ModelRunner
from paceline.train.recipe import Batch
from tests.helpers import loaded, oracle, prompt, run, sequence
from tests.methods.heads import SOME, attached, blockwise, last_states, medusa, random_head
from tests.tiny import tiny_model

TEXTS = [(prompt(6, 1), prompt(9, 2)), (prompt(3, 3), prompt(5, 4))]
"""Prompts and answers."""
DOUBLE = torch.float64
TARGET = loaded("llama", DOUBLE)


def batch_of(texts, dtype=DOUBLE) -> Batch:
    """As training makes it: padded at the end, no state at an answer's last token."""
    width = max(len(p) + len(a) for p, a in texts)
    ids, states = torch.zeros(len(texts), width, dtype=torch.long), torch.zeros(len(texts), width, 32, dtype=dtype)
    answers = torch.zeros(len(texts), width, dtype=torch.bool)
    for row, (p, a) in enumerate(texts):
        length = len(p) + len(a)
        ids[row, :length] = torch.tensor(p + a)
        states[row, : length - 1] = last_states(loaded("llama", dtype), p + a)[:-1]
        answers[row, len(p) : length] = True
    return Batch(ids, {2: states}, answers)


def rows_of(ids=SOME, dtype=DOUBLE) -> torch.Tensor:
    return tiny_model("llama", dtype).get_output_embeddings().weight.detach()[ids]


def one_by_one(probs_of, depth: int, soft: bool, shift: int = 2) -> tuple[list[float], list[float]]:
    """Mean loss and agreement of each depth, token by token; probs_of(p + a, t, i): the distribution of x_{t+2+i}."""
    losses, agreement = [], []
    for i in range(depth):
        values, right, supervised = [], 0, 0
        for p, a in TEXTS:
            text = p + a
            states = last_states(TARGET, text)
            for t in range(len(text)):
                at = t + shift + i
                if not len(p) <= at < len(text):
                    continue
                supervised += 1
                if text[at] not in SOME:
                    continue
                probs, label = probs_of(text, t, i), SOME.tolist().index(text[at])
                teacher = (rows_of() @ states[at - 1]).softmax(-1) if soft else nn.functional.one_hot(
                    torch.tensor(label), len(SOME)
                )  # fmt: skip
                values.append(float(-(teacher * probs.log()).sum()))
                right += int(probs.argmax()) == label
        losses.append(sum(values) / len(values))
        agreement.append(right / supervised)
    return losses, agreement


def is_right(recipe, probs_of, depth: int, soft: bool, shift: int = 2) -> bool:
    with torch.no_grad():
        got = recipe.loss(batch_of(TEXTS))
    losses, agreement = one_by_one(probs_of, depth, soft, shift)
    weights = torch.tensor([getattr(recipe, "decay", recipe.settings.decay) ** i for i in range(depth)], dtype=DOUBLE)
    expected = (weights * torch.tensor(losses, dtype=DOUBLE)).sum() / weights.sum()
    parts = [float(got.parts[f"loss{i}"]) for i in range(depth)]
    same = parts == pytest.approx(losses) and float(got.total) == pytest.approx(float(expected))
    return same and got.agreement.tolist() == pytest.approx(agreement)


@pytest.mark.diagonal
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("make", [medusa, blockwise])
def test_losses_of_parallel_heads(make, soft):
    """Head i at f_t learns x_{t+2+i}; one column off would be another loss."""
    head = attached(make(TARGET, 3, SOME), TARGET)
    recipe = ParallelRecipe(head, rows_of(), ParallelLoss("ce" if soft else "token"), 2)

    def probs_of(text, t, i):
        with torch.no_grad():
            return head.logits(head.hidden(last_states(TARGET, text)[t], i), i).softmax(-1)

    assert is_right(recipe, probs_of, 3, soft)
    assert not is_right(recipe, probs_of, 3, soft, shift=1)
    assert not is_right(recipe, probs_of, 3, soft, shift=3)


CASES = {
    "medusa": (medusa, Medusa, lambda h, r: ParallelRecipe(h, r, ParallelLoss("token"), 2)),
    "blockwise": (blockwise, Blockwise, lambda h, r: ParallelRecipe(h, r, ParallelLoss("token", one_head=True), 2)),
    "dflash": (
        lambda t: random_head(t, "dflash", draft_vocab=t.vocab_size, states=(2,)),
        DFlash,
        lambda h, r: DFlashRecipe(h, r, DFlashLoss("token", anchors=99), 2),
    ),
    "dspark": (
        lambda t: random_head(t, "dspark", draft_vocab=t.vocab_size, states=(2,)),
        DSpark,
        lambda h, r: DSparkRecipe(h, r, DSparkLoss("token", anchors=99), 2),
    ),
    "mtp": (
        lambda t: random_head(t, "mtp", draft_vocab=t.vocab_size),
        Eagle,
        lambda h, r: EagleRecipe(h, r, EagleLoss("token"), 2),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_learnt_is_what_is_drafted(name):
    """Heads that know one sampled answer by heart draft it: recipe and drafter mean the same columns."""
    make, drafter, recipe_of = CASES[name]
    target, params = loaded(), SamplingParams(temperature=1.5, max_tokens=25)
    answer = oracle(target, prompt(8), params).output_ids
    assert len(set(answer)) > 12
    head, batch = attached(make(target), target), batch_of([(prompt(8), answer)], torch.float32)
    recipe = recipe_of(head, rows_of(slice(None), torch.float32))
    descent = torch.optim.AdamW(head.parameters(), 1e-2, weight_decay=0)
    torch.manual_seed(0)
    for _ in range(60 if name == "mtp" else 130):
        descent.zero_grad()
        recipe.loss(batch).total.backward()
        descent.step()
    agreement = recipe.loss(batch).agreement if name != "blockwise" else torch.ones(1)
    assert (agreement > 0.9).all()
    (seq,) = run(ModelRunner(target, 1), drafter(head), [sequence(target, prompt(8), params)], 3, 12)
    assert seq.output_ids == answer
    assert sum(r.num_accepted for r in seq.rounds) > 0.8 * sum(r.num_drafted for r in seq.rounds)


def test_one_head_a_batch():
    head = attached(blockwise(TARGET, 3, SOME), TARGET)
    recipe = ParallelRecipe(head, rows_of(), ParallelLoss("token", one_head=True), 2)
    torch.manual_seed(0)
    drawn = set()
    for _ in range(12):
        head.zero_grad()
        made = recipe.loss(batch_of(TEXTS))
        made.total.backward()
        (one,) = [i for i in range(3) if head.blocks[i].up_proj.weight.grad is not None]
        assert made.agreement.isnan().tolist() == [i != one for i in range(3)]
        assert set(made.parts) == {f"loss{one}"}
        drawn.add(one)
    assert drawn == {0, 1, 2}
    assert not recipe.module.eval() or recipe.loss(batch_of(TEXTS)).agreement.isfinite().all()


def test_a_batch_without_supervised_tokens_has_no_loss():
    short = batch_of([(prompt(4), [3])])  # token 3 is not drafted
    heads = attached(medusa(TARGET, 2, SOME), TARGET), attached(random_head(TARGET, "mtp"), TARGET)
    for recipe in (
        ParallelRecipe(heads[0], rows_of(), ParallelLoss("token"), 2),
        EagleRecipe(heads[1], rows_of(heads[1].draft_ids), EagleLoss("token", 2), 2),
    ):
        made = recipe.loss(short)
        made.total.backward()
        assert float(made.total) == 0
        assert made.agreement.tolist() == [0, 0]
