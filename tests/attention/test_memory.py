"""A cache that the memory cannot hold is refused with the bytes that it needs, before they are touched."""

import pytest
import torch

from paceline import LLM
from paceline.attention import kv_cache
from paceline.attention.kv_cache import SlotCache
from paceline.errors import CacheFull
from paceline.runner import make_runner
from tests.helpers import all_free, loaded

PER_TOKEN = 2 * 2 * 2 * 8 * 4  # bytes of a token in the tiny model: keys and values of 2 layers, 2 heads of 8 floats


@pytest.fixture
def free(monkeypatch):
    def of(size: int | None) -> None:
        monkeypatch.setattr(kv_cache, "available_memory", lambda: size)

    return of


@pytest.mark.parametrize("slots", [10**9, 10**15])
def test_more_slots_than_memory(slots):
    with pytest.raises(CacheFull, match=r"does not fit into memory.*bytes"):
        make_runner(loaded(), slots)


def test_the_first_tensors_are_refused_as_a_whole(free):
    free(4 * 256 * PER_TOKEN)
    assert make_runner(loaded(), 4).cache.num_bytes == 4 * 256 * PER_TOKEN
    free(4 * 256 * PER_TOKEN - 1)
    with pytest.raises(CacheFull, match=f"{4 * 256 * PER_TOKEN:,} bytes or more for 4 sequences"):
        make_runner(loaded(), 4)


def test_growing_asks_for_what_it_takes_more_and_changes_nothing_where_it_cannot(free):
    cache = SlotCache(1, 4096)
    slot = cache.allocate()
    states = torch.ones(1, 2, 200, 8)
    cache.begin([slot], 200)
    cache.update(states, states, 0)
    cache.commit(slot, list(range(1, 200)))
    free(cache.num_bytes - 1)  # as much again is needed for twice the columns
    with pytest.raises(CacheFull, match="does not fit into memory"):
        cache.begin([slot], 100)
    assert (cache.capacity, cache.keys[0].shape[2]) == (256, 256)
    free(cache.num_bytes)
    cache.begin([slot], 100)
    assert cache.keys[0].shape[2] == 512


def test_an_engine_that_ran_out_goes_on_with_what_fits(free):
    model = loaded(max_position_embeddings=4096)
    llm = LLM(model, max_num_seqs=2)
    free(1)
    with pytest.raises(CacheFull, match="does not fit into memory"):
        llm.generate([[5] * 600])
    assert all_free(llm.runner)
    assert llm.generate([[5] * 20])[0].token_ids


def test_where_nothing_tells_the_memory_nothing_is_refused(free):
    free(None)
    assert make_runner(loaded(), 4).cache.num_bytes
