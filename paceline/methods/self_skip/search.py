"""Chooses the sub-layers that a draft skips, as a knapsack (KnapSpec, arXiv 2602.20217).

    value     how often the draft's likeliest token is the target's, on texts that the target continues itself
    weight    the measured seconds of a sub-layer, attention over `context` columns, and of the output layer

What a sub-layer is worth depends on those that were skipped before it. So a cell (units of time saved, sub-layers
passed) holds the hidden states of the best set so far, by their cosine with the target's at the same place. Each cell
either runs the next sub-layer or skips it. A cell is dropped where another one saves more and is closer to the target.

Of the sets at the end, the choice is the one with the highest expected tokens a second over all depths of a draft:

    tokens(d) = 1 + a + ... + a^d        seconds(d) = d (T(1) - saved) + T(1 + d)

Each set is also tried with the first `FIRST` tokens alone, since tokenizers number frequent ones first.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...target.loaded import LoadedModel
from ...target.sublayers import Seconds, continued, measured
from .skips import Skips

_LOG = logging.getLogger("paceline")
TEXTS = (
    "The old lighthouse keeper climbed the stairs every evening, and",
    "Here are three reasons why regular sleep is good for your health:\n\n1.",
    'def moving_average(values, window):\n    """Return the mean of each window of values."""\n',
    "Question: A train travels 120 km in 90 minutes. What is its speed in km/h?\nAnswer:",
)
LENGTH, STEP, NODES = 24, 6, 3  # tokens of a continuation, between two chains, and of a chain
STEPS = 2  # units of time of the dearest sub-layer; a sub-layer of less than half a unit is never skipped
MOST = 0.75  # of the time of all sub-layers
FIRST = 32_768  # tokens of a smaller vocabulary
DEEPEST = 8  # tokens of a draft


class Parts(Protocol):
    """What the search runs: `target.sublayers.Sublayers`."""

    count: int

    def embedded(self) -> Tensor: ...
    def run(self, index: int, rows: Tensor, /) -> Tensor: ...
    def logits(self, rows: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Cell:
    """A set of skipped sub-layers. likeness: the mean cosine of its states with the target's. rows: its states."""

    saved: float
    likeness: float
    skipped: tuple[int, ...]
    rows: Tensor


@dataclass(frozen=True)
class Choice:
    """What a set is expected to bring.

    agreement: how often its likeliest token is the target's. saved: of the seconds of a pass over one row. speedup:
    over plain decoding, with drafts of `depth` tokens.
    """

    skips: Skips
    agreement: float
    saved: float
    speedup: float
    depth: int


def frontier(parts: Parts, seconds: Sequence[float]) -> list[Cell]:
    """The sets that no other one beats in time and likeness, from none skipped to `MOST` of the time.

    seconds: of each sub-layer.
    """
    weights = [round(STEPS * each / max(seconds)) for each in seconds]
    true, most = parts.embedded(), MOST * sum(seconds)
    cells = {0: Cell(0.0, 1.0, (), true)}
    for index in range(parts.count):
        before, true = true, parts.run(index, true)
        grown = dict[int, Cell]()
        for weight, cell in cells.items():
            run = true if cell.rows is before else parts.run(index, cell.rows)
            saved = cell.saved + seconds[index]
            offers = [(weight, cell.saved, run, cell.skipped)]
            if saved <= most:
                offers.append((weight + weights[index], saved, cell.rows, (*cell.skipped, index)))
            for place, time_saved, rows, skipped in offers:
                likeness = torch.cosine_similarity(rows, true, dim=-1).mean().item()
                if place not in grown or likeness > grown[place].likeness:
                    grown[place] = Cell(time_saved, likeness, skipped, rows)
        cells, best = dict[int, Cell](), -1.0
        for place in sorted(grown, reverse=True):
            if grown[place].likeness > best:
                cells[place], best = grown[place], grown[place].likeness
    return [cells[place] for place in sorted(cells)]


def choices(parts: Parts, cells: Sequence[Cell], seconds: Seconds) -> list[Choice]:
    """What each set is expected to bring; none skipped is the target, and the first.

    T(1) is the sum of its parts, since both were timed alike on a busy machine; passes say how T(n) grows.
    """
    target = parts.logits(cells[0].rows).argmax(-1)
    plain, found = sum(seconds.parts) + seconds.head, list[Choice]()
    passes = [each * plain / seconds.passes[0] for each in seconds.passes]
    for cell in cells:
        logits = parts.logits(cell.rows)
        size = logits.shape[-1]
        for count in (size, FIRST) if size >= 2 * FIRST else (size,):
            agreement = (logits[..., :count].argmax(-1) == target).float().mean().item()
            saved = cell.saved + seconds.head * (1 - count / size)
            rate, depth = best_rate(agreement, plain - saved, passes)
            skips = Skips.of(cell.skipped, None if count == size else count)
            found.append(Choice(skips, agreement, saved / plain, rate * plain, depth))
    return found


def best_rate(agreement: float, draft: float, passes: Sequence[float]) -> tuple[float, int]:
    """The most tokens a second, and the depth that brings them, where a drafted token takes `draft` seconds."""
    rates, tokens = list[float](), 1.0
    for depth in range(1, len(passes)):
        tokens += agreement**depth
        rates.append(tokens / (depth * draft + passes[depth]))
    best = max(rates)
    return best, 1 + rates.index(best)


def chosen(found: Sequence[Choice], fraction: float | None) -> Choice:
    """The fastest, or with a fraction the one that agrees most of those that save so much of a pass."""
    skipping = [choice for choice in found if choice.saved > 0] or found
    if fraction is None:
        return max(skipping, key=lambda choice: choice.speedup)
    enough = [choice for choice in skipping if choice.saved >= fraction]
    return max(enough or skipping, key=lambda choice: choice.agreement if enough else choice.saved)


@torch.inference_mode()
def search(target: LoadedModel, context: int) -> list[Choice]:
    """The frontier of a model on this machine, by texts that it continues. Raises as `Sublayers`."""
    told = f"Choosing the layers of {target.name} that its draft skips (once, about a minute) ..."
    _LOG.info(told)
    if sys.stderr is not None and sys.stderr.isatty():
        print(told, file=sys.stderr)
    seconds = measured(target, context, DEEPEST)
    parts = continued(target, [_prompt(target, text) for text in TEXTS], LENGTH, STEP, NODES)
    return choices(parts, frontier(parts, seconds.parts), seconds)


def _prompt(target: LoadedModel, text: str) -> list[int]:
    """Token ids of a text; without a tokenizer any."""
    if target.tokenizer is None:
        return [sum(text.encode()[: i + 1]) % target.vocab_size for i in range(12)]
    return target.tokenizer.encode(text)
