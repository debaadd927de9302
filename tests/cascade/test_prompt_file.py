"""Prompt files with and without images, and the hash of what they hold."""

import json

import pytest
import torch
from PIL import Image

from paceline.cascade.measure import hash_contents
from paceline.errors import ConfigError
from paceline.measure.prompts import read_prompts


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


def test_the_hash_is_of_the_words_and_the_pixels(write, tmp_path):
    def seen(color: str) -> str:
        Image.new("RGB", (4, 4), color).save(tmp_path / "a.png")
        return hash_contents(read_prompts(write({"question": "what?", "image": "a.png"})))

    assert seen("red") == seen("red") != seen("blue")
    chat = [{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (4, 4), "blue")},
                                         {"type": "text", "text": "what?"}]}]  # fmt: skip
    assert hash_contents([chat]) == seen("blue")
    assert len({hash_contents(one) for one in (["a", "b"], ["b", "a"], ["ab"], [[3, 4]], [[3], [4]])}) == 5
    assert hash_contents([torch.tensor([3, 4])]) == hash_contents([[3, 4]])
    (tmp_path / "a.png").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        hash_contents([[{"role": "user", "content": [{"type": "image", "image": str(tmp_path / "a.png")}]}]])


@pytest.mark.parametrize("key", ["image", "path", "url"])
def test_every_key_of_a_file_is_found(write, tmp_path, key):
    rest = [{"type": "image", "base64": "AAAA"}, {"type": "image_url", "image_url": {"url": "HTTPS://x/a.png"}}]
    content = [{"type": "image", key: "a.png"}, {"type": "image", key: "HTTPS://x/b.png"}, *rest]
    asked = read_prompts(write({"chat": [{"role": "user", "content": content}]}))
    assert asked[0][0]["content"] == [{"type": "image", key: str(tmp_path / "a.png")}, *content[1:]]


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
        ("", "has no prompts"),
    ],
)
def test_refusals(write, row, match):
    with pytest.raises(ConfigError, match=match):
        read_prompts(write(row))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "none")
