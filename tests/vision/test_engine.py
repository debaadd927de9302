"""A vision-language model through the front door: the answers of plain transformers, and nothing computed twice."""

import copy
import gc
import weakref
from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from paceline import LLM, PromptLookup, SamplingParams
from paceline.errors import CacheFull, ConfigError
from paceline.measure.check import check
from paceline.quant.packed import PackedLinear
from paceline.target import load, load_model, wrap_model
from tests.vision.contract import CHATS
from tests.vision.families import make, make_image, plain_answer, save_made, seeing, user

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@cache
def llm(numerics: str | None = None, drafter: type | None = None) -> LLM:
    return LLM(seeing(), numerics=numerics, drafter=drafter() if drafter else None, max_num_seqs=3)


def ids_of(output) -> list[int]:
    return output.outputs[0].token_ids


@pytest.mark.parametrize("name", CHATS)
def test_invariant_answers_are_those_of_plain_transformers(name):
    """Those of other numerics, and greedy drafts: `test_families.py`."""
    assert ids_of(llm("invariant").generate(CHATS[name], GREEDY)[0]) == plain_answer("llava", CHATS[name], 12)


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_the_reference_of_check_sees_the_images(numerics):
    report = check(llm(numerics, PromptLookup), [CHATS["two"]], max_tokens=8, with_distribution_test=False)
    assert report.passed
    assert sum(one.measured is not None for one in report.comparisons) == 2
    assert all(0 <= one.measured.plain.typical < 2 for one in report.comparisons)


def test_prompts_without_images():
    model = llm()
    chat = [user("hello there")]
    ids = model.encode(chat)
    assert ids_of(model.generate(ids, GREEDY)[0]) == ids_of(model.generate(chat, GREEDY)[0])
    assert ids_of(model.generate("hello", GREEDY)[0])
    plain_content = [{"role": "user", "content": "hello there"}]
    assert model.encode(plain_content) == ids


def test_halves_share_the_weights():
    model, processor = make("llava")
    model = copy.deepcopy(model).double()  # which runs in torch
    taken = wrap_model(model, processor=processor)
    own = {p.data_ptr() for p in model.parameters()}
    held = {*taken.model.parameters(), *taken.vision.tower.parameters()}
    assert all(p.data_ptr() in own for p in held)
    assert sum(p.numel() for p in held) == sum(p.numel() for p in model.parameters()), "a weight is held twice"


def test_halves_of_native_passes_hold_packed_weights_in_the_place_of_plain_ones():
    model, processor = make("llava")
    taken = wrap_model(model, processor=processor)
    assert taken.is_native
    own = {p.data_ptr() for p in model.parameters()}
    held = {*taken.model.parameters(), *taken.vision.tower.parameters()}
    assert all(p.data_ptr() in own for p in held)
    packed = [m for m in taken.model.modules() if isinstance(m, PackedLinear)]
    numbers = sum(p.numel() for p in held) + sum(m.in_features * m.out_features for m in packed)
    assert numbers == sum(p.numel() for p in model.parameters()), "a weight is held twice"


def test_a_loaded_model_keeps_no_plain_weight_that_is_packed(folder, monkeypatch):
    plain, prepare = [], load._prepare

    def noted(model, *args, **options):
        layers = model.base_model.language_model.layers
        plain.extend(weakref.ref(p) for p in layers.parameters() if p.dim() > 1)
        return prepare(model, *args, **options)

    monkeypatch.setattr(load, "_prepare", noted)
    taken = load_model(str(folder), device="cpu")
    gc.collect()
    assert taken.is_native
    assert plain
    assert not any(one() is not None for one in plain)


def test_model_of_the_caller_stays_as_it_is():
    model, _ = make("llava")
    assert model.config._attn_implementation == model.config.text_config._attn_implementation != "paceline"
    assert not any(isinstance(m, PackedLinear) for m in model.modules())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Path(save_made(tmp_path_factory.mktemp("vlm")))


def test_folder_of_plain_transformers(folder):
    chat = CHATS["two"]
    from_folder = LLM(str(folder), device="cpu")
    assert from_folder.loaded.vision is not None
    assert ids_of(from_folder.generate(chat, GREEDY)[0]) == plain_answer("llava", chat, 12)
    assert from_folder.loaded.fingerprint == seeing().fingerprint


@pytest.mark.parametrize("part", ["language_model", "vision_tower", "multi_modal_projector"])
def test_missing_weights_are_refused(folder, tmp_path, part):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    lost = next(name for name in sorted(tensors) if part in name)
    save_file({k: v for k, v in tensors.items() if k != lost}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="lacks weights"):
        load_model(str(tmp_path), device="cpu")


def test_prompt_that_does_not_fit_names_its_image_tokens():
    small = LLM(seeing(), max_model_len=40)
    with pytest.raises(CacheFull, match="32 of them image tokens"):
        small.generate(CHATS["two"], GREEDY)
    assert ids_of(small.generate(CHATS["none"], GREEDY)[0])


@pytest.mark.parametrize(
    ("chat", "words"),
    [
        ([user("<image>", make_image(1))], "cannot read|differ in number"),
        ([{"role": "user", "content": [{"type": "image", "image": 7}]}], "picture|image"),
    ],
)
def test_chats_that_cannot_be_read(chat, words):
    with pytest.raises(ConfigError, match=words):
        llm().generate(chat, GREEDY)


def test_template_that_prints_no_text_is_taken_for_one_without_images():
    _, processor = make("llava")
    was, processor.chat_template = processor.chat_template, "{% for c in messages[0]['content'] %}<image>{% endfor %}"
    try:
        with pytest.raises(ConfigError, match="takes no images"):
            llm().generate([user(make_image(1))], GREEDY)
    finally:
        processor.chat_template = was


def test_model_without_processor_takes_ids_alone():
    model, _ = make("llava")
    bare = LLM(model)
    assert bare.generate([5, 6, 7], GREEDY)
    with pytest.raises(ConfigError, match="no processor"):
        bare.generate(CHATS["first"], GREEDY)


def test_released_slot_forgets_its_positions():
    model, processor = make("qwen2_vl")
    taken = LLM(model, processor=processor, max_num_seqs=1)
    taken.generate(CHATS["first"], GREEDY)
    assert taken.runner.cache.offsets == [0]
    assert ids_of(taken.generate(CHATS["none"], GREEDY)[0]) == plain_answer("qwen2_vl", CHATS["none"], 12)


def test_placeholders_are_named():
    _, processor = make("llava")
    assert llm().runner.banned_token_ids == {processor.image_token_id}


@pytest.mark.parametrize("prompt", [[5, "image", 6], [user("say <image>")]])
def test_placeholders_without_a_picture_are_refused(prompt):
    image = min(llm().runner.banned_token_ids)
    prompt = [image if part == "image" else part for part in prompt]
    with pytest.raises(ConfigError, match="chat part"):
        llm().encode(prompt)
