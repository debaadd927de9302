"""EAGLE, P-EAGLE and MTP heads of several layers, and with EAGLE-3.1's norms."""

import pytest
import torch

from paceline.methods import Eagle
from paceline.methods.heads.draft_layer import head_cache
from tests.methods.heads import random_head
from tests.methods.test_eagle import DTYPES, MASKS, differing, target


@DTYPES
@pytest.mark.parametrize("options", [{}, MASKS], ids=str)
@pytest.mark.parametrize("norms", [{"fc_norm": True, "norm_output": True}, {"norm_before_fc": True}], ids=str)
def test_the_norms_of_eagle_3_1(norms, options, dtype):
    head = random_head(target(dtype), 3, **norms, **options)
    for parameter in head.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 2.0)
    assert not differing(Eagle(head), head)


@DTYPES
@pytest.mark.parametrize("version", [1, 3, "mtp"])
def test_heads_of_several_layers(version, dtype):
    head = random_head(target(dtype), version, num_hidden_layers=3)
    assert not differing(Eagle(head), head)


@DTYPES
def test_peagle_of_several_layers(dtype):
    head = random_head(target(dtype), 3, num_hidden_layers=2, **MASKS)
    assert not differing(Eagle(head), head)


def cache_of_one_layer(target, config):
    """All layers write and read the same keys and values."""
    cache = head_cache(target, config)
    cache.keys[1:], cache.values[1:] = cache.keys[:1], cache.values[:1]
    return cache


@DTYPES
def test_a_mutant_whose_layers_share_a_cache_is_caught(dtype, monkeypatch):
    monkeypatch.setattr("paceline.methods.eagle.passes.head_cache", cache_of_one_layer)
    head = random_head(target(dtype), 3, num_hidden_layers=2)
    assert differing(Eagle(head), head)
