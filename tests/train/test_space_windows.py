"""What a mask says in training is what it says in the runner's pass, in models with sliding windows too."""

import pytest
import torch
from transformers import DynamicCache

from paceline.hf.load import KV_CACHE
from paceline.methods.space.adapter import SpaceConfig
from paceline.methods.space.recipe import SpaceLoss, SpaceRecipe, mask_groups, with_factors
from paceline.target import ModelRunner, wrap_model
from paceline.train.models import linears_of, windows_of
from tests.helpers import VOCAB, prompt
from tests.methods.space.common import hung
from tests.tiny import tiny_model

WINDOWED = ("mistral", "qwen2-sliding", "gemma2", "gemma3", "phi3", "olmo3")
K, LENGTH = 3, 20
"""The windows are 8 columns."""


def made(name: str) -> SpaceRecipe:
    plain = tiny_model(name).requires_grad_(False)
    linears, shapes = linears_of(plain, ())
    torch.manual_seed(0)
    trained = with_factors(plain, SpaceConfig(32, 2, VOCAB, K, False, 4, linears, shapes), None)
    with torch.no_grad():
        for parameter in trained.adapter.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    recipe = SpaceRecipe(trained, True, None, SpaceLoss())
    recipe.module.eval()
    return recipe


@torch.no_grad()
def trained_and_drafted(name: str, recipe: SpaceRecipe) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [k, V] of the masks below the token in column LENGTH - 1: in training, and in the runner's pass."""
    text, column = prompt(LENGTH + 5, 1), LENGTH - 1
    ids, answer = torch.tensor([text]), torch.arange(len(text))[None] >= 3
    layout = mask_groups(answer, K, 512, 1.0, torch.Generator().manual_seed(0))
    cache = DynamicCache()  # as in training: it keeps every column
    recipe._plain(ids, **{KV_CACHE: cache})
    logits = recipe._masked(ids, layout, cache)[0]
    at = [int(((layout.start[0] - 1 == column) & (layout.depth[0] == j)).nonzero()[0, 0]) for j in range(K)]
    runner = ModelRunner(wrap_model(tiny_model(name)), 1)
    runner.attach_adapter(recipe.adapter)
    slot = runner.admit(text[:LENGTH])
    runner.extend_cache(slot, text[:column])
    drafted = runner.forward([slot], hung([[text[column]]], [[-1]], [K]))[0, 1:]
    return logits[at], drafted


@pytest.mark.parametrize("name", ["llama", *WINDOWED, "granite", "gpt_neox"])
def test_masks_are_trained_as_they_run(name):
    recipe = made(name)
    assert any(window == 8 for window in windows_of(recipe._plain).values()) == (name in WINDOWED)
    trained, drafted = trained_and_drafted(name, recipe)
    assert torch.allclose(trained, drafted, atol=1e-4)


@pytest.mark.parametrize("off", [None, 9])
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_mutants_with_no_window_or_one_column_more_are_caught(name, off):
    recipe = made(name)
    recipe._windows = {kind: window and off for kind, window in recipe._windows.items()}
    trained, drafted = trained_and_drafted(name, recipe)
    assert not torch.allclose(trained, drafted, atol=1e-2)
