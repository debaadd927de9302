"""Branches side by side are computed as if each stood alone, and the sibling reads what its teacher reads."""

from dataclasses import replace

import pytest
import torch

from examples.tiny_vlm.model import GRID, TowerShape, make_model, make_processor
from examples.tiny_vlm.scene import HELD_OUT
from examples.tiny_vlm.sft import (
    IGNORED,
    ImageChats,
    answer_logits,
    answer_weights,
    collate,
    right_answers,
    scene_chats,
    step_chats,
)
from tests.examples.toy import write_language_model


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    base = write_language_model(tmp_path_factory.mktemp("base"))
    model = make_model(base, tower=TowerShape(16, 1, 2)).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))  # random enough for an argmax to move
    return model, make_processor(base)


def logits_of(made, several):
    with torch.no_grad():
        return answer_logits(made[0], collate(several, made[1], GRID**2))


def test_branches_do_not_see_each_other(made):
    chats = scene_chats(4)
    together, wanted = logits_of(made, [chats])
    alone = [logits_of(made, [ImageChats(chats.image, (branch,))]) for branch in chats.branches]
    assert torch.equal(wanted, torch.cat([tokens for _, tokens in alone]))
    assert torch.allclose(together, torch.cat([logits for logits, _ in alone]), atol=1e-4)


def test_a_mask_that_lets_branches_see_is_caught(made):
    chats = scene_chats(4)
    batch = collate([chats], made[1], GRID**2)
    together, _ = answer_logits(made[0], batch)
    longest = batch.mask.shape[-1]
    leaky = replace(batch, mask=torch.ones_like(batch.mask).tril())
    assert longest > GRID**2
    assert not torch.allclose(together, answer_logits(made[0], leaky)[0], atol=1e-2)


def test_the_template_is_what_training_read(made):
    """A branch behind its image is the very prompt that the processor's chat template makes."""
    model, processor = made
    chats = ImageChats(scene_chats(4).image, ((("What is it?", "a star"),),))
    batch = collate([chats], processor, GRID**2)
    chat = [
        {"role": "user", "content": [{"type": "image", "image": chats.image}, {"type": "text", "text": "What is it?"}]}
    ]
    inputs = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt")  # noqa: E501  # fmt: skip
    prompt = inputs["input_ids"][0]
    assert torch.equal(batch.token_ids[0, : len(prompt)], prompt)
    assert torch.allclose(batch.pixels, inputs["pixel_values"], atol=1e-6)
    answer = processor.tokenizer.encode("a star<|im_end|>", add_special_tokens=False)
    assert batch.targets[batch.targets != IGNORED].tolist() == answer
    with torch.no_grad():
        plain = model(**inputs).logits[0, -1]
    assert torch.allclose(plain, answer_logits(model, batch)[0][0], atol=1e-4)


def test_two_turns_go_on_from_each_other(made):
    chats = ImageChats(scene_chats(4).image, ((("What?", "star"), ("Where?", "left")),))
    _, wanted = logits_of(made, [chats])
    text = made[1].tokenizer.decode(wanted)
    assert text == "star<|im_end|>left<|im_end|>"


def test_pictures_of_unequal_length_share_a_batch(made):
    several = [scene_chats(4), scene_chats(5)]
    both, _ = logits_of(made, several)
    one, other = logits_of(made, several[:1])[0], logits_of(made, several[1:])[0]
    assert torch.allclose(both, torch.cat([one, other]), atol=1e-4)


def test_an_answer_is_right_as_a_whole(made):
    batch = collate([scene_chats(4)], made[1], GRID**2)
    wanted = batch.targets[batch.targets != IGNORED]
    logits = torch.nn.functional.one_hot(wanted, 300).float()
    assert right_answers(logits, wanted, batch.owner).all()
    logits[0] = logits[0].roll(1)
    right = right_answers(logits, wanted, batch.owner)
    assert not right[0]
    assert right[1:].all()
    lengths = torch.bincount(batch.owner)
    sums = torch.zeros(len(lengths)).index_add(0, batch.owner, answer_weights(batch))
    assert torch.allclose(sums, lengths.float().sqrt())


def test_lessons_are_functions_of_the_step_and_never_held_out():
    first, again, other = (step_chats(step, [], 2, 1, seed=3) for step in (5, 5, 6))
    assert [p.branches for p in first] == [p.branches for p in again]
    assert [p.branches for p in first] != [p.branches for p in other]
    assert len(first) == 3
    assert HELD_OUT > 1 << 40
    assert len(scene_chats(5, "caption").branches) == 1
