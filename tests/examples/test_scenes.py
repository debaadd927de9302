"""Scenes are functions of their seed, answers follow from what is in them, and patches show what they are said to."""

import hashlib

import numpy as np
import pytest

from examples.tiny_vlm.model import GRID, PATCH
from examples.tiny_vlm.pretrain import describe
from examples.tiny_vlm.questions import KINDS, ask
from examples.tiny_vlm.scene import COLOURS, make_scene, render

SEEDS = range(60)


def test_a_seed_is_a_scene():
    assert make_scene(3) == make_scene(3)
    assert len({make_scene(seed) for seed in SEEDS}) == len(SEEDS)
    assert {make_scene(seed).kind for seed in SEEDS} == {"shapes", "sign", "bars"}
    hashes = {hashlib.sha256(render(make_scene(seed)).tobytes()).hexdigest() for seed in SEEDS}
    assert len(hashes) == len(SEEDS)


@pytest.mark.parametrize("kind", KINDS)
def test_questions_are_functions_of_scene_and_seed(kind):
    for seed in SEEDS:
        question = ask(make_scene(seed), kind, seed)
        assert question == ask(make_scene(seed), kind, seed)
        assert question.kind == kind
        assert question.text
        assert question.answer


def test_lengths_differ_by_kind():
    words = {kind: np.mean([len(ask(make_scene(s), kind, s).answer.split()) for s in SEEDS]) for kind in KINDS}
    assert words["yes/no"] == words["choice"] == 1
    assert words["short"] < words["caption"] < words["steps"]


def test_answers_follow_from_the_scene():
    """Each kind's answers are checked against the scene in another way than they were made."""
    for seed in range(200):
        scene = make_scene(seed)
        names = [thing.name for thing in scene.things]
        caption, steps = ask(scene, "caption", seed).answer, ask(scene, "steps", seed).answer
        if scene.kind == "shapes":
            assert all(name in caption for name in names)
            assert [line.split("a ", 1)[-1] != "" for line in steps.splitlines()].count(True) == len(names) + 2
        if scene.kind == "sign":
            assert scene.sign.text in caption
            assert f"The answer is {['no', 'one', 'two', 'three', 'four', 'five'][len(scene.sign.text)]}." in steps
        question = ask(scene, "yes/no", seed)
        if question.text.startswith("Is there a") and not question.text.endswith("shape?"):
            asked = question.text.removesuffix("?").split(" ", 3)[3]
            assert question.answer == ("yes" if asked in names else "no")
        choice = ask(scene, "choice", seed)
        right = choice.text[choice.text.index(f"{choice.answer}) ") + 3 :].split(" ")[0]
        if scene.kind == "bars":
            assert right == scene.bars.colours[int(np.argmax(scene.bars.heights))]


def test_yes_and_no_are_both_common():
    answers = [ask(make_scene(seed), "yes/no", seed).answer for seed in range(300)]
    assert 0.35 < answers.count("yes") / len(answers) < 0.65


def test_a_labelled_patch_shows_its_colour():
    """What a patch is labelled with is to be seen in it; mirrored labels would mostly be wrong."""
    colours, seen, hit, mirrored = list(COLOURS.values()), 0, 0, 0
    for seed in range(30):
        scene = make_scene(seed)
        if scene.kind != "shapes":
            continue
        pixels, labels = np.asarray(render(scene)).astype(int), describe(scene).labels["colour"]
        for y, x in np.argwhere(labels > 0):
            colour = colours[labels[y, x] - 1]
            seen += 1
            hit += shows(pixels, y, x, colour)
            mirrored += shows(pixels, y, GRID - 1 - x, colour)
    assert seen > 100
    assert hit / seen > 0.85, "the box of a shape has corners that it leaves free"
    assert mirrored / seen < 0.5


def shows(pixels, y, x, colour):
    patch = pixels[y * PATCH : (y + 1) * PATCH, x * PATCH : (x + 1) * PATCH]
    return bool((np.abs(patch - colour).max(-1) < 30).any())
