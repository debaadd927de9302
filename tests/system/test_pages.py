"""Memory that is taken when it is written, and given back in pieces."""

import psutil
import pytest
import torch

from paceline.system import pages


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
@pytest.mark.parametrize("width", [64, 7])
def test_a_part_is_zero_again_and_the_others_stay(dtype, width):
    held = pages.lazy_zeros((3, 2, 500, width), dtype)
    assert held.is_contiguous()
    assert not held.any()
    held += 1
    with torch.inference_mode():
        assert pages.free_pages(held[1])
    assert not held[1].any()
    assert held[0].all()
    assert held[2].all()


def test_memory_follows_what_is_written():
    used = psutil.Process().memory_info
    before, held = used().rss, pages.lazy_zeros((4, 1 << 26), torch.int8)
    assert used().rss - before < 1 << 24
    held[1, : 1 << 25] = 1
    assert used().rss - before > 1 << 24
    pages.free_pages(held[1])
    assert used().rss - before < 1 << 24


def test_where_pages_cannot_be_freed(monkeypatch):
    monkeypatch.setattr(pages, "_LIBC", None)
    held = pages.lazy_zeros((2, 5), torch.bfloat16) + 1
    assert not pages.free_pages(held[0])
    assert held.all()
