"""Families without a row: transformers' own forward makes what their text model reads, passes here do the rest.

Families that have a row are read as if they had none, so that each part of the way is tested: axes and features of
several layers (Qwen3-VL), sight in both directions (Gemma 3), tiles (Idefics 3).
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_map

from paceline import LLM, SamplingParams
from paceline.core.draft import Draft
from paceline.core.interfaces import Drafter
from paceline.core.tree import TokenTree
from paceline.errors import ConfigError, DraftError, IncompatibleModels
from paceline.hf import vision
from paceline.hf.entrance import enter, sight, stopping_copy
from paceline.hf.vision import Vision
from paceline.target import load_model, wrap_model
from paceline.target.prefill import encode_images, reference_logits
from paceline.train import images
from tests.helpers import on_torch
from tests.vision.contract import ALIKE, CHATS, GREEDY, changed, drafters, drafting, forget, holds, same, wanted
from tests.vision.families import make, make_image, plain_inputs, save_made, user

FORCED = ["llava", "qwen3_vl", "gemma3", "idefics3"]
OTHERS = ["gemma4", "granite4_vision", "ovis2"]


@cache
def engine(name: str) -> LLM:
    """As of a family that has no row."""
    model, processor = make(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vision, "FAMILIES", {})
        return LLM(wrap_model(model, processor=processor), numerics="fast", max_num_seqs=len(CHATS), max_model_len=400)


def family(name: str) -> vision.Family:
    return engine(name).loaded.vision.family


@pytest.mark.parametrize("name", FORCED)
def test_answers_are_those_of_transformers(name):
    llm = engine(name)
    assert family(name).is_generic
    assert holds(llm, name)
    assert holds(llm, name), "from the caches"
    assert holds(llm, name, ALIKE)
    expected = [wanted(name, chat) for chat in CHATS]
    for kind in ("scripted", "wild"):
        assert same(drafting(llm, drafters(llm, name)[kind]).generate(list(CHATS.values()), GREEDY), expected), kind


@pytest.mark.parametrize("name", ["gemma4", "minicpmv4_7"])
def test_torch_reads_them_too(name):
    llm = LLM(on_torch(*make(name)), max_num_seqs=len(CHATS), max_model_len=400)
    assert not llm.loaded.is_native
    assert holds(llm, name)
    assert holds(llm, name), "from the caches"


def test_what_is_learned_from_a_made_up_image():
    assert family("qwen3_vl").axes
    assert not family("llava").axes
    assert family("gemma3").blocks == "image"
    assert family("gemma4").blocks == "windowed"
    assert not family("gemma4").extras
    assert family("granite4_vision").extras == {"vision_mask", "deepstack_features"}
    assert engine("ovis2").runner.banned_token_ids == {99, 100, 101, 104}  # the frame of an image too
    assert not any(family(name).needs_transformers for name in FORCED)
    assert engine("qwen3_vl").loaded.is_native
    assert engine("gemma4").loaded.is_native


@pytest.fixture
def looks(monkeypatch):
    """How often transformers' forward ran."""
    counted, real = list[int](), Vision.enter

    def enter(self, inputs):
        counted.append(inputs["input_ids"].shape[1])
        return real(self, inputs)

    monkeypatch.setattr(Vision, "enter", enter)
    return counted


def test_images_are_read_once_for_all_questions_behind_them(looks):
    llm = engine("llava")
    forget(llm)
    first, second = ([user(make_image(1), make_image(2), text)] for text in ("what is it", "is it not"))
    for chat in (first, second, first):
        llm.generate(chat, GREEDY)
    assert looks == [llm.generate(first, GREEDY)[0].metrics.vision == 0 and looks[0]]
    llm.generate([user(make_image(2), make_image(1), "what is it")], GREEDY)
    assert len(looks) == 2


@pytest.mark.parametrize("name", ["qwen3_vl", *OTHERS])
def test_chunks_and_passes_over_a_whole_text_give_the_same_logits(name):
    llm, (model, processor) = engine(name), make(name)
    chat = CHATS["turns"]
    (seq,) = llm.open_request(chat, GREEDY).seqs
    features = encode_images(llm.loaded, seq.vision)
    with torch.inference_mode():
        expected = model(**plain_inputs(processor, chat)).logits[0]
    scores, chunk = expected.log_softmax(-1), llm.runner.chunk
    for llm.runner.chunk in (7, chunk):
        read = llm.generate(chat, SamplingParams(max_tokens=0, prompt_logprobs=-1))[0].prompt_logprobs
        got = torch.tensor([[entry[token].logprob for token in range(scores.shape[1])] for entry in read[1:]])
        assert (got - scores[:-1]).abs().max() < 1e-3
    rows = reference_logits(llm.loaded, seq.prompt_ids, 2, seq.vision, features)
    assert (rows - expected[-2:]).abs().max() < 1e-3
    forget(llm)
    llm.runner.chunk = 7
    assert holds(llm, name)
    llm.runner.chunk = chunk


def test_states_of_the_prompt_are_those_of_a_family_with_a_row():
    """What EAGLE's heads read."""
    (model, processor), states = make("qwen3_vl"), []
    for llm in (engine("qwen3_vl"), LLM(wrap_model(model, processor=processor), max_num_seqs=1)):
        (seq,) = llm.open_request(CHATS["two"], GREEDY).seqs
        llm.runner.watch_states([0, 1, 2])
        slot = llm.runner.admit(seq.token_ids, seq.vision)
        llm.runner.prefill(slot, seq.token_ids, seq.vision)
        states.append(llm.runner.read_states(slot, 0, len(seq.token_ids) - 1, (0, 1, 2)))
        llm.runner.cache.release(slot)
    assert (states[0] - states[1]).abs().max() < 1e-4


# What the comparison notices


def mutant(monkeypatch, name: str, change) -> LLM:
    """The engine whose text model is handed something else."""
    real = Vision.encode

    def encode(self, images):
        return [change(one) for one in real(self, images)]

    monkeypatch.setattr(Vision, "encode", encode)
    forget(engine(name))
    return engine(name)


@pytest.fixture(autouse=True)
def forgotten():
    yield
    for name in (*FORCED, *OTHERS):
        forget(engine(name))


def test_images_in_another_order_are_caught(monkeypatch):
    real = Vision.encode
    monkeypatch.setattr(Vision, "encode", lambda self, images: real(self, images)[::-1])
    forget(engine("llava"))
    assert not holds(engine("llava"), "llava", ["alike"])


@pytest.mark.parametrize("by", [-1, 1])
def test_an_offset_off_by_one_is_caught(by, monkeypatch):
    llm = engine("qwen3_vl")

    def moved(seq):
        seq.vision = replace(seq.vision, position_delta=seq.vision.position_delta + by)

    changed(monkeypatch, llm, moved)
    assert not holds(llm, "qwen3_vl", ["first"])


def test_deepstack_left_out_is_caught(monkeypatch):
    assert not holds(mutant(monkeypatch, "qwen3_vl", lambda f: f._replace(deepstack=())), "qwen3_vl", ["first"])


def test_extras_of_other_columns_are_caught(monkeypatch):
    def rolled(features):
        return features._replace(
            extras=tree_map(
                lambda leaf: leaf.roll(1, int(leaf.dim() > 3)) if leaf.is_floating_point() else leaf, features.extras
            )
        )

    assert not holds(mutant(monkeypatch, "granite4_vision", rolled), "granite4_vision", ["two"])


def test_inputs_of_each_layer_that_are_not_those_of_padding_are_caught(monkeypatch):
    monkeypatch.setattr(engine("gemma4").loaded.decoder._described, "image_token", 5)
    assert not holds(engine("gemma4"), "gemma4", ["first"])


def test_sight_in_layers_without_a_window_is_caught(monkeypatch):
    def everywhere(seq):
        seq.vision = replace(seq.vision, windowed_blocks=False)

    changed(monkeypatch, engine("gemma4"), everywhere)
    assert not holds(engine("gemma4"), "gemma4", ["first"])


def test_a_placeholder_is_never_drafted():
    llm = engine("ovis2")

    class Frames(Drafter):
        name = "frames"

        def propose(self, seqs, budgets):
            return Draft(TokenTree.chain([[seq.token_ids[-1], 101] for seq in seqs]), source=self.name)

    with pytest.raises(DraftError, match="101"):
        drafting(llm, Frames()).generate(CHATS["first"], GREEDY)


# What is refused


def test_rules_that_differ_from_those_of_the_made_up_image_are_refused(monkeypatch):
    for change, what in (
        (lambda e: replace(e, position_ids=e.position_ids + 1), "positions"),
        (lambda e: replace(e, blocks=((1, 3),)), "sight"),
        (lambda e: replace(e, extras={"other": torch.zeros(1)}), "arguments"),
        (lambda e: replace(e, placeholder_ids=frozenset([7])), "placeholders"),
    ):
        real = Vision.enter
        with monkeypatch.context() as patch:
            patch.setattr(Vision, "enter", lambda self, inputs, real=real, change=change: change(real(self, inputs)))
            forget(engine("llava"))
            with pytest.raises(IncompatibleModels, match=f"other {what}"):
                engine("llava").generate(CHATS["first"], GREEDY)


@pytest.mark.parametrize("name", ["gemma4", "granite4_vision"])
def test_training_on_more_than_features_is_refused(name):
    with pytest.raises(IncompatibleModels, match="training does not have yet"):
        images._rows(engine(name).runner, [], [], torch.zeros(0, 0))


def test_a_prompt_that_sees_its_text_both_ways_is_refused():
    with pytest.raises(IncompatibleModels, match="paligemma"):
        engine("paligemma")


class Around(torch.nn.Module):
    """Hands some arguments to a text model."""

    class Text(torch.nn.Module):
        def forward(self, inputs_embeds=None, position_ids=None, states=None, visual_pos_masks=None, **others): ...

    def __init__(self, **arguments):
        super().__init__()
        self.arguments, self.config = arguments, SimpleNamespace(get_text_config=lambda: None)
        self.embeddings, self.text = torch.nn.Embedding(9, 4), self.Text()

    def get_input_embeddings(self):
        return self.embeddings

    def get_output_embeddings(self):
        return None

    def forward(self, input_ids, use_cache):
        self.text(**{"inputs_embeds": self.embeddings(input_ids), **self.arguments})


@pytest.mark.parametrize(
    ("arguments", "got"),
    [
        ({"states": torch.zeros(1, 7, 4)}, r"states \[1, 7, 4\]"),
        ({"inputs_embeds": torch.zeros(1, 3, 4)}, r"embeddings \[1, 3, 4\]"),
        ({"inputs_embeds": None}, "no embeddings"),
        ({"visual_pos_masks": torch.tensor([[True, True, False, False]])}, "other tokens than the placeholders"),
        ({"others": None}, None),
        ({"states": torch.zeros(1, 4, 2)}, None),
        ({"states": [torch.zeros(2, 4)]}, None),
    ],
)
def test_arguments_that_have_no_place_here_are_refused(arguments, got):
    around = Around(**arguments)
    inputs = {"input_ids": torch.tensor([[1, 5, 5, 2]])}
    with nullcontext() if got is None else pytest.raises(IncompatibleModels, match=got):
        entrance = enter(stopping_copy(around, around.text), inputs, 5)
        assert entrance.position_ids.tolist() == [[0, 1, 2, 3]]
        assert entrance.placeholder_ids == {5}
        assert entrance.extras.keys() == arguments.keys() & {"states"}


def test_a_forward_without_its_text_model_is_refused():
    around = Around()
    around.forward = lambda **_: None
    with pytest.raises(IncompatibleModels, match="no call of its text model"):
        enter(stopping_copy(around, around.text), {"input_ids": torch.tensor([[1, 5, 2]])}, 5)


def test_more_placeholders_than_images_are_refused():
    with pytest.raises(ConfigError, match=r"differ in number|cannot read"):
        engine("llava").generate(
            {"prompt": "<image> and <image>?", "multi_modal_data": {"image": make_image(1)}}, GREEDY
        )


def test_a_folder(tmp_path):
    folder = save_made(tmp_path, "ovis2")
    llm = LLM(folder, device="cpu")
    assert llm.loaded.vision.family.is_generic
    assert holds(llm, "ovis2", ["two"])
    (tmp_path / "processor_config.json").unlink()
    (tmp_path / "preprocessor_config.json").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="no usable processor"):
        load_model(folder, device="cpu")


def test_a_model_without_a_processor_reads_text():
    loaded = wrap_model(make("granite4_vision")[0])
    assert LLM(loaded).generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids


# Masks


def test_blocks_of_a_mask():
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    both = causal.clone()
    both[1:4, 1:4] = True
    config = type("Config", (), {"sliding_window": 2})()
    near = torch.arange(6)[:, None] - torch.arange(6) < 2
    assert (
        sight(None, 6, config)
        == sight(torch.ones(1, 6), 6, config)
        == sight(causal[None, None], 6, config)
        == ((), False)
    )
    assert sight(both[None, None], 6, config) == (((1, 4),), False)
    masks = {"full_attention": both[None, None], "sliding_attention": (both & near)[None, None]}
    assert sight(masks, 6, config) == (((1, 4),), False)
    masks["full_attention"] = None
    assert sight(masks, 6, config) == (((1, 4),), True)
    both[0, 5] = True
    with pytest.raises(IncompatibleModels, match="neither causal nor blocks"):
        sight(both[None, None], 6, config)
    with pytest.raises(IncompatibleModels, match="a mask"):
        sight(torch.tensor([[1, 0, 1, 1, 1, 1]]), 6, config)
