"""The recurrent layers of a pass over trees: every node from the states of its parent, in waves of single tokens.

A mixer first reads the tokens that the states do not hold yet, then the nodes. What has the same depth, in all
sequences, is one call with a token a row:

    waiting a b, then the nodes     r - x - y         calls     a, b, r, (x z), y
                                      \\- z

Long texts are read by its form for many tokens where that continues from given states.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..attention.masks import PassLayout
from ..attention.recurrent import RecurrentStates
from .recurrent_layers import Held, Mixer, MixerRun

_LONG = 8
"""Texts of at least so many tokens are read at once."""


@dataclass
class _Wave:
    """Tokens that are read together.

    sources: where each is in the table of inputs. parents: the place of its parent in the wave before, or the row of
    the batch in the first wave. nodes: (place, node) of those that the pass asks for. ends: (place, row) of those after
    which the states of a row stop.
    """

    sources: list[int] = field(default_factory=list[int])
    parents: list[int] = field(default_factory=list[int])
    nodes: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    ends: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


@dataclass
class _Plan:
    """texts: of rows that are read at once, as places in the table of inputs. num_fresh: how many of the first wave,
    its first ones, have no token before them."""

    texts: dict[int, list[int]]
    waves: list[_Wave]
    num_fresh: int


class Waves:
    """A pass through all mixers. Nothing is written before `finish`, so that an error leaves the states as they were.

    The table of inputs has the waiting tokens of all rows, then the nodes [B N].
    """

    def __init__(self, recurrent: RecurrentStates, layout: PassLayout):
        recurrent.waves, text = self, recurrent.text
        self.recurrent, self._slots, self._starts, self._text = recurrent, layout.slots, layout.starts, text
        self._nodes, self._device = layout.num_nodes, layout.device
        self._trees = [[*range(-1, text - 1)]] * len(self._slots)
        if layout.tree is not None:
            self._trees = [row.parents for row in layout.tree.rows]
        self._bases = [recurrent.bases[slot] for slot in self._slots]
        self._waiting = [start - base for start, base in zip(self._starts, self._bases, strict=True)]
        self._plans = dict[bool, _Plan]()
        self._states = dict[int, tuple[list[int], Tensor]]()
        self._inputs = dict[int, Tensor]()

    def run(self, mixer: Mixer, step: MixerRun) -> list[Tensor]:
        """What a mixer makes of the nodes of the pass, [B, N, ...] each."""
        x, plan = step.x, self._plan(mixer.can_continue)
        table = torch.cat([self.recurrent.rows[mixer.place][self._waiting_rows], x.flatten(0, 1)])
        first, ends = len(table) - x.shape[0] * x.shape[1], list[tuple[int, Tensor]]()
        heads = [self._head(mixer, row) for row in range(len(self._slots))]
        nodes, parts = list[int](), list[tuple[Tensor, ...]]()

        def note(made: tuple[Tensor, ...], pairs: Sequence[tuple[int, int]]) -> None:
            nodes.extend(node for _, node in pairs)
            parts.append(tuple(part[:, 0][[place for place, _ in pairs]] for part in made))

        for row, sources in plan.texts.items():
            count = self.recurrent.steps[row]
            for piece in filter(None, (sources[:count], sources[count:])):
                made, heads[row] = step(table[piece][None], heads[row])
                note(
                    tuple(part[0][:, None] for part in made),
                    [(place, source - first) for place, source in enumerate(piece) if source >= first],
                )
                if count and piece[-1] == sources[count - 1]:
                    ends.append((row, mixer.packed(heads[row])))
        held = Held()
        for depth, wave in enumerate(plan.waves):
            tokens = table[wave.sources][:, None]
            if depth:
                groups = [(tokens, {key: state[wave.parents] for key, state in held.items()})]
            else:
                fresh, rest = tokens[: plan.num_fresh], tokens[plan.num_fresh :]
                after = [heads[row] for row in wave.parents[plan.num_fresh :]]
                own = {key: torch.cat([head[key] for head in after]) for key in after[0]} if after else {}
                groups = [(fresh, Held()), (rest, own)]
            results = [step(*group) for group in groups if len(group[0])]
            made = tuple(map(torch.cat, zip(*(made for made, _ in results), strict=True)))
            held = {key: torch.cat([after[key] for _, after in results]) for key in results[0][1]}
            note(made, wave.nodes)
            ends += [
                (row, mixer.packed({key: state[[place]] for key, state in held.items()})) for place, row in wave.ends
            ]
        self._inputs[mixer.place] = x
        if ends:
            self._states[mixer.place] = [self._slots[row] for row, _ in ends], torch.cat([state for _, state in ends])
        results = []
        for pieces in zip(*parts, strict=True):
            out = pieces[0].new_zeros(x.shape[0] * x.shape[1], *pieces[0].shape[1:])
            out[nodes] = torch.cat(pieces)
            results.append(out.unflatten(0, x.shape[:2]))
        return results

    @torch.inference_mode()
    def finish(self) -> None:
        """Let the states move on, and keep the inputs of the tokens that they do not hold."""
        states = self.recurrent
        for place, (slots, rows) in self._states.items():
            states.states[place][slots] = rows
        kept, slots, columns = list[int](), list[int](), list[int]()
        for row, slot in enumerate(self._slots):
            for node in range(max(0, states.steps[row] - self._waiting[row]), self._nodes):
                kept.append(row * self._nodes + node)
                slots.append(slot)
                columns.append((self._starts[row] + node) % states.capacity)
        for place, x in self._inputs.items() if kept else ():
            states.rows[place][slots, columns] = x.flatten(0, 1)[kept]
        states.finish()

    @property
    def _waiting_rows(self) -> tuple[list[int], list[int]]:
        """The slots and the places in the rings of the tokens that states do not hold yet."""
        places = [
            (slot, column % self.recurrent.capacity)
            for slot, base, start in zip(self._slots, self._bases, self._starts, strict=True)
            for column in range(base, start)
        ]
        return [slot for slot, _ in places], [place for _, place in places]

    def _head(self, mixer: Mixer, row: int) -> Held:
        """The states before the first token that this row reads."""
        slot = self._slots[row]
        return mixer.unpacked(self.recurrent.states[mixer.place][slot : slot + 1]) if self._bases[row] else Held()

    def _plan(self, at_once: bool) -> _Plan:
        if at_once not in self._plans:
            self._plans[at_once] = self._planned(at_once)
        return self._plans[at_once]

    def _planned(self, at_once: bool) -> _Plan:
        """The order of a pass. at_once: whether texts of `_LONG` tokens are read at once."""
        every, waves, texts = sum(self._waiting), list[_Wave](), dict[int, list[int]]()

        def add(depth: int, source: int, parent: int) -> int:
            if depth == len(waves):
                waves.append(_Wave())
            wave = waves[depth]
            wave.sources.append(source)
            wave.parents.append(parent)
            if source >= every:
                wave.nodes.append((len(wave.sources) - 1, source - every))
            return len(wave.sources) - 1

        chains, first = list[list[int]](), 0
        for row, count in enumerate(self._waiting):
            nodes = every + row * self._nodes
            chains.append([*range(first, first + count), *range(nodes, nodes + self._text)])
            first += count
            if at_once and len(chains[row]) >= _LONG:
                texts[row] = chains[row]
        fresh = [row for row, base in enumerate(self._bases) if base == 0 and row not in texts]
        for row in [*fresh, *(row for row in range(len(chains)) if row not in fresh)]:
            depth, place = 0, row
            for step, source in enumerate([] if row in texts else chains[row]):
                place = add(depth, source, place)
                depth += 1
                if step + 1 == self.recurrent.steps[row]:
                    waves[step].ends.append((place, row))
            known = {self._text - 1: (depth, place)}  # depth below each node, and its place
            for node in range(self._text, len(self._trees[row])):
                depth, place = known[self._trees[row][node]]
                known[node] = depth + 1, add(depth, every + row * self._nodes + node, place)
        return _Plan(texts, waves, len(fresh))
