"""Static passes say what the other passes say, and touch nothing that is committed. On CUDA they are replayed."""

import pytest
import torch

from paceline import LLM, DraftModel, Fixed, PromptLookup, SamplingParams, SelfQuantized
from paceline.core.tree import TokenTree
from paceline.target import ModelRunner, make_runner, static_pass
from paceline.target.static_pass import Bucket, StaticPasses, window_of
from tests.adversaries import RandomTrees
from tests.helpers import loaded, prompt
from tests.target.pairs import LONG, NAMES, Pair, grow, tree_of, walk


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64])
def test_logits_equal_those_of_the_other_passes(name, dtype):
    walk(Pair(name, dtype))


@pytest.mark.parametrize("nodes", [1, 2, 5, 16, 33, 64])
def test_every_node_bucket(nodes):
    pair = Pair()
    pair.check(pair.admit(30, 9), tree_of(2, nodes))


@pytest.mark.parametrize("nodes", range(1, 9))
def test_as_many_key_heads_as_query_heads(nodes):
    pair = Pair(num_key_value_heads=4)
    pair.check(pair.admit(30, 9), TokenTree.chain([prompt(nodes, row) for row in range(2)]))


def test_the_cache_grows_under_the_passes():
    pair = Pair(**LONG)
    grow(pair)
    (c,) = pair.admit(600)
    pair.check([c, 0], tree_of(2, 6))
    pair.check([1], tree_of(1, 6))


def test_up_to_the_last_place_of_the_context():
    pair = Pair()
    (a,) = pair.admit(250)
    pair.check([a], TokenTree.chain([prompt(5)]))
    pair.commit([a], [[1, 2, 3, 4]])
    pair.check([a], TokenTree.chain([prompt(1)]))


def test_larger_trees_go_the_other_way():
    pair = Pair()
    slots = pair.admit(10)
    got, expected = (runner.forward(slots, tree_of(1, 65)) for runner in (pair.static, pair.plain))
    assert pair.static.static.num_runs == 0
    assert torch.equal(got, expected)


def test_the_first_pass_of_all():
    """One token of prompt is never prefilled: the cache has no tensors yet."""
    model = loaded("llama", torch.float64)
    runner = ModelRunner(model, 2, 8, static=True)
    assert not len(runner.cache)
    slot = runner.admit([5])
    got = [runner.forward([slot], TokenTree.chain([[5, 9]])) for _ in range(2)]
    torch.testing.assert_close(got[0], got[1], atol=2e-4, rtol=2e-4)
    assert runner.static.num_runs == 1


def test_an_overflow_in_a_rejected_guess_stays_there():
    pair = Pair()
    (a,) = pair.admit(12)
    pair.check([a], TokenTree.chain([prompt(4)]))
    keys = pair.static.cache.keys[0]
    assert keys[a, :, 12:16].abs().sum() > 0
    bad = torch.full_like(keys[:1, :, :1], torch.nan)
    with torch.inference_mode():
        writer = static_pass._Writer([(keys, pair.static.cache.values[0])], torch.tensor([[a]]), torch.tensor([[14]]))
        writer.update(bad, bad, 0)
    assert keys[a, :, 14].isfinite().all()
    pair.check([a], TokenTree.chain([prompt(2)]))


def test_windows_of_slots():
    assert [window_of([s], 8) for s in (0, 3, 7)] == [(0, 1), (3, 1), (7, 1)]
    assert window_of([5, 4], 8) == (4, 2)
    assert window_of([3, 4], 8) == (0, 8)
    assert window_of([2], 3) == (2, 1)
    assert window_of([0, 2], 3) == (0, 3)
    assert window_of([4, 6], 7) == (3, 4)  # pushed back: there is no slot 7
    for num_slots in range(1, 9):
        for low in range(num_slots):
            for high in range(low, num_slots):
                first, size = window_of([high, low], num_slots)
                assert 0 <= first <= low <= high < first + size <= num_slots


def test_columns_come_in_powers_of_two():
    assert [Bucket.of((0, 1), 1, n, 4096).columns for n in (1, 256, 257, 1500)] == [256, 256, 512, 2048]
    assert Bucket.of((0, 1), 1, 300, 320).columns == 320


def test_few_buckets_serve_many_passes():
    pair = Pair()
    (a,) = pair.admit(10)
    before = len(pair.static.static)
    for nodes in (5, 6, 7, 8):
        pair.check([a], tree_of(1, nodes))
    assert len(pair.static.static) <= before + 1


def test_the_oldest_bucket_goes(monkeypatch):
    monkeypatch.setattr(static_pass, "_MAX_PASSES", 2)
    pair = Pair()
    (a,) = pair.admit(10)
    for nodes in (1, 2, 4, 8, 1):
        pair.check([a], tree_of(1, nodes))
    assert len(pair.static.static) == 2


@pytest.mark.diagonal
@pytest.mark.parametrize("drafter", [PromptLookup, SelfQuantized, RandomTrees, None])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_answers(drafter, temperature):
    """Decoding as a whole, the self-draft on the target's cache included."""
    model = loaded("llama", torch.float64)
    made = DraftModel(loaded("llama", torch.float64, seed=1)) if drafter is None else drafter()
    prompts = [[5, 9, 31, 5, 9, 31, 5, 9], prompt(40), [7]]
    params = SamplingParams(temperature=temperature, max_tokens=16, seed=3, ignore_eos=True)
    llm = LLM(model, drafter=made, policy=Fixed(4, 16), numerics="fast")
    expected = [r.token_ids for r in llm.plain().generate(prompts, params)]
    llm.runner.static = StaticPasses(model.decoder, llm.runner.cache, llm.runner.max_length)
    llm.runner._wants_static = True
    if isinstance(made, SelfQuantized):
        made.bind(llm.runner, llm.verifier)
        assert made._runner.static is not None
    assert [r.token_ids for r in llm.generate(prompts, params)] == expected
    assert llm.runner.static.num_runs > 2


def test_invariant_numerics_are_measured_through_static_passes(monkeypatch):
    counts = []
    run = StaticPasses.run
    monkeypatch.setattr(StaticPasses, "run", lambda *a, **k: counts.append(1) or run(*a, **k))
    runner = make_runner(loaded("llama", torch.float64, **LONG), 2, invariant=None, static=True)
    assert len(counts) > 10
    if not runner.settings.invariant:
        pytest.skip("this device gives no row count whose multiples repeat bit for bit")
    ids = prompt(70)
    slot = runner.admit(ids)
    runner.extend_cache(slot, ids)
    tree = tree_of(1, 7)
    rows = runner.forward([slot], tree)[0]
    for leaf in range(1, 7):  # with static passes or without: a path has the bits of plain decoding
        path = [0, *tree.rows[0].path_to(leaf)]
        chain = TokenTree.chain([tree.token_ids[0, path].tolist()])
        assert torch.equal(runner.forward([slot], chain)[0], rows[path])


def test_static_passes_that_give_other_bits_are_not_taken(monkeypatch):
    run = StaticPasses.run
    monkeypatch.setattr(StaticPasses, "run", lambda *a, **k: run(*a, **k) * (1 + 1e-6))
    runner = make_runner(loaded("llama", torch.float64), 2, invariant=None, static=True)
    assert not (runner.settings.invariant and runner.static)
    assert runner.sharing_cache(lambda model: None).static is not None  # a draft's bits bind nobody
