"""Distillation's losses, compared with texts read one by one; the model that comes out, and what it is made from."""

import copy
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.errors import ConfigError
from paceline.llm import LLM
from paceline.methods.draft_model import recipe as file
from paceline.methods.draft_model.drafter import DraftModel
from paceline.methods.draft_model.recipe import DistillLoss, DistillRecipe, fewer_layers
from paceline.target import wrap_model
from paceline.train.artefact import save_draft
from paceline.train.losses import LOSSES
from tests.helpers import tokenizer
from tests.tiny import tiny_model
from tests.train.test_space_recipe import TEXTS, batch_of
from tests.train.toy import descend

WINDOW = 3


def recipe(name="llama", loss="kl", layers=1, **how) -> DistillRecipe:
    plain = tiny_model(name).requires_grad_(False)
    draft = fewer_layers(plain, layers, "first").requires_grad_(True)
    made = DistillRecipe(plain, draft, DistillLoss(loss or "token", window=WINDOW, **how))
    made.module.eval()
    return made


def mean_apart(made, texts: list[tuple[list[int], int]]) -> float:
    """KL of the last `count` columns' distributions, each text read by itself."""
    taught, said = [], []
    for text, count in texts:
        ids = torch.tensor([text])
        taught.append(made._plain(ids).logits[0, -count:])
        said.append(made.module(ids).logits[0, -count:])
    return float(LOSSES["kl"](torch.cat(taught), torch.cat(said)))


@torch.no_grad()
def test_every_supervised_token_is_what_reading_the_answer_says():
    made = recipe()
    got = made.loss(batch_of())
    assert float(got.total) == pytest.approx(mean_apart(made, [((p + a)[:-1], len(a)) for p, a in TEXTS]), rel=1e-4)
    labels = made.module(torch.tensor([TEXTS[0][0] + TEXTS[0][1]])).logits[0].argmax(-1)
    alone = made.loss(batch_of(TEXTS[:1]))
    right = [int(labels[len(TEXTS[0][0]) - 1 + i]) == token for i, token in enumerate(TEXTS[0][1])]
    assert alone.agreement.tolist() == pytest.approx([sum(right) / len(right)] * WINDOW)


@pytest.mark.parametrize("name", ["llama", "qwen2-sliding"])
@pytest.mark.parametrize("mutant", [None, "drawn from another", "one place off"])
@torch.no_grad()
def test_drawn_rounds_are_the_drafts_own_and_their_targets(monkeypatch, name, mutant):
    """With the most probable token for a sample, a round is the draft's greedy continuation."""
    made = recipe(name, on_policy=1.0, rounds=2)
    made.module.train()
    kept, texts = {}, list[tuple[list[int], int]]()
    monkeypatch.setattr(torch, "multinomial", lambda probs, count: probs.argmax(-1, keepdim=True))
    true = DistillRecipe._draw

    def draw(recipe, ids, drawn, cache):
        if mutant == "drawn from another":
            recipe._draft = fewer_layers(tiny_model(name, seed=1), 1, "first")
        fed = true(recipe, ids, drawn, cache)
        recipe._draft = recipe.module
        kept["fed"], kept["drawn"] = (fed.roll(1, 1) if mutant == "one place off" else fed), drawn
        return kept["fed"]

    monkeypatch.setattr(DistillRecipe, "_draw", draw)
    got = made.loss(batch_of())
    fed, drawn = kept["fed"], kept["drawn"]
    right = True
    for row, (p, a) in enumerate(TEXTS):
        for root in sorted({int(s) for s in drawn.start[row] if s >= 0}):
            text = (p + a)[: root + 1]
            mine = drawn.start[row] == root
            for _ in range(WINDOW - 1):
                text.append(int(made.module(torch.tensor([text])).logits[0, -1].argmax()))
            right &= text[root:] == fed[row][mine].tolist()
            texts.append((text, WINDOW))
    assert right == (mutant is None)
    assert (float(got.total) == pytest.approx(mean_apart(made, texts), rel=1e-3)) == (mutant is None)


def test_drawing_takes_every_root_at_most_once_and_leaves_answers_alone():
    drawn = file.drawn_rounds(batch_of().is_answer, WINDOW, 20)
    for row, (p, a) in enumerate(TEXTS):
        roots = sorted({int(s) for s in drawn.start[row] if s >= 0})
        assert roots == list(range(len(p) - 1, len(p) + len(a) - 1))
        assert int(drawn.counts[row].sum()) == WINDOW * len(roots)


@pytest.mark.parametrize(("loss", "how"), [("kl", {}), ("tv", {}), ("lk_hybrid", {"on_policy": 0.5}), (None, {}),
                                           ("kl", {"label_weight": 0.3})])  # fmt: skip
def test_training_makes_more_drafts_accepted_and_leaves_the_target(loss, how):
    torch.manual_seed(0)
    made = recipe(loss=loss, **how)
    before = [p.clone() for p in made._plain.parameters()]
    got = descend(made, batch_of(), 12, lr=5e-3)
    name = "token" if loss is None else "acceptance"
    better = got[-1].parts[name] - got[0].parts[name]
    assert float(better) > 0.05 if loss is not None else float(better) < -0.1
    assert all(torch.equal(x, y) for x, y in zip(before, made._plain.parameters(), strict=True))


def test_lk_hybrid_is_kl_far_off_and_tv_near():
    torch.manual_seed(0)
    target, head = torch.randn(7, 11), torch.randn(7, 11)
    expected = 0.0
    for t, h in zip(target, head, strict=True):
        p, q = t.softmax(-1), h.softmax(-1)
        stands = float(torch.minimum(p, q).sum())
        weight = 2.718281828 ** (-3 * stands)
        expected += (weight * float((p * (p / q).log()).sum()) + (1 - weight) * (1 - stands)) / 7
    assert float(LOSSES["lk_hybrid"](target, head)) == pytest.approx(expected, rel=1e-4)
    head.requires_grad_(True)
    LOSSES["lk_hybrid"](target, head).backward()
    assert bool(head.grad.isfinite().all())


def test_fewer_layers():
    kinds = ["sliding_attention", "full_attention"] * 2
    plain = tiny_model("qwen2-sliding", num_hidden_layers=4, layer_types=kinds)
    ids = torch.randint(3, 97, (1, 12))
    with torch.no_grad():
        assert torch.equal(fewer_layers(plain, 4, "first")(ids).logits, plain(ids).logits)
    spaced = fewer_layers(plain, 3, "spaced")
    assert spaced.config.layer_types == ["sliding_attention", "sliding_attention", "full_attention"]
    assert [layer.self_attn.layer_idx for layer in spaced.base_model.layers] == [0, 1, 2]
    weight = "self_attn.q_proj.weight"
    for new, old in enumerate((0, 2, 3)):
        ours, theirs = spaced.base_model.layers[new], plain.base_model.layers[old]
        assert torch.equal(ours.get_parameter(weight), theirs.get_parameter(weight))
        assert ours.get_parameter(weight) is not theirs.get_parameter(weight)
    assert len(plain.base_model.layers) == 4
    with pytest.raises(ConfigError, match="num_layers"):
        fewer_layers(plain, 5, "spaced")


def test_the_folder_is_an_ordinary_model_and_drafts(tmp_path):
    target = wrap_model(tiny_model("llama"), tokenizer(), "tiny")
    draft = copy.deepcopy(recipe().module)
    save_draft(tmp_path / "draft", draft, target, {"base_model": "someone/tiny", "data": {"answers": 3}})
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype=torch.float32)
    ids = torch.tensor([TEXTS[0][0]])
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, draft(ids).logits, atol=0.15, rtol=0.05)  # kept in bfloat16
    assert "A draft model for tiny" in (tmp_path / "draft" / "README.md").read_text()
    assert json.loads((tmp_path / "draft" / "training.json").read_text())["target"]["fingerprint"] == target.fingerprint
    llm = LLM(target, drafter=DraftModel(str(tmp_path / "draft"), dtype="float32"))
    assert llm.generate(TEXTS[0][0])[0].token_ids == llm.plain().generate(TEXTS[0][0])[0].token_ids
    with pytest.raises(ConfigError, match="exists already"):
        save_draft(tmp_path / "draft", draft, target, {})
    with torch.no_grad():
        next(draft.parameters()).fill_(float("nan"))
    with pytest.raises(ConfigError, match="not finite"):
        save_draft(tmp_path / "other", draft, target, {})


def test_settings_out_of_range_are_refused():
    for wrong in ({"on_policy": 1.5}, {"rounds": 0}, {"name": "token", "on_policy": 0.5}):
        with pytest.raises(ConfigError):
            DistillLoss(**wrong)
