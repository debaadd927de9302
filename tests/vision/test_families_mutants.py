"""The contract of the families can fail: each way to see or to count wrongly changes an answer that it compares."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from tests.vision.contract import changed, engine, forget, holds
from tests.vision.families import ROWS

SEEN = ("first", "two")
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")
BOTH_WAYS = ("gemma3", "paligemma")


def right(name: str, chats: Iterable[str] = SEEN) -> bool:
    """Whether the contract holds when nothing is remembered from other tests."""
    llm = engine(name)
    forget(llm)
    held = holds(llm, name, chats)
    forget(llm)
    return held


def seeing(monkeypatch, name, change) -> None:
    """Change what the prompt's images are to the engine."""

    def edit(seq):
        seq.vision = change(seq.vision)

    changed(monkeypatch, engine(name), edit)


@pytest.mark.parametrize("name", QWEN)
@pytest.mark.parametrize("error", ["dropped", "one too far", "columns"])
def test_positions_behind_an_image(name, error, monkeypatch):
    assert right(name)
    seeing(
        monkeypatch,
        name,
        {
            "dropped": lambda v: replace(v, position_delta=0),
            "one too far": lambda v: replace(v, position_delta=v.position_delta + 1),
            "columns": lambda v: replace(v, position_ids=None, position_delta=0),
        }[error],
    )
    assert not right(name)


def test_positions_of_the_text_that_closes_an_image(monkeypatch):
    assert right("minicpmv4_7")
    seeing(monkeypatch, "minicpmv4_7", lambda vision: replace(vision, closing=0))
    assert not right("minicpmv4_7")


@pytest.mark.parametrize("name", ROWS)
def test_features_of_the_other_image(name, monkeypatch):
    def swapped(vision):
        if len(vision.images) < 2:
            return vision
        one, two = vision.images
        return replace(vision, images=(replace(two, places=one.places), replace(one, places=two.places)))

    assert right(name, ["alike"])
    seeing(monkeypatch, name, swapped)
    assert not right(name, ["alike"])


@pytest.mark.parametrize("name", ROWS)
def test_features_kept_by_anything_but_their_image(name, monkeypatch):
    def by_size(vision):
        return replace(vision, images=tuple(replace(one, key=str(one.num_tokens)) for one in vision.images))

    assert right(name, ["first", "other"])
    seeing(monkeypatch, name, by_size)
    assert not right(name, ["first", "other"])


@pytest.mark.parametrize("name", BOTH_WAYS)
@pytest.mark.parametrize("error", ["missing", "one short"])
def test_sight_in_both_directions(name, error, monkeypatch):
    def short(vision):
        return replace(vision, blocks=tuple((begin + 1, end) for begin, end in vision.blocks))

    assert right(name)
    seeing(monkeypatch, name, short if error == "one short" else lambda v: replace(v, blocks=()))
    assert not right(name)


def test_features_of_several_layers(monkeypatch):
    assert right("qwen3_vl")
    half = engine("qwen3_vl").loaded.vision
    whole = type(half).features
    monkeypatch.setattr(type(half), "features", lambda self, image: whole(self, image)._replace(deepstack=()))
    assert not right("qwen3_vl")


@pytest.mark.parametrize("name", ROWS)
def test_features_one_place_further(name, monkeypatch):
    def moved(vision):
        images = [replace(one, places=tuple(place + 1 for place in one.places)) for one in vision.images]
        return replace(vision, images=tuple(images))

    seeing(monkeypatch, name, moved)
    assert not right(name, ["first"])
