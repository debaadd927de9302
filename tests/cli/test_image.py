"""`paceline generate --image`: images before the text, for people and as JSON; what is refused, and how."""

from pathlib import Path

import pytest

from tests.cli.helpers import answer, paceline, refusal, save
from tests.system.web import serving
from tests.tiny import tiny_model
from tests.vision.contract import SMALL, WIDE
from tests.vision.families import make, plain_answer, save_made, user

FEW = ("--max-tokens", "6", "--ignore-eos", "--numerics", "fast")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return save_made(tmp_path_factory.mktemp("vlm"))


@pytest.fixture
def files(tmp_path) -> list[str]:
    SMALL.save(tmp_path / "small.png")
    WIDE.save(tmp_path / "wide.webp", lossless=True)
    return [str(tmp_path / "small.png"), str(tmp_path / "wide.webp")]


def test_images_come_before_the_text_through_the_template(folder, files):
    expected = plain_answer("llava", [user(SMALL, WIDE, "which?")], 6)
    both = ("--image", files[0], "-i", files[1])
    for text in (("--prompt", "which?"), ("--chat", "which?")):
        got = answer("generate", folder, *both, *text, *FEW)
        assert got["token_ids"] == expected
    drafted = answer("generate", folder, *both, "--prompt", "which?", "-d", "lookup", "-k", "3", *FEW)
    assert drafted["token_ids"] == expected
    assert (drafted["num_images"], drafted["num_image_tokens"]) == (2, 32)
    times = drafted["timings"]
    assert times["vision"] > 0
    assert times["prefill"] > 0
    assert times["decode"] == pytest.approx(times["draft"] + times["verify"] + times["rest"])
    assert answer("generate", folder, "--image", files[0], "--prompt", "which?", *FEW)["token_ids"] != expected


def test_an_image_by_url(folder, files):
    with serving({"/a.png": Path(files[0]).read_bytes()}) as base:
        got = answer("generate", folder, "--image", base + "/a.png", "--prompt", "what?", *FEW)
    assert got["token_ids"] == plain_answer("llava", [user(SMALL, "what?")], 6)


def test_people_are_told_the_same(folder, files):
    for options in ((), ("--no-stream",), ("--color",)):
        result = paceline("generate", folder, "--image", files[0], "--prompt", "what?", *FEW, *options)
        assert result.exit_code == 0, result.output
        assert "1 image, 16 image tokens; vision 0." in result.stderr
        assert "prefill" in result.stderr
    plain = paceline("generate", folder, "--prompt", "what?", *FEW)
    assert plain.exit_code == 0
    assert "image" not in plain.stderr
    assert answer("generate", folder, "--prompt", "what?", *FEW)["num_images"] == 0


def test_a_model_without_a_template_gets_its_image_token_before_the_text(files, tmp_path):
    model, processor = make("llava")
    save_made(tmp_path / "vlm")
    for left in (tmp_path / "vlm").glob("chat_template*"):
        left.unlink()
    got = answer("generate", str(tmp_path / "vlm"), "--image", files[0], "--prompt", "what?", *FEW)
    inputs = processor(text="<image>what?", images=[SMALL], return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    assert got["token_ids"] == out[0, inputs["input_ids"].shape[1] :].tolist()


def test_what_is_refused(folder, files, tmp_path):
    text = save(tmp_path / "text", tiny_model("llama"))
    said = refusal("generate", text, "--image", files[0], "--prompt", "w5")
    assert "is a text model" in said
    assert "Fix: leave --image out, or name a vision-language model" in said
    asked = ("--prompt", "what?")
    assert "No such file" in refusal("generate", folder, "--image", str(tmp_path / "none.png"), *asked)
    (tmp_path / "page.png").write_text("<html></html>")
    assert "a web page" in refusal("generate", folder, "--image", str(tmp_path / "page.png"), *asked)
    assert "cannot be fetched" in refusal("generate", folder, "--image", "http://127.0.0.1:9/a.png", *asked)
    assert "not with --token-ids" in refusal("generate", folder, "--image", files[0], "--token-ids", "5", code=2)
    assert "prompt is empty" in refusal("generate", folder, "--image", files[0], "--prompt", " ")
