"""The tiny models are worth testing with: their answers depend on the image, on the text and on their order."""

import pytest
import torch
from transformers import AutoConfig

from paceline.errors import ConfigError
from paceline.hf.halves import output_head
from paceline.hf.processors import load_processor
from tests.vision.families import NAMES, make, make_image, plain_answer, plain_inputs, user


@pytest.mark.parametrize("name", [name for name in NAMES if isinstance(name, str)])
def test_an_answer_depends_on_all_it_should(name):
    chats = [[user(make_image(1), "what?")], [user(make_image(2), "what?")], [user(make_image(1), "whom?")]]
    if name != "paligemma":  # which sees its whole prompt at once, with one text behind the images
        chats += [[user("what?", make_image(1))]]
    answers = [tuple(plain_answer(name, chat, 6)) for chat in chats]
    assert len(set(answers)) == len(answers), answers
    assert all(len(set(answer)) > 2 for answer in answers), answers


@pytest.mark.parametrize("name", NAMES)
def test_pictures_are_a_few_dozen_tokens(name):
    model, processor = make(name)
    ids = plain_inputs(processor, [user(make_image(1), "what?", make_image(2, 60, 24))])["input_ids"]
    assert 6 <= int((ids == model.config.image_token_id).sum()) <= 140
    assert ids.max() < output_head(model).out_features


@pytest.mark.parametrize("name", NAMES)
def test_a_processor_comes_back_from_its_folder(name, tmp_path):
    model, processor = make(name)
    processor.save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    loaded = load_processor(str(tmp_path), AutoConfig.from_pretrained(tmp_path))
    chat = [user(make_image(1), "what?"), user(make_image(2, 60, 24))]
    wanted, got = plain_inputs(processor, chat), plain_inputs(loaded, chat)
    assert wanted.keys() == got.keys()
    assert all(torch.equal(wanted[key], got[key]) for key in wanted)


def test_a_folder_without_a_processor_is_refused(tmp_path):
    model, processor = make("llava")
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no usable processor"):
        load_processor(str(tmp_path), model.config)
    processor.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no usable processor"):
        load_processor(str(tmp_path), model.config)
