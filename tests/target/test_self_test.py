"""When a vision-language model is loaded it is asked about an image, in the way its prompts will be read."""

import copy
import dataclasses

import pytest
import torch

from paceline.errors import IncompatibleModels
from paceline.hf import describe
from paceline.target import LoadedModel, make_runner, wrap_model
from paceline.target.self_test import check
from tests.vision.families import make, seeing

pytestmark = pytest.mark.usefixtures("unchecked_types")


class _Blind:
    """Takes every image for the same; everything else as it was."""

    def __init__(self, vision):
        self.vision = vision

    def encode(self, images):
        return [found._replace(rows=torch.zeros_like(found.rows)) for found in self.vision.encode(images)]

    def __getattr__(self, name):
        return getattr(self.vision, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["native", "torch"])
def test_load_time_check_catches_a_blind_tower(dtype):
    model, processor = make("llava")
    taken = wrap_model(copy.deepcopy(model).to(dtype), processor=processor)
    assert taken.image_reference is not None
    check(taken)
    with pytest.raises(IncompatibleModels, match="image"):
        check(dataclasses.replace(taken, vision=_Blind(taken.vision)))


def _reads_blindly(monkeypatch, is_blind):
    """Where `is_blind` holds for a layout, the rows of images reach the model as zeros."""
    real = LoadedModel.forward

    def forward(self, token_ids, layout, cache, states=None):
        if layout.rows is not None and is_blind(layout):
            layout.rows = dataclasses.replace(layout.rows, embeds=torch.zeros_like(layout.rows.embeds))
        return real(self, token_ids, layout, cache, states)

    monkeypatch.setattr(LoadedModel, "forward", forward)


def test_load_time_check_reads_natively(monkeypatch):
    assert seeing().is_native
    _reads_blindly(monkeypatch, lambda layout: True)
    with pytest.raises(IncompatibleModels, match="image"):
        check(seeing())


def test_images_are_read_again_as_an_invariant_runner_will(monkeypatch):
    """What is wrong with invariant numerics alone is found (layers of transformers')."""
    monkeypatch.delitem(describe.FORMS, "llama")
    model, processor = make("llava")
    fresh = wrap_model(model, processor=processor)
    _reads_blindly(monkeypatch, lambda layout: layout.batch_invariant)
    check(fresh)
    with pytest.raises(IncompatibleModels, match="image"):
        make_runner(fresh, 1, invariant=True)


def test_what_is_added_to_all_logits_is_no_difference():
    """It changes no probability. Plain transformers in bfloat16 rounds all logits of a Gemma 3 up or down together."""
    loaded = seeing()
    check(dataclasses.replace(loaded, reference=[logits + 5 * logits.std() for logits in loaded.reference]))
    with pytest.raises(IncompatibleModels, match="for a tree"):
        check(dataclasses.replace(loaded, reference=[logits * 1.5 for logits in loaded.reference]))
