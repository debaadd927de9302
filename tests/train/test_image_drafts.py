"""QAT and distillation on prompts with images: all losses are of the engine's own target and draft."""

import json

import pytest
import torch

from paceline import LLM, Fixed, Ratio, SamplingParams, SelfQuantized
from paceline.core.interfaces import DraftBudget
from paceline.core.tree import TokenTree
from paceline.errors import ConfigError
from paceline.hf.halves import text_half
from paceline.measure.prompts import PromptLine
from paceline.methods.draft_model.drafter import DraftModel
from paceline.methods.draft_model.recipe import DistillLoss, DistillRecipe, fewer_layers
from paceline.methods.self_int4.recipe import QatLoss, QatRecipe, QatShape, faked
from paceline.target import ModelRunner, wrap_model
from paceline.train import images
from paceline.train.images import BatchReader
from paceline.train.losses import LOSSES
from paceline.train.prepare import ImageChat, encode_line
from paceline.train.recipe import Batch
from tests.train.toy import descend
from tests.vision.families import make, make_image

WINDOW = 3
ANSWERS = ([20, 31, 42, 25, 36], [50, 41, 32], [22, 24, 26, 28])
SAMPLED = SamplingParams(temperature=1.0, max_tokens=64)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two images of one size, and a third."""
    folder = tmp_path_factory.mktemp("images")
    for index, size in ((1, (32, 32)), (2, (32, 32)), (3, (60, 24))):
        make_image(index, *size).save(folder / f"{index}.png")
    return folder


def chats(files):
    def part(index):
        return {"type": "image", "image": str(files / f"{index}.png")}

    def text(words):
        return {"type": "text", "text": words}

    contents = (
        [part(1), text("what is it")],
        [text("see "), part(2), text(" or "), part(3), text("?")],
        [text("hello")],
    )
    return [[{"role": "user", "content": list(content)}] for content in contents]


def batch_of(runner, files) -> Batch:
    prompts = [encode_line(runner, PromptLine("", 0, {}, chat=tuple(chat))) for chat in chats(files)]
    texts = [one.token_ids + answer for one, answer in zip(prompts, ANSWERS, strict=True)]
    ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
    is_answer = torch.zeros_like(ids, dtype=torch.bool)
    for row, (one, text) in enumerate(zip(prompts, texts, strict=True)):
        ids[row, : len(text)] = torch.tensor(text)
        is_answer[row, len(one.token_ids) : len(text)] = True
    return Batch(ids, {}, is_answer, tuple(one.chat for one in prompts))


class Kept:
    """A loss that keeps the logits [M, V] it was given."""

    def __call__(self, taught, said):
        self.taught, self.said = taught.detach().softmax(-1), said.detach().softmax(-1)
        return LOSSES["kl"](taught, said)


def target_probs(llm: LLM, files) -> torch.Tensor:
    """After each part of each answer, the text read anew by the engine."""
    probs = []
    for chat, answer in zip(chats(files), ANSWERS, strict=True):
        (seq,) = llm.open_request(chat, SAMPLED).seqs
        for count in range(len(answer)):
            ids = seq.prompt_ids + answer[:count]
            llm.runner.images.features.clear()
            llm.runner.prefixes.clear()
            slot = llm.runner.admit(ids, seq.vision)
            llm.runner.prefill(slot, ids, seq.vision)
            probs.append(llm.runner.forward([slot], TokenTree.chain([[ids[-1]]]))[0, 0].softmax(-1))
            llm.runner.cache.release(slot)
    return torch.stack(probs)


def draft_probs(llm: LLM, files) -> torch.Tensor:
    """What the bound drafter says first at each place, the target having read all before it."""
    probs = []
    for chat, answer in zip(chats(files), ANSWERS, strict=True):
        for count in range(len(answer)):
            (seq,) = llm.open_request(chat, SAMPLED).seqs
            seq.token_ids += answer[:count]
            llm.runner.images.features.clear()
            llm.runner.prefixes.clear()
            seq.slot = llm.runner.admit(seq.token_ids, seq.vision)
            llm.runner.prefill(seq.slot, seq.token_ids, seq.vision)
            drafted = llm.decoder.drafter.propose([seq], [DraftBudget(1, 1)])
            probs.append(drafted.q[0, 0])
            llm.decoder.drafter.release([seq.slot])
            llm.runner.cache.release(seq.slot)
    return torch.stack(probs)


def drawable(probs: torch.Tensor, never: frozenset[int]) -> torch.Tensor:
    """Without the placeholder tokens of images, which no drafter draws."""
    probs = probs.clone()
    probs[:, sorted(never)] = 0
    return probs / probs.sum(-1, keepdim=True)


def halves(name: str):
    whole, processor = make(name)
    return whole, wrap_model(whole, processor=processor)


def qat(name: str, window: int = 1, bits: int = 4, **how):
    whole, target = halves(name)
    plain = text_half(whole)
    student, fakes = faked(plain, QatShape(bits=bits))
    kept = Kept()
    made = QatRecipe(plain, student, fakes, QatLoss(window=window, **how), reader=BatchReader(target))
    made._loss = kept
    made.module.eval()
    return made, kept, target


FAMILIES = ["llava", "llava_next", "qwen2_5_vl", "qwen3_vl", "gemma3", "paligemma", "idefics3"]


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_the_teacher_is_what_the_engine_says(name, files):
    made, kept, target = qat(name)
    llm = LLM(target, numerics="fast", max_num_seqs=2, max_model_len=400)
    made.loss(batch_of(llm.runner, files))
    assert float((kept.taught - target_probs(llm, files)).abs().sum(-1).max()) < 1e-3


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "paligemma"])
@torch.no_grad()
def test_the_student_is_the_self_draft(name, files):
    """In rounds of one token a supervised token is the drafter's first token; its kernels multiply in bfloat16."""
    made, kept, target = qat(name)
    drafter = SelfQuantized(weights=made.result(target, files)[0], lm_head="shared")
    llm = LLM(target, drafter=drafter, policy=Fixed(1), verifier=Ratio(), numerics="fast", max_model_len=400)
    made.loss(batch_of(llm.runner, files))
    apart = (drawable(kept.said, llm.runner.banned_token_ids) - draft_probs(llm, files)).abs().sum(-1)
    assert float(apart.max()) < 0.05 < 0.1 < float((kept.taught - kept.said).abs().sum(-1).mean())


@pytest.mark.parametrize("mutant", ["another image", "no features", "column for position", "one way"])
@torch.no_grad()
def test_mutants_of_the_reading_are_caught(monkeypatch, mutant, files):
    made, kept, target = qat({"column for position": "qwen2_5_vl", "one way": "gemma3"}.get(mutant, "llava"))
    llm = LLM(target, numerics="fast", max_num_seqs=2, max_model_len=400)
    batch, true = batch_of(llm.runner, files), images.ImageRows.inputs

    def inputs(rows, model, ids):
        if mutant == "another image":
            object.__setattr__(rows, "features", rows.features.roll(int(rows.is_image[0].sum()), 0))
        elif mutant == "no features":
            object.__setattr__(rows, "features", torch.zeros_like(rows.features))
        given = true(rows, model, ids)
        if mutant == "column for position":
            given["position_ids"] = torch.arange(ids.shape[1]).expand_as(given["position_ids"])
        return given

    monkeypatch.setattr(images.ImageRows, "inputs", inputs)
    if mutant == "one way":
        made_rows = images._rows

        def without(*args):
            rows = made_rows(*args)
            rows.both_ways.zero_()
            return rows

        monkeypatch.setattr(images, "_rows", without)
    made.loss(batch)
    assert float((kept.taught - target_probs(llm, files)).abs().sum(-1).max()) > 1e-2


def distill(name: str, sight: str | None, **how):
    whole, target = halves(name)
    plain = text_half(whole)
    if sight == "none":
        draft, drafted = fewer_layers(plain, 1, "first"), None
    else:
        drafted = fewer_layers(whole, 1, "first")
        draft = text_half(drafted)
        assert drafted.config.text_config.num_hidden_layers == 1 < whole.config.text_config.num_hidden_layers
    processor = None if drafted is None else target.vision.processor
    loaded = wrap_model(drafted or draft, target.tokenizer, processor=processor)
    kept = Kept()
    reader = BatchReader(target, loaded, sight)
    draft.requires_grad_(True)
    made = DistillRecipe(plain, draft, DistillLoss(window=WINDOW, rounds=2, **how), reader=reader, whole=drafted)
    made._loss = kept
    made.module.eval()
    return made, kept, target, loaded


@pytest.mark.parametrize(
    ("name", "sight"),
    [("llava", "shared"), ("llava", "own"), ("llava", "none"), ("qwen2_5_vl", "own"), ("qwen2_5_vl", "none"),
     ("gemma3", "shared")],
)  # fmt: skip
@torch.no_grad()
def test_a_small_draft_reads_what_it_will_read(name, sight, files):
    made, kept, target, loaded = distill(name, sight)
    drafter = DraftModel(loaded, vision=sight)
    llm = LLM(target, drafter=drafter, policy=Fixed(1), verifier=Ratio(), numerics="fast", max_model_len=400)
    made.loss(batch_of(llm.runner, files))
    assert float((kept.taught - target_probs(llm, files)).abs().sum(-1).max()) < 1e-3
    said = drawable(kept.said, llm.runner.banned_token_ids | drafter.runner.banned_token_ids)
    assert float((said - draft_probs(llm, files)).abs().sum(-1).max()) < 1e-3
    assert float((kept.taught - kept.said).abs().sum(-1).mean()) > 0.2


@pytest.mark.parametrize("sight", ["shared", "none"])
@torch.no_grad()
def test_drawn_rounds_stand_at_the_drafts_own_columns(monkeypatch, sight, files):
    """With the most probable token for a sample, a round is what the engine's draft says greedily."""
    made, _, target, loaded = distill("llava", sight, on_policy=1.0)
    made.module.train()
    monkeypatch.setattr(torch, "multinomial", lambda probs, count: probs.argmax(-1, keepdim=True))
    drafter = DraftModel(loaded, vision=sight)
    llm = LLM(target, drafter=drafter, policy=Fixed(WINDOW), verifier=Ratio(), numerics="fast", max_model_len=400)
    found, true = {}, DistillRecipe._draw

    def draw(recipe, read, drawn, cache):
        found["fed"], found["drawn"], found["read"] = true(recipe, read, drawn, cache), drawn, read
        return found["fed"]

    monkeypatch.setattr(DistillRecipe, "_draw", draw)
    made.loss(batch_of(llm.runner, files))
    for row, (chat, answer) in enumerate(zip(chats(files), ANSWERS, strict=True)):
        drawn, begin = found["drawn"], int(found["read"].begins[row])
        for root in sorted({int(s) for s in drawn.start[row] if s >= 0}):
            (seq,) = llm.open_request(chat, SamplingParams(max_tokens=64)).seqs
            seq.token_ids += answer[: root - begin + 1]
            seq.slot = llm.runner.admit(seq.token_ids, seq.vision)
            llm.runner.prefill(seq.slot, seq.token_ids, seq.vision)
            drafted = drafter.propose([seq], [DraftBudget(WINDOW - 1, WINDOW - 1)])
            drafter.release([seq.slot])
            llm.runner.cache.release(seq.slot)
            assert found["fed"][row][drawn.start[row] == root].tolist() == drafted.tree.token_ids[0].tolist()


@pytest.mark.parametrize("method", ["qat", "distill"])
def test_training_with_pictures_makes_more_drafts_stand(method, files):
    torch.manual_seed(0)
    made, _, target = qat("llava", WINDOW, 2) if method == "qat" else distill("llava", "shared")[:3]
    frozen = [p.clone() for p in made._plain.parameters()]
    got = descend(made, batch_of(ModelRunner(target, 1), files), 12, lr=1e-2)
    assert float(got[-1].parts["acceptance"]) > float(got[0].parts["acceptance"]) + 0.05
    assert all(torch.equal(x, y) for x, y in zip(frozen, made._plain.parameters(), strict=True))


def test_a_picture_that_was_changed_is_refused(files):
    made, _, target = qat("llava")
    batch = batch_of(ModelRunner(target, 1), files)
    (first, *others) = batch.chats
    swapped = json.loads(json.dumps(first.messages).replace("1.png", "2.png"))
    wrong = Batch(batch.token_ids, {}, batch.is_answer, (ImageChat(swapped, first.images), *others))
    with pytest.raises(ConfigError, match="images of prepared answers have changed"):
        made.loss(wrong)
