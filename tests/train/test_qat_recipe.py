"""QAT's losses, compared with rounds read one by one; and the draft that comes out, as it drafts."""

import copy

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from paceline import LLM, Fixed, Ratio, SamplingParams, SelfQuantized
from paceline.core.interfaces import DraftBudget
from paceline.errors import IncompatibleModels
from paceline.hf.load import KV_CACHE
from paceline.methods.self_int4.recipe import QatLoss, QatRecipe, QatShape, faked
from paceline.target import wrap_model
from paceline.train.losses import LOSSES
from paceline.train.rounds import Rounds, rounds_of
from tests.helpers import NO_EOS, loaded, prompt, sequence
from tests.quant.helpers import dequantize_int4
from tests.tiny import tiny_model
from tests.train.test_space_recipe import TEXTS, batch_of
from tests.train.toy import descend

WINDOW = 3


def recipe(name="llama", bits=2, loss="kl", stir=0.05, seed=0, **how) -> QatRecipe:
    plain = tiny_model(name).requires_grad_(False)
    student, fakes = faked(plain, QatShape(bits=bits, train=how.pop("train", "weights")))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in fakes.parameters():
            parameter.add_(stir * torch.randn_like(parameter))
    made = QatRecipe(plain, student, fakes, QatLoss(loss or "token", window=WINDOW, **how))
    made.module.eval()
    return made


def rounded_alone(made: QatRecipe, name="llama") -> nn.Module:
    """The model with the packed draft's weights in plain layers."""
    model, draft = copy.deepcopy(tiny_model(name)), made.result(loaded(), None)[0]  # type: ignore[arg-type]
    with torch.no_grad():
        for index, layer in enumerate(model.base_model.layers):
            for linear in draft.config.linears:
                codes, params = draft.packable(index, linear)
                layer.get_submodule(linear).weight.copy_(dequantize_int4(codes, params, draft.config.group_size))
    return model


def by_hand(made: QatRecipe, name="llama", phase: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor], list[int]]:
    """Draft's and target's logits and the depth of each supervised token: the draft reads its round alone."""
    plain, student = tiny_model(name), rounded_alone(made, name)
    said, taught, depths = [], [], []
    for p, a in TEXTS:
        text = p + a
        logits = plain(torch.tensor([text])).logits[0]
        for index, t in enumerate(range(len(p) - 1, len(text) - 1)):
            depth = index % WINDOW if not phase else (index + phase) % WINDOW if index + phase >= WINDOW else index
            start = t - depth
            cache = DynamicCache()
            if start and made.settings.context == "target":
                plain(torch.tensor([text[:start]]), use_cache=True, **{KV_CACHE: cache})
            own = text[start : t + 1] if made.settings.context == "target" else text[: t + 1]
            said.append(student(torch.tensor([own]), use_cache=True, **{KV_CACHE: cache}).logits[0, -1])
            taught.append(logits[t])
            depths.append(depth)
    return said, taught, depths


@pytest.mark.diagonal
@pytest.mark.parametrize("name", ["llama", "qwen2-sliding"])
@pytest.mark.parametrize("context", ["target", "own"])
@torch.no_grad()
def test_every_supervised_token_is_that_of_a_draft_over_the_targets_cache(context, name):
    made = recipe(name, context=context)
    said, taught, depths = by_hand(made, name)
    got = made.loss(batch_of())
    assert float(got.total) == pytest.approx(float(LOSSES["kl"](torch.stack(taught), torch.stack(said))), rel=1e-4)
    labels = [token for p, a in TEXTS for token in a]
    right = [float(s.argmax() == y) for s, y in zip(said, labels, strict=True)]
    for depth in range(WINDOW):
        at = [r for r, d in zip(right, depths, strict=True) if d == depth]
        assert float(got.agreement[depth]) == pytest.approx(sum(at) / len(at))
    p, q = torch.stack(taught).softmax(-1), torch.stack(said).softmax(-1)
    assert float(got.parts["acceptance"]) == pytest.approx(1 - float((p - q).abs().sum(-1).mean()) / 2, abs=1e-5)


@pytest.mark.parametrize("mutant", ["own text", "target's tokens of the round", "other rounds"])
@torch.no_grad()
def test_mutants_that_see_other_keys_are_caught(monkeypatch, mutant):
    made, true = recipe(), Rounds.visible
    said, taught, _ = by_hand(made)
    if mutant == "own text":
        made.settings = QatLoss(window=WINDOW, context="own")

    def visible(rounds, width):
        seen = true(rounds, width)
        if mutant == "target's tokens of the round":
            seen[:, :, :width] |= torch.arange(width) == rounds.start[:, :, None]
        elif mutant == "other rounds":
            seen[:, :, width:] |= (rounds.column >= 0)[:, None, :] & (
                rounds.column[:, None, :] <= rounds.column[..., None]
            )
        return seen

    monkeypatch.setattr(Rounds, "visible", visible)
    expected = float(LOSSES["kl"](torch.stack(taught), torch.stack(said)))
    assert float(made.loss(batch_of()).total) != pytest.approx(expected, rel=1e-3)


def test_rounds_begin_anywhere_and_hold_every_supervised_token_once():
    answers = batch_of().is_answer
    for phase in range(WINDOW):
        rounds = rounds_of(answers, WINDOW, torch.tensor([phase, phase]))
        for row, (p, a) in enumerate(TEXTS):
            columns = rounds.column[row][rounds.counts[row]].tolist()
            assert columns == list(range(len(p) - 1, len(p) + len(a) - 1))
            depths = rounds.depth[row][rounds.counts[row]].tolist()
            first = WINDOW - phase
            assert depths == [i if i < first else (i - first) % WINDOW for i in range(len(columns))]


@pytest.mark.parametrize(("loss", "train"), [("kl", "weights"), (None, "weights"), ("lk_hybrid", "grids")])
def test_training_moves_the_layers_alone_and_more_drafts_stand(loss, train):
    made = recipe(loss=loss, stir=0.0, train=train)
    before = [p.clone() for p in made._plain.parameters()]
    got = descend(made, batch_of(), 25, lr=1e-2)
    assert float(got[-1].total.detach()) < 0.9 * float(got[0].total.detach())
    if loss is not None:
        assert float(got[-1].parts["acceptance"]) > float(got[0].parts["acceptance"])
    assert all(torch.equal(x, y) for x, y in zip(before, made._plain.parameters(), strict=True))


@pytest.mark.parametrize("weights", [None, "int8"])
def test_the_packed_draft_says_what_the_recipe_says(weights):
    """What is drafted over the target's cache; of an INT8 target too, whose rounding the draft never sees."""
    made = recipe(bits=4)
    draft = made.result(loaded(), None)[0]  # type: ignore[arg-type]
    drafter = SelfQuantized(weights=draft, lm_head="shared")
    llm = LLM(tiny_model("llama"), drafter=drafter, policy=Fixed(WINDOW), verifier=Ratio(), weights=weights)
    assert drafter.report is not None
    assert drafter.report.num_quantized == 12  # without the down projections, which have 48 inputs
    (p, a), *_ = TEXTS
    seq = sequence(llm.loaded, [*p, a[0]], SamplingParams(temperature=1.0, max_tokens=20), eos_ids=NO_EOS)
    seq.slot = llm.runner.cache.allocate()
    llm.runner.extend_cache(seq.slot, seq.token_ids[:-1])
    drafted = drafter.propose([seq], [DraftBudget(WINDOW, WINDOW)])
    tokens = drafted.tree.token_ids[0].tolist()
    student, plain = rounded_alone(made), tiny_model("llama")
    apart = []
    for drafts in (student, plain):
        cache = DynamicCache()
        with torch.no_grad():
            plain(torch.tensor([p]), use_cache=True, **{KV_CACHE: cache})
            probs = drafts(torch.tensor([tokens[:-1]]), use_cache=True, **{KV_CACHE: cache}).logits[0].softmax(-1)
        assert drafted.q is not None
        apart.append(float((drafted.q[0, : len(probs)] - probs).abs().sum(-1).max()))
    assert apart[0] < 0.1 < 0.2 < apart[1]  # the kernels multiply in bfloat16
    llm.runner.cache.lengths[seq.slot] = 0


def test_answers_stay_those_of_the_target_with_a_trained_draft():
    draft = recipe(bits=3).result(loaded(), None)[0]  # type: ignore[arg-type]
    llm = LLM(tiny_model("llama"), drafter=SelfQuantized(weights=draft), policy=Fixed(3))
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=16, seed=5, ignore_eos=True)
        drafted, plain = llm.generate(prompt(9), params)[0], llm.plain().generate(prompt(9), params)[0]
        assert drafted.token_ids == plain.token_ids
        assert sum(r.num_drafted for r in drafted.rounds) > 0


def test_a_draft_of_another_shape_is_refused():
    draft = recipe().result(loaded(), None)[0]  # type: ignore[arg-type]
    for other in ({"hidden_size": 64, "head_dim": 16}, {"num_hidden_layers": 3}):
        with pytest.raises(IncompatibleModels):
            LLM(wrap_model(tiny_model("llama", **other)), drafter=SelfQuantized(weights=draft))
