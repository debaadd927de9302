"""vLLM's prompts with images are the chats whose template writes the same text."""

import pytest

from paceline.errors import ConfigError
from paceline.target.prompts import as_list, read_prompt
from tests.helpers import loaded
from tests.vision.contract import GREEDY, engine
from tests.vision.families import FAMILIES, NAMES, make_image, seeing, user

ONE, TWO = make_image(1), make_image(2, 48, 40)


@pytest.mark.parametrize("name", NAMES)
def test_a_text_with_its_images(name):
    image, made = FAMILIES[name].image, seeing(name)
    for images, text, chat in (
        (ONE, f"u:{image}ab;a:", [user(ONE, "ab")]),
        ([ONE, TWO], f"u:{image}ab{image}cd;a:", [user(ONE, "ab", TWO, "cd")]),
        ([], "u:ab;a:", [user("ab")]),
    ):
        ids, vision = read_prompt(made, {"prompt": text, "multi_modal_data": {"image": images}}, 900)
        want_ids, want = read_prompt(made, chat, 900)
        assert ids == want_ids
        assert (vision and vision.keys) == (want and want.keys)


def test_it_is_answered_as_the_chat():
    llm, image = engine("llava"), FAMILIES["llava"].image
    prompts = [{"prompt": f"u:{image}{text};a:", "multi_modal_data": {"image": [ONE]}} for text in ("ab", "xyz")]
    given, chats = llm.generate(prompts, GREEDY), llm.generate([[user(ONE, text)] for text in ("ab", "xyz")], GREEDY)
    assert [one.token_ids for one in given] == [one.token_ids for one in chats]
    assert given[0].prompt == prompts[0]["prompt"]
    assert given[0].outputs[0].num_images == 1


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"prompt": "no place", "multi_modal_data": {"image": ONE}}, "write <image> into the text|differ in number"),
        ({"prompt": "<image>a", "multi_modal_data": {"image": [ONE, TWO]}}, "write <image>|differ in number"),
        ({"prompt": "<image>a", "multi_modal_data": {"image": "none.png"}}, "No such file"),
        ({"prompt": "<image>a", "multi_modal_data": {"video": [ONE]}}, "Got: video.*image"),
        ({"prompt": "<image>a", "multi_modal_data": [ONE]}, 'Expected: {"image"'),
        ({"prompt_token_ids": [5], "multi_modal_data": {"image": ONE}}, "keys that are not read.*multi_modal_data"),
        ({"prompt": [5, 6], "multi_modal_data": {"image": ONE}}, "images need a prompt of text"),
    ],
)
def test_what_does_not_fit(prompt, words):
    with pytest.raises(ConfigError, match=words):
        read_prompt(seeing(), as_list([prompt])[0], 900)


def test_a_text_model_takes_none():
    with pytest.raises(ConfigError, match="takes text alone"):
        read_prompt(loaded("llama"), {"prompt": "a", "multi_modal_data": {"image": ONE}}, 900)
