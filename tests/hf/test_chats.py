"""Chats with images are taken apart in the form of transformers and of the OpenAI API; all else is refused."""

import base64
import io

import numpy as np
import pytest

from paceline.errors import ConfigError
from paceline.hf.chats import has_images, split_chat, text_chat
from paceline.hf.images import open_image, open_images
from tests.vision.families import make_image


def url_of(image) -> str:
    out = io.BytesIO()
    image.save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


CAT, DOG = make_image(1), make_image(2, 20, 44)


def test_both_forms_give_the_same(tmp_path):
    DOG.save(tmp_path / "dog.png")
    inline = url_of(CAT)
    ours = [
        {"type": "image", "image": CAT},
        {"type": "text", "text": "and"},
        {"type": "image", "path": str(tmp_path / "dog.png")},
    ]
    theirs = [
        {"type": "image_url", "image_url": {"url": inline, "detail": "low"}},
        {"type": "input_text", "text": "and"},
        {"type": "image", "base64": url_of(DOG).partition(",")[2]},
    ]
    plainer = [{"type": "image_url", "image_url": inline}, ours[1], {"type": "image", "url": url_of(DOG)}]
    for content in (ours, theirs, plainer):
        chat = [{"role": "system", "content": "Be short."}, {"role": "user", "name": "x", "content": content}]
        messages, images = split_chat(chat)
        assert messages == [
            {"role": "system", "content": [{"type": "text", "text": "Be short."}]},
            {"role": "user", "name": "x", "content": [{"type": "image"}, ours[1], {"type": "image"}]},
        ]
        for image, wanted in zip(images, (CAT, DOG), strict=True):
            assert np.array_equal(np.asarray(open_image(image)), np.asarray(wanted))
        assert has_images(chat)
        with pytest.raises(ConfigError, match="text alone"):
            text_chat(chat)


def test_text_alone():
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert not has_images(chat)
    assert text_chat(chat) == [{"role": "user", "content": "ab"}]
    assert split_chat(chat)[1] == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([{"type": "video", "video": "a.mp4"}], "unknown kind"),
        ([{"type": "input_audio"}], "unknown kind"),
        ([{"text": "no type"}], "unknown kind"),
        (["a text"], "no part"),
        ([{"type": "image"}], "one source"),
        ([{"type": "image", "image": CAT, "url": "http://x"}], "one source"),
        ([{"type": "image", "image": CAT, "scale": 2}], "unknown key"),
        ([{"type": "image", "image": 7}], "no image"),
        ([{"type": "image_url", "image_url": {"url": "/etc/passwd"}}], "must be a data: or http"),
        ([{"type": "image_url", "image_url": {"uri": "https://a"}}], "unknown key"),
        ([{"type": "image_url"}], "must be a data: or http"),
        ([{"type": "text", "text": None}], "no text"),
        ([], "no content"),
        (None, "no content"),
        (3, "no content"),
    ],
)
def test_what_is_refused(content, words):
    with pytest.raises(ConfigError, match=words), open_images(split_chat([{"role": "user", "content": content}])[1]):
        pass


def test_a_message_needs_a_role():
    with pytest.raises(ConfigError, match="no role"):
        split_chat([{"content": "a"}])
