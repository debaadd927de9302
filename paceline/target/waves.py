"""The recurrent layers of a pass over trees: every node from the states of its parent, in waves of single tokens.

A mixer first reads the tokens that the states do not hold yet, then the nodes. What has the same depth, in all
sequences, is one call with a token a row:

    waiting a b, then the nodes     r - x - y         calls     a, b, r, (x z), y
                                      \\- z

Long texts are read by its form for many tokens where that continues from given states.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention.masks import PassLayout
from ..attention.recurrent import RecurrentStates
from .recurrent_layers import Held, Mixer, MixerRun, joined

_LONG = 8
"""Texts of at least so many tokens are read at once."""


@dataclass
class _Wave:
    """Tokens that are read together.

    sources: where each is in the table of inputs. parents: the place of its parent in the wave before. asked: the
    places of nodes of the pass. ends: the places after which the states of a row stop.
    """

    sources: Tensor
    parents: Tensor
    asked: Tensor
    ends: Tensor


@dataclass
class _Text:
    """A text that is read at once.

    stored: the slot whose states come before it, if there are any. pieces: places in the table of inputs; the states
    stop after the first piece if `stops`. waiting: how many tokens come before the nodes. goes_on: with a tree.
    """

    stored: list[int]
    pieces: list[Tensor]
    stops: bool
    waiting: int
    goes_on: bool


@dataclass
class _Plan:
    """The calls of a mixer in a pass.

    fresh: how many of the first wave, its first ones, have no token before them. stored: the slots of those that follow
    these; the others come after `texts`. nodes: those that are asked for, in the order of the calls. ends: the slots
    whose states move on, in that order.
    """

    texts: list[_Text]
    waves: list[_Wave]
    fresh: int
    stored: list[int]
    nodes: Tensor
    ends: Tensor


class Waves:
    """A pass through all mixers. Nothing is written before `finish`, so that an error leaves the states as they were.

    The table of inputs has the waiting tokens of all rows, then the nodes [B N].
    """

    def __init__(self, recurrent: RecurrentStates, layout: PassLayout):
        recurrent.waves, text = self, recurrent.text
        self.recurrent, self._slots, self._starts, self._text = recurrent, layout.slots, layout.starts, text
        self._num_nodes, self._device = layout.num_nodes, layout.device
        self._trees = [[*range(-1, text - 1)]] * len(self._slots)
        if layout.tree is not None:
            self._trees = [row.parents for row in layout.tree.rows]
        self._bases = [recurrent.bases[slot] for slot in self._slots]
        self._waiting = [start - base for start, base in zip(self._starts, self._bases, strict=True)]
        rows = enumerate(zip(self._bases, self._starts, strict=True))
        self._in_rings = self._places([(row, column) for row, span in rows for column in range(*span)])
        self._plans = dict[bool, _Plan]()
        self._moved = dict[int, tuple[Tensor, Tensor]]()
        self._inputs = dict[int, Tensor]()

    def run(self, mixer: Mixer, step: MixerRun) -> list[Tensor]:
        """What a mixer makes of the nodes of the pass, [B, N, ...] each."""
        x, plan = step.x, self._plan(mixer.can_continue)
        table = torch.cat([self.recurrent.rows[mixer.place][self._in_rings], x.flatten(0, 1)])
        parts, ends, read = list[tuple[Tensor, ...]](), list[Tensor](), list[Held]()
        for text in plan.texts:
            held, pieces = self._stored(mixer, text.stored), list[tuple[Tensor, ...]]()
            for number, piece in enumerate(text.pieces):
                made, held = step(table[piece][None], held)
                pieces.append(made)
                if number == 0 and text.stops:
                    ends.append(mixer.packed(held))
            parts.append(tuple(torch.cat(part, 1)[0, text.waiting :] for part in zip(*pieces, strict=True)))
            if text.goes_on:
                read.append(held)
        held = Held()
        for depth, wave in enumerate(plan.waves):
            tokens = table[wave.sources][:, None]
            if depth:
                made, held = step(tokens, {key: state[wave.parents] for key, state in held.items()})
            else:
                after = joined([self._stored(mixer, plan.stored), *read])
                groups = (tokens[: plan.fresh], Held()), (tokens[plan.fresh :], after)
                results = [step(*group) for group in groups if len(group[0])]
                made = tuple(map(torch.cat, zip(*(made for made, _ in results), strict=True)))
                held = joined([held for _, held in results])
            parts.append(tuple(part[wave.asked, 0] for part in made))
            if len(wave.ends):
                ends.append(mixer.packed({key: state[wave.ends] for key, state in held.items()}))
        self._inputs[mixer.place] = x
        if ends:
            self._moved[mixer.place] = plan.ends, torch.cat(ends)
        made = [torch.cat(part) for part in zip(*parts, strict=True)]
        whole = [part.new_zeros(x.shape[0] * x.shape[1], *part.shape[1:]) for part in made]  # padding stays zero
        return [
            to.index_copy_(0, plan.nodes, part).unflatten(0, x.shape[:2]) for to, part in zip(whole, made, strict=True)
        ]

    @torch.inference_mode()
    def finish(self) -> None:
        """Let the states move on, and keep the inputs of the tokens that they do not hold."""
        states, kept, places = self.recurrent, list[int](), list[tuple[int, int]]()
        for index, (slots, rows) in self._moved.items():
            states.states[index][slots] = rows
        for row, count in enumerate(self._waiting):
            nodes = range(max(0, states.steps[row] - count), self._num_nodes)
            kept += [row * self._num_nodes + node for node in nodes]
            places += [(row, self._starts[row] + node) for node in nodes]
        for index, x in self._inputs.items() if kept else ():
            states.rows[index][self._places(places)] = x.flatten(0, 1)[kept]
        states.finish()

    def _places(self, columns: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """The slots and the places in their rings of columns of rows."""
        slots = [self._slots[row] for row, _ in columns]
        return self._tensor(slots), self._tensor([column % self.recurrent.capacity for _, column in columns])

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self._device)

    def _stored(self, mixer: Mixer, slots: list[int]) -> Held:
        return mixer.unpacked(self.recurrent.states[mixer.place][slots]) if slots else Held()

    def _plan(self, at_once: bool) -> _Plan:
        if at_once not in self._plans:
            self._plans[at_once] = self._planned(at_once)
        return self._plans[at_once]

    def _planned(self, at_once: bool) -> _Plan:
        """The calls of a pass. at_once: whether texts of `_LONG` tokens are read at once."""
        every, first, texts, chains = sum(self._waiting), 0, list[_Text](), list[list[int]]()
        nodes, ends, kinds = list[int](), list[int](), list[int]()
        for row, count in enumerate(self._waiting):
            begin, steps = every + row * self._num_nodes, self.recurrent.steps[row]
            chain, first = [*range(first, first + count), *range(begin, begin + self._text)], first + count
            kinds.append(1 if self._bases[row] else 0)
            if at_once and len(chain) >= _LONG:
                pieces = [self._tensor(piece) for piece in (chain[:steps], chain[steps:]) if piece]
                stored = [self._slots[row]] if kinds[row] else []
                texts.append(_Text(stored, pieces, steps > 0, count, len(self._trees[row]) > self._text))
                nodes += range(begin - every, begin - every + self._text)
                ends += [self._slots[row]] * (steps > 0)
                chain, kinds[row] = [], 2
            chains.append(chain)
        waves = list[list[tuple[int, int, int]]]()  # source, parent, and the slot whose states stop there or -1

        def add(depth: int, source: int, parent: int, stops: int = -1) -> int:
            if depth == len(waves):
                waves.append([])
            waves[depth].append((source, parent, stops))
            return len(waves[depth]) - 1

        for row in sorted(range(len(chains)), key=kinds.__getitem__):
            place, begin = -1, every + row * self._num_nodes
            for depth, source in enumerate(chains[row]):
                stops = self._slots[row] if depth + 1 == self.recurrent.steps[row] else -1
                place = add(depth, source, place, stops)
            below = {self._text - 1: (len(chains[row]), place)}  # of each node, the depth of its children and its place
            for node in range(self._text, len(self._trees[row])):
                depth, place = below[self._trees[row][node]]
                below[node] = depth + 1, add(depth, begin + node, place)
        for wave in waves:
            nodes += [source - every for source, _, _ in wave if source >= every]
            ends += [stops for _, _, stops in wave if stops >= 0]
        return _Plan(
            texts, [self._wave(every, wave) for wave in waves], kinds.count(0),
            [slot for slot, kind in zip(self._slots, kinds, strict=True) if kind == 1],
            self._tensor(nodes), self._tensor(ends),
        )  # fmt: skip

    def _wave(self, every: int, wave: list[tuple[int, int, int]]) -> _Wave:
        asked = [place for place, (source, _, _) in enumerate(wave) if source >= every]
        ends = [place for place, (_, _, stops) in enumerate(wave) if stops >= 0]
        sources, parents, _ = zip(*wave, strict=True)
        return _Wave(*map(self._tensor, (sources, parents, asked, ends)))
