"""Static passes recorded and replayed, as a CUDA graph is; and mutants of the passes, each of which must be noticed."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from paceline.core.tree import TokenTree
from paceline.target import static_pass
from paceline.target.static_pass import StaticPass, StaticPasses
from tests.helpers import prompt
from tests.target.pairs import LONG, NAMES, Pair, grow, walk
from tests.target.tape import Tape, recorded


@pytest.fixture
def tapes(monkeypatch) -> list[Tape]:
    """Passes are recorded once for each bucket and repeated from then on, as graphs are."""
    made: list[Tape] = []
    monkeypatch.setattr(static_pass, "repeatable", recorded(made))
    return made


@pytest.mark.parametrize("name", NAMES)
def test_recorded_passes_can_be_replayed(name, tapes):
    """Nothing of a pass stands in Python: other tokens, trees, lengths and slots reach it through its buffers."""
    pair = Pair(name)
    walk(pair)
    assert pair.static.static.num_runs > len(tapes) > 3
    assert all(len(tape.calls) > 50 and not tape.waits for tape in tapes)


def test_recordings_end_when_the_cache_grows(tapes):
    grow(Pair(**LONG))


def test_a_tape_notices_what_waits_for_the_device():
    x = torch.arange(4.0)
    for work in (x.max().item, lambda: x[x > 1], lambda: bool((x > 1).any()), x.nonzero):
        with Tape() as tape:
            work()
        assert tape.waits
    with Tape() as tape:
        _ = x[torch.tensor([1, 2])] * 2
    assert not tape.waits


def test_results_outlive_the_next_pass(tapes):
    pair = Pair()
    (a,) = pair.admit(12)
    first = pair.check([a], TokenTree.chain([prompt(3)]))
    kept = first.clone()
    pair.check([a], TokenTree.chain([prompt(3, 5)]))
    assert torch.equal(first, kept)


def _off_by_one(starts, *rest):
    return original_visible(starts + 1, *rest)


def _sees_siblings(starts, reach, *rest):
    return original_visible(starts, torch.ones_like(reach).tril(), *rest)


def _blind_to_windows(starts, reach, positions, columns, window):
    return original_visible(starts, reach, positions, columns, None)


def _pads_into_a_live_slot(self, slots, starts):
    window = range(self.bucket.first, self.bucket.first + self.bucket.batch)
    return 0, next((slot for slot in window if slot not in slots), 0), 0


def _pads_into_the_pass(self, slots, starts):
    return 0, slots[0], starts[0]


original_visible = static_pass.visible
MUTANTS = {
    "mask off by one": ("llama", static_pass, "visible", _off_by_one),
    "siblings seen": ("llama", static_pass, "visible", _sees_siblings),
    "no window": ("mistral", static_pass, "visible", _blind_to_windows),
    "padding in a live slot": ("llama", StaticPass, "scratch", _pads_into_a_live_slot),
    "padding in the pass": ("llama", StaticPass, "scratch", _pads_into_the_pass),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    name, owner, attribute, wrong = MUTANTS[mutant]
    pair = Pair(name)
    monkeypatch.setattr(owner, attribute, wrong)
    with pytest.raises(AssertionError):
        walk(pair)


def test_results_that_are_not_copied_are_caught(monkeypatch, tapes):
    monkeypatch.setattr(StaticPass, "take", lambda self, logits, nodes: logits[:1, :nodes])
    with pytest.raises(AssertionError):
        test_results_outlive_the_next_pass(tapes)


def test_states_are_replayed_too(tapes):
    """What is watched comes out of a recording as it does of other passes, also when other layers are watched later."""
    pair = Pair()
    (a,) = pair.admit(12)
    for layers in ((1,), (0, 2)):
        for runner in (pair.static, pair.plain):
            runner.states.watch(layers)
        for seed in (1, 2):
            pair.check([a], TokenTree.chain([prompt(3, seed)]))
            got, expected = (r.states.read(a, 12, 15, r.states.layers) for r in (pair.static, pair.plain))
            assert torch.allclose(got, expected, atol=1e-4, rtol=1e-4)
    assert len(pair.static.static) == 2  # a recording for each set of layers


def test_values_baked_into_a_recording_are_caught(monkeypatch, tapes):
    monkeypatch.setattr(
        static_pass, "visible", lambda starts, *rest: original_visible(torch.tensor(starts.tolist()), *rest)
    )
    with pytest.raises(AssertionError):
        walk(Pair())


def test_stale_tensors_are_caught(monkeypatch):
    """A pass that goes on with the tensors it was built on, as a graph would."""
    monkeypatch.setattr(StaticPasses, "_forget_if_moved", lambda self: None)
    with pytest.raises(AssertionError):
        grow(Pair(**LONG))


def test_a_capture_in_the_order_that_cuda_asks_for(monkeypatch):
    """The calls to torch.cuda, on a made-up one: warm up on a side stream, record once, then replay alone."""
    told: list[str] = []

    @contextmanager
    def scope(name: str):
        told.append(f"begin {name}")
        yield
        told.append(f"end {name}")

    class Stream:
        def __init__(self, name="side"):
            self.name = name

        def wait_stream(self, other):
            told.append(f"{self.name} waits for {other.name}")

    class Graph:
        def replay(self):
            told.append("replay")

    made_up = {
        "device": lambda device: nullcontext(),
        "Stream": Stream,
        "current_stream": lambda: Stream("current"),
        "stream": lambda stream: scope(stream.name),
        "CUDAGraph": Graph,
        "graph": lambda graph, pool: scope(f"capture in {pool}"),
        "MemPool": lambda: SimpleNamespace(id="the pool"),
    }
    for name, value in made_up.items():
        monkeypatch.setattr(torch.cuda, name, value)
    static_pass._memory_pool.cache_clear()
    monkeypatch.setattr(static_pass, "_WARM_UPS", 2)
    out = torch.zeros(1)
    play = static_pass.repeatable(lambda: told.append("work") or out, torch.device("cuda", 7))
    static_pass._memory_pool.cache_clear()
    assert told == [
        "side waits for current", "begin side", "work", "work", "end side", "current waits for side",
        "begin capture in the pool", "work", "end capture in the pool",
    ]  # fmt: skip
    told.clear()
    assert play() is play() is out
    assert told == ["replay", "replay"]
