"""A text model and its projector in two GGUF files are the model that they were written from."""

import copy

import pytest
import torch

from paceline import LLM, PromptLookup, SamplingParams
from paceline.errors import ConfigError, IncompatibleModels
from paceline.hf.gguf.vision import open_gguf_vision
from tests.cli.helpers import answer, refusal
from tests.gguf_files import write_gguf
from tests.gguf_mmproj import ARCHITECTURES, write_mmproj, write_pair
from tests.gguf_raw import FLOAT32, INT32, STRING, RawGGUF
from tests.tiny import tiny_model
from tests.vision.families import make, make_image, plain_answer, plain_inputs, user


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_two_files_are_the_model(name, tmp_path):
    model, processor = make(name)
    model, more = copy.deepcopy(model), torch.Generator().manual_seed(1)
    for one in model.parameters():
        if one.dim() == 1:  # norms and biases, which are ones and zeros
            one += torch.randn(one.shape, generator=more) / 5
    text, mmproj = write_pair(tmp_path, name, model, processor)
    again, own = open_gguf_vision(text, mmproj)
    chat = [user(make_image(1), "what?"), user("and", make_image(2, 60, 24))]
    wanted, got = plain_inputs(processor, chat), plain_inputs(own, chat)
    assert {key: torch.equal(one, got[key]) for key, one in wanted.items()} == dict.fromkeys(got, True)
    with torch.inference_mode():
        assert torch.equal(model(**wanted).logits, again(**got).logits)


def test_images_are_answered(tmp_path):
    """By the engine with drafts as by transformers with the original."""
    text, mmproj = write_pair(tmp_path, "llava", *make("llava"))
    chat, params = [user(make_image(1), "what?")], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    llm = LLM(text, mmproj=mmproj, drafter=PromptLookup())
    assert llm.generate(chat, params)[0].token_ids == plain_answer("llava", chat, 12)
    make_image(1).save(tmp_path / "one.png")
    told = "--chat", "what?", "--image", str(tmp_path / "one.png"), "--max-tokens", "4", "--mmproj", str(mmproj)
    assert len(answer("generate", str(text), *told)["token_ids"]) == 4
    assert "--mmproj" in refusal("generate", str(mmproj), "hello")


def test_names_of_older_files(tmp_path):
    """Their matrices of the feed-forward parts have each other's names, and no projector is named."""
    model, processor = make("llava")
    text, mmproj = write_pair(tmp_path, "llava", model, processor)
    raw = RawGGUF.read(mmproj)
    swap = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    for one in raw.tensors:
        part = one.name.split(".")[3] if one.name.startswith("v.blk") else ""
        one.name = one.name.replace(part, swap[part]) if part in swap else one.name
    del raw.entries[raw.place("clip.projector_type")]
    raw.put("clip.vision.projection_dim", INT32, 768)  # of CLIP's own projection, which is not there
    again, _ = open_gguf_vision(text, raw.write(tmp_path / "older.gguf"))
    ours, theirs = model.state_dict(), again.state_dict()
    assert all(torch.equal(ours[name], one) for name, one in theirs.items() if "post_layernorm" not in name)


@pytest.mark.parametrize(
    ("name", "key", "kind", "value", "what"),
    [
        ("llava", "projector_type", STRING, "pixtral", "projector.*pixtral"),
        ("llava", "vision.mm_patch_merge_type", STRING, "spatial_unpad", "spatial_unpad"),
        ("llava", "vision.image_crop_resolution", INT32, 32, "image_crop_resolution"),
        ("gemma3", "use_silu", 7, True, "the activation silu"),
        ("qwen2_vl", "vision.attention.layer_norm_epsilon", FLOAT32, 1e-3, "layer_norm_epsilon"),
        ("internvl", "vision.block_count", INT32, 0, "block_count"),
        ("internvl", "vision.block_count", INT32, 1 << 20, "1,048,576 layers"),
        ("gemma3", "vision.projector.scale_factor", INT32, 64, "vision tower"),
    ],
)
def test_what_is_not_understood_is_refused(name, key, kind, value, what, tmp_path):
    text, mmproj = write_pair(tmp_path, name, *make(name))
    raw = RawGGUF.read(mmproj)
    raw.put(f"clip.{key}", kind, value)
    with pytest.raises((ConfigError, IncompatibleModels), match=what):
        open_gguf_vision(text, raw.write(tmp_path / "x.gguf"))


def test_tensors_that_are_missing_or_unknown(tmp_path):
    text, mmproj = write_pair(tmp_path, "gemma3", *make("gemma3"))
    raw = RawGGUF.read(mmproj)
    (place,) = [i for i, one in enumerate(raw.tensors) if one.name == "v.blk.1.ln1.bias"]
    raw.tensors[place].name = "v.blk.1.ln3.bias"
    with pytest.raises(ConfigError, match="ln3"):
        open_gguf_vision(text, raw.write(tmp_path / "x.gguf"))


def test_two_files_that_are_no_pair(tmp_path):
    model, processor = make("llava")
    text, mmproj = write_pair(tmp_path, "llava", model, processor)
    for architecture, match in (("qwen2", "llama"), ("llama", "'<image>'")):
        other = write_gguf(tmp_path / "other.gguf", tiny_model(architecture, vocab_size=262), architecture)
        with pytest.raises((ConfigError, IncompatibleModels), match=match):
            open_gguf_vision(other, mmproj)
    with pytest.raises(ConfigError, match="no vision projector"):
        open_gguf_vision(text, text)
    wide, _ = write_pair(tmp_path, "qwen2_vl", *make("qwen2_vl"))
    with pytest.raises(ConfigError, match="--mmproj"):
        LLM(wide)


def test_a_tower_of_other_sizes(tmp_path):
    text, _ = write_pair(tmp_path, "llava", *make("llava"))
    wrong = write_mmproj(tmp_path / "x.gguf", "llava", *make("llava"), {"clip.vision.patch_size": 16})
    with pytest.raises(ConfigError, match=r"patch_embd|position_embd"):
        open_gguf_vision(text, wrong)


@pytest.mark.parametrize("name", ["revision", "token", "cache_dir", "trust_remote_code"])
def test_what_two_files_do_not_need_is_refused(name, tmp_path):
    text, mmproj = write_pair(tmp_path, "llava", *make("llava"))
    with pytest.raises(ConfigError, match=f"{name} is for hub ids and folders"):
        LLM(text, mmproj=mmproj, **{name: True if name == "trust_remote_code" else "x"})


def test_a_misspelt_name_with_a_projector():
    with pytest.raises(ConfigError, match="smollm2-135m"):
        LLM("smolm2-135m", mmproj="mmproj.gguf")
