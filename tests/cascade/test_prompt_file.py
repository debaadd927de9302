"""Prompt files with and without images, and the hash of what they hold."""

import json

import pytest
from PIL import Image

from paceline.cascade.measure import hash_contents
from paceline.errors import ConfigError
from paceline.eval.prompts import read_prompts


@pytest.fixture
def write(tmp_path):
    (tmp_path / "a.png").write_bytes(b"one")
    (tmp_path / "b.png").write_bytes(b"two")

    def made(*rows: object):
        file = tmp_path / "p.jsonl"
        file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return file

    return made


def test_prompts_of_every_kind(write, tmp_path):
    picture = {"type": "image", "image": str(tmp_path / "a.png")}
    words = {"type": "text", "text": "what?"}
    file = write(
        {"prompt": "go on"},
        {"question": "why?", "answer": "unread"},
        {"chat": "hello"},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"question": "what?", "image": "a.png"},
        {"chat": [{"role": "user", "content": "what?"}], "images": ["a.png"]},
        {"chat": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, words]}]},
    )
    seen = [{"role": "user", "content": [picture, words]}]
    assert read_prompts(file) == [
        "go on",
        [{"role": "user", "content": "why?"}],
        [{"role": "user", "content": "hello"}],
        [{"role": "user", "content": "hi"}],
        seen,
        seen,
        seen,
    ]
    assert len(read_prompts(file, 2)) == 2


def test_the_hash_is_of_the_pictures_too(write, tmp_path):
    file = write({"question": "what?", "image": "a.png"})
    before = hash_contents(read_prompts(file))
    assert before == hash_contents(read_prompts(file))
    (tmp_path / "a.png").write_bytes(b"other")
    assert hash_contents(read_prompts(file)) != before
    assert hash_contents(["a", "b"]) != hash_contents(["b", "a"])


@pytest.mark.parametrize("key", ["image", "path", "url"])
def test_every_key_of_a_file_is_found_and_hashed(write, tmp_path, key):
    rest = [{"type": "image", "base64": "AAAA"}, {"type": "image_url", "image_url": {"url": "HTTPS://x/a.png"}}]
    content = [{"type": "image", key: "a.png"}, {"type": "image", key: "HTTPS://x/b.png"}, *rest]
    asked = read_prompts(write({"chat": [{"role": "user", "content": content}]}))
    assert asked[0][0]["content"] == [{"type": "image", key: str(tmp_path / "a.png")}, *content[1:]]
    before = hash_contents(asked)
    (tmp_path / "a.png").write_bytes(b"other")
    assert hash_contents(asked) != before


def test_pictures_of_every_kind_are_hashed():
    def chat(image):
        return [[{"role": "user", "content": [{"type": "image", "image": image}]}]]

    red, blue = (Image.new("RGB", (4, 4), color) for color in ("red", "blue"))
    hashes = [hash_contents(chat(one)) for one in (red, blue, b"a", b"b", "data:,a", "data:,b")]
    assert len(set(hashes)) == 6
    assert hash_contents(chat(red.copy())) == hashes[0]
    with pytest.raises(ConfigError, match="cannot be read"):
        hash_contents(chat("nowhere.png"))


def test_a_line_of_json_may_hold_other_line_ends(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a\u2028b\x85c"}\n', encoding="utf-8")
    assert read_prompts(file) == ["a\u2028b\x85c"]


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ("{", "not valid JSON"),
        ([1], "not a JSON object"),
        ({"words": "x"}, "no prompt .*line 1"),
        ({"question": " "}, "no prompt"),
        ({"question": "x", "image": "none.png"}, "no such image"),
        ({"question": "x", "images": [3]}, "no list of images"),
        ("", "holds no prompts"),
    ],
)
def test_refusals(write, row, match):
    with pytest.raises(ConfigError, match=match):
        read_prompts(write(row))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "none")
