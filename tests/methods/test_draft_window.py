"""What windowed self-drafts read and draft, and that their answers are those of the target."""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch

from paceline import Coupled, SamplingParams, SelfExperts, SelfQuantized
from paceline.config import parse
from paceline.core.interfaces import DraftBudget
from paceline.errors import ConfigError
from paceline.methods import draft_window
from paceline.methods.draft_window import AROUND, PLACES, SINK, WHOLE, WINDOW, DraftWindow
from paceline.methods.self_experts import SelfDraft
from paceline.target import ModelRunner
from tests.helpers import REPEATING, assert_identical, loaded, prompt, reading_apart, runner, sequence
from tests.tiny import tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


class Same(SelfDraft):
    """The target itself with a window."""

    name = "same"

    def __init__(self, window):
        self.window = window

    def _change(self, model, target):
        pass


def followed(size: int, tokens: list[int]) -> DraftWindow:
    window = DraftWindow(size)
    window.follow([sequence(loaded(), tokens, GREEDY, slot=0)])
    return window


@pytest.mark.parametrize("more", [-SINK, -1, 0])
def test_short_texts_are_read_whole(more):
    for size in (4, 8):
        length = max(SINK + size, WHOLE * size) + more
        assert followed(size, prompt(length + 1)).spans(0, length) == [(0, length)]


def test_one_token_more_is_left_out():
    assert followed(4, [*range(3, 30)]).spans(0, SINK + 5) == [(0, SINK), (SINK + 1, SINK + 5)]


def test_places_that_match_are_read_too():
    text = [*range(3, 90)] * 4 + [*range(200, 500)] + [40, 41, 42]
    window, end = followed(64, text), len(text) - 65
    at = 3 * 87 + 42 - 3  # of the newest 42 before
    assert window.spans(0, len(text) - 1) == [(0, SINK), (at - AROUND, at + AROUND), (end, len(text) - 1)]
    window.follow(
        [sequence(loaded(), [*text, 210, 211], GREEDY, slot=0)]
    )  # near the window, and the first still counts
    other = 4 * 87 + 211 - 200
    spans = window.spans(0, len(text) + 1)
    assert spans == [(0, SINK), (at - AROUND, other + AROUND), (end + 2, len(text) + 1)], "those that touch are one"


def test_the_newest_places_are_kept():
    window, text = DraftWindow(8), [*range(3, 3000)]
    for start in range(100, 2900, 200):
        text += [start, start + 1]
        window.follow([sequence(loaded(), text, GREEDY, slot=0)])
    assert window._places[0] == [start + 1 - 3 for start in range(2700, 2700 - 200 * PLACES, -200)]
    window.release([0])
    assert window.spans(0, 3000) == [(0, SINK), (2992, 3000)]


def test_spans_are_in_order_and_apart():
    rng = random.Random(0)
    for length in range(1, 300):
        window = DraftWindow(8)
        window._places[0] = places = [rng.randrange(length) for _ in range(rng.randrange(4))]
        spans = window.spans(0, length)
        assert all(first < last for first, last in spans)
        assert all(one[1] < other[0] for one, other in itertools.pairwise(spans))
        columns = {column for first, last in spans for column in range(first, last)}
        around = {column for place in places for column in range(max(0, place - AROUND), min(length, place + AROUND))}
        assert (
            columns == {*range(min(SINK, length)), *range(max(0, length - 8), length), *around} or length <= WHOLE * 8
        )


@pytest.fixture
def near(monkeypatch):
    """Less around a match, so that short texts are not read whole."""
    monkeypatch.setattr(draft_window, "AROUND", 4)


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize("length", [SINK + 4, SINK + 5, SINK + 6, 60])
def test_drafts_are_what_transformers_says_with_a_mask(length):
    assert agree(length)


@pytest.mark.usefixtures("near")
def test_another_beginning_is_told(monkeypatch):
    want = [masked(*one) for one in drafted(60)[0]]
    monkeypatch.setattr(draft_window, "SINK", 2)
    assert not all(torch.allclose(*pair, atol=1e-4) for pair in zip(drafted(60)[1], want, strict=True))


def agree(length: int) -> bool:
    """Whether the logits of a draft are those of transformers, where each token reads the spans before it."""
    asked, got = drafted(length)
    return all(torch.allclose(masked(*one), logits, atol=1e-4) for one, logits in zip(asked, got, strict=True))


def drafted(length: int) -> tuple[list[tuple[list[int], list[int]]], list[torch.Tensor]]:
    """Text and draft before each pass of a draft of five tokens, and its logits [V]."""
    on, drafter, text = reading_apart(ModelRunner(loaded(), 1)), Same(4), (prompt(SINK + 4, 7) * 4)[:length]
    drafter.bind(on, Coupled())
    seq, logits, forward = sequence(on.loaded, text, GREEDY), list[torch.Tensor](), drafter._runner.forward

    def recorded(*given):
        logits.append(forward(*given)[0, -1].clone())
        return forward(*given)

    drafter._runner.forward = recorded
    seq.slot = on.admit(text)
    on.prefill(seq.slot, text)
    draft = drafter.propose([seq], [DraftBudget(5, 5)])
    assert on.cache.lengths[seq.slot] == length - 1
    (row,) = draft.tree.rows
    return [(text[:-1], row.token_ids[: 1 + n]) for n in range(5)], logits


def masked(text: list[int], row: list[int]) -> torch.Tensor:
    """The last logits of a chain after a text, each node of which reads the spans of the columns before it."""
    length, nodes, reads = len(text), len(row), followed(4, [*text, row[0]])
    seen = torch.ones(length + nodes, length + nodes).tril().bool()
    for node in range(nodes):
        seen[length + node, : length + node] = False
        for first, last in reads.spans(0, length + node):
            seen[length + node, first:last] = True
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    with torch.inference_mode():
        return tiny_model("llama")(torch.tensor([[*text, *row]]), attention_mask=mask).logits[0, -1]


LONG = REPEATING * 5


@pytest.mark.parametrize("make", [lambda: SelfQuantized(lm_head="shared", window=5), lambda: Same(1)])
def test_answers_are_those_of_the_target(make):
    asked = [([*LONG, 3 + t], SamplingParams(t, max_tokens=24)) for t in (0, 1)]
    seqs = assert_identical(runner(loaded()), make(), asked)
    assert any(record.num_accepted for seq in seqs for record in seq.rounds)


@pytest.mark.more
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gemma4-experts", "qwen3_5_moe"])
def test_mixtures_with_a_window(name):
    asked = [([*LONG, 3 + t], SamplingParams(t, max_tokens=16)) for t in (0, 1)]
    assert_identical(runner(loaded(name)), SelfExperts(window=5), asked)


def test_the_default_is_for_kernels_of_the_cpu():
    drafter = Same(None)
    for is_native, device, size in ((True, "cpu", WINDOW), (False, "cpu", 0), (True, "cuda", 0)):
        assert drafter._size(SimpleNamespace(is_native=is_native, device=torch.device(device))) == size
    with pytest.raises(ConfigError, match="GPU"):
        Same(64)._size(SimpleNamespace(is_native=True, device=torch.device("cuda")))
    assert Same(64)._size(SimpleNamespace(is_native=False, device=torch.device("cpu"))) == 64


def test_names_tell_a_window():
    for name in ("self-int4", "self-top1", "self-skip"):
        assert parse(name).drafter.name == name
        assert parse(f"{name}:window=64").drafter.name == f"{name}:window=64"
    assert parse("self-skip:0.4,window=64").drafter.name == "self-skip:0.4,window=64"
