"""A cache that the memory cannot hold is refused with the bytes that it needs, before they are touched."""

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.attention import kv_cache
from paceline.attention.kv_cache import SlotCache
from paceline.errors import CacheFull
from paceline.target import make_runner
from paceline.target.prefix_cache import PrefixCache
from tests.helpers import all_free, loaded

PER_TOKEN = 2 * 2 * 2 * 8 * 4  # bytes of a token in the tiny model: keys and values of 2 layers, 2 heads of 8 floats


@pytest.fixture
def free(monkeypatch):
    monkeypatch.setattr(kv_cache, "available_memory", kv_cache.available_memory)

    def of(size: int) -> None:
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
    free(cache.num_bytes // 4 - 1)  # 64 columns more are needed
    with pytest.raises(CacheFull, match="does not fit into memory"):
        cache.begin([slot], 100)
    assert (cache.capacity, cache.keys[0].shape[2]) == (256, 256)
    free(cache.num_bytes - 1)  # not enough for twice the columns
    cache.begin([slot], 100)
    assert cache.keys[0].shape[2] == 320
    free(cache.num_bytes)
    cache.begin([slot], 400)
    assert cache.keys[0].shape[2] == 640


def test_an_engine_that_ran_out_goes_on_with_what_fits(free):
    model = loaded(max_position_embeddings=4096)
    llm = LLM(model, max_num_seqs=2)
    free(1)
    with pytest.raises(CacheFull, match="does not fit into memory"):
        llm.generate([[5] * 600])
    assert all_free(llm.runner)
    assert llm.generate([[5] * 20], SamplingParams(max_tokens=200))[0].token_ids


def test_an_answer_of_as_many_tokens_as_fit_ends_where_the_memory_does(free):
    llm = LLM(loaded(max_position_embeddings=4096), max_num_seqs=2)
    want = llm.generate([[5] * 20], SamplingParams(max_tokens=300, ignore_eos=True))[0].token_ids
    llm = LLM(loaded(max_position_embeddings=4096), max_num_seqs=2)
    free(2 * 64 * PER_TOKEN)
    (output,) = llm.generate([[5] * 20], SamplingParams(max_tokens=None, ignore_eos=True))
    assert output.finish_reason == "length"
    assert output.token_ids == want  # 256 + 64 - 20


def test_the_prefix_cache_gives_way(free):
    llm = LLM(loaded(max_position_embeddings=4096), max_num_seqs=1, prefix_cache_bytes=1 << 30)
    short = SamplingParams(max_tokens=200, ignore_eos=True)
    llm.generate([[5] * 40], short)
    prefixes = llm.runner.prefixes
    assert prefixes.num_bytes == 239 * PER_TOKEN

    def rest() -> int:
        return 239 * PER_TOKEN - prefixes.num_bytes

    kv_cache.available_memory = rest  # what the pages held is free once they are gone; `free` puts it back
    with pytest.raises(CacheFull, match="a request does not fit"):
        llm.generate([[7] * 440], short)
    assert prefixes.num_bytes == 239 * PER_TOKEN
    assert llm.generate([[7] * 240], short)[0].token_ids
    assert llm.runner.cache.capacity == 448


def test_pages_that_do_not_give_way_are_noticed(free, monkeypatch):
    """Mutant."""
    monkeypatch.setattr(PrefixCache, "shrink", lambda self, num_bytes: None)
    with pytest.raises(CacheFull, match="key-value cache"):
        test_the_prefix_cache_gives_way(free)
