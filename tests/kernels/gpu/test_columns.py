"""Columns of accepted tokens move as `SlotCache` moves them."""

import pytest
import torch

from paceline.attention import kv_cache
from paceline.kernels.gpu import columns, copy_columns, move_columns

CASES = [(1, 5, [2]), (0, 0, [3, 4]), (2, 9, [1, 4, 5, 6, 30]), (1, 3, [5, 6, 7])]


def moves_alike(slot: int, start: int, nodes: list[int], dtype: torch.dtype = torch.float32) -> bool:
    tensors = [(200 * torch.rand(3, heads, 64, d)).to(dtype) for heads, d in ((2, 8), (2, 8), (1, 20), (3, 16))]
    expected = [tensor.clone() for tensor in tensors]
    kv_cache.move_columns(expected, slot, start, nodes)
    move_columns(tensors, slot, start, nodes)
    return all(map(torch.equal, tensors, expected))


@pytest.mark.parametrize(("slot", "start", "nodes"), CASES)
def test_columns_move_alike(slot, start, nodes):
    assert moves_alike(slot, start, nodes)
    assert moves_alike(slot, start, nodes, torch.uint8)


def test_copies_are_those_of_the_cache():
    tensors = [torch.rand(3, heads, 64, d) for heads, d in ((2, 8), (1, 20), (3, 16))]
    for begin, end in ((0, 16), (5, 38), (63, 64)):
        pairs = zip(copy_columns(tensors, 1, begin, end), kv_cache.copy_columns(tensors, 1, begin, end), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)


def test_a_column_too_far_is_seen(monkeypatch):
    right = columns._move
    shifted = type(
        "Shifted",
        (),
        {
            "__getitem__": lambda self, grid: (
                lambda *given, **more: right[grid](*given[:3], given[3] + 1, *given[4:], **more)
            )
        },
    )
    monkeypatch.setattr(columns, "_move", shifted())
    assert not moves_alike(*CASES[0])
