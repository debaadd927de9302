"""An EAGLE head attached to its target, with a cache of its own. Each level of a tree is one pass.

The keys and values of the last layer do not need the rest of that layer. So most pairs (f_t, x_{t+1}) that were emitted
since the last round stop there; the last few go through all layers:

    pairs      n .. T-10        T-9 .. T-2                              (T tokens, n pairs cached before)
    computed   keys, values     all layers, logits for x_T of the last
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

from ... import kernels
from ...core.interfaces import Target
from ...kernels import library
from ..heads.device_trees import DeviceTrees
from ..heads.draft_layer import LayerPass, Level, NativeLayer, TorchLayer, head_cache, runs_natively
from ..heads.top_tokens import Best
from .head import EagleHead

CHUNK = 512
"""Pairs cached at once."""

FEW = 8  # pairs at the end that go through all layers


@final
class EaglePass:
    """A head attached to its target (see `attach_head`); gives the results of `forward` over all pairs of each path.

    trees: grows whole trees on a GPU; None elsewhere.
    """

    def __init__(self, head: EagleHead, target: Target):
        self.head = head
        self.is_native = runs_natively(target.loaded, head)
        pairs = head.config.version != 3
        self._layer = NativeLayer(head, head.fc, pairs) if self.is_native else TorchLayer(head)
        self._device = target.loaded.device
        self.trees = None
        if isinstance(self._layer, NativeLayer) and kernels.kernels_for(self._device) is not library:
            self.trees = DeviceTrees(self._layer, head.draft_ids)
        self._mask_hidden = getattr(head, "mask_hidden", torch.empty(0))
        self._mask_token_id = torch.tensor([head.config.mask_token_id or 0], device=self._device)
        self.cache = head_cache(target, head.config)

    def extend_cache(
        self,
        slots: Sequence[int],
        tokens: Sequence[Sequence[int]],
        states: Sequence[Tensor],
        most: int = 0,
        noise: Tensor | None = None,
        masks: int = 0,
    ) -> Level:
        """Cache the pairs that each slot lacks, at least one. Returns the level of the last pairs, [B, 1, ...].

        tokens: x_{n+1} .. x_{T-1} of each row.
        states: f_n .. f_{T-2} of each row, [P, len(states) E].
        most, noise: how many of the largest logits to find, and what is added to them before, [B, Vd].
        masks: how many of P-EAGLE's mask pairs follow, without being cached; the level is then [B, 1 + masks, ...].
        """
        device = self._device
        ids, rows = list[Tensor](), list[Tensor]()
        for slot, row, known in zip(slots, tokens, states, strict=True):
            begin, row_ids = 0, torch.tensor(row, device=device)
            while len(row) - begin > FEW:
                end = min(begin + CHUNK, len(row) - 1)
                self._pass([slot], row_ids[None, begin:end], known[None, begin:end], kv_only=True)
                self.cache.lengths[slot] += end - begin
                begin = end
            ids.append(row_ids[begin:])
            rows.append(known[begin:])
        counts, ends = [len(row) for row in ids], 1 + masks
        if masks:
            token, hidden = self._mask_token_id.expand(masks), self._mask_hidden.to(rows[0].dtype).expand(masks, -1)
            ids = [torch.cat([row, token]) for row in ids]
            rows = [torch.cat([row, hidden]) for row in rows]
        width, ragged = max(counts) + masks, min(counts) < max(counts)
        head_rows = width if ragged else ends
        level = self._pass(slots, _side_by_side(ids), _side_by_side(rows), head_rows=head_rows, top=most, noise=noise)
        for slot, count in zip(slots, counts, strict=True):
            self.cache.lengths[slot] += count
        self._slots, self._parents = list(slots), torch.empty(len(slots), 0, dtype=torch.long)
        self._newest = -1  # number of the first node of the newest level
        if not ragged:
            return Level(level.hidden[:, -ends:], level.logits, level.best)
        last = torch.tensor(counts) - 1 + torch.arange(len(slots)) * width
        return _picked(level, (last[:, None] + torch.arange(ends)).to(device))

    def step(
        self, tokens: Tensor, hidden: Tensor, parents: Tensor, most: int = 0, noise: Tensor | None = None
    ) -> Level:
        """The next level of the trees, with nodes [B, F].

        hidden: h of the level before, [B, G, E].
        parents: the row of `hidden` that belongs to the parent of each node, [B, F].
        most, noise: how many of the largest logits to find, and what is added to them before, [B, Vd].
        """
        before, device = self._parents.shape[1], hidden.device
        rows = hidden[torch.arange(len(hidden))[:, None].to(device), parents.to(device)]
        above = parents + self._newest if before else torch.full_like(parents, -1)
        self._parents, self._newest = torch.cat([self._parents, above], 1), before
        more = {"parents": self._parents, "head_rows": tokens.shape[1], "top": most, "noise": noise}
        return self._pass(self._slots, tokens.to(device), rows, before, **more)

    def _pass(self, slots: Sequence[int], ids: Tensor, states: Tensor, old: int = 0, **more: Any) -> Level:
        """One pass over pairs of tokens [B, N] and states, after the columns that the slots have cached.

        states: those of the target [B, N, len(states) E] or, with `parents`, the head's own [B, N, E].
        more: further fields of `LayerPass`.
        """
        cache = self.cache
        starts = [cache.lengths[slot] for slot in slots]
        cache.ensure(max(starts) + old + ids.shape[1])
        of_target = "parents" not in more
        return self._layer(LayerPass(cache.keys, cache.values, slots, starts, ids, states, of_target, old=old, **more))


@final
class ModulesPass:
    """As `EaglePass`, for several MTP modules, one after another: each reads what the one before it made.

        module 0    (f_t, x_{t+1})      columns 0 .. T-2
        module 1    (h0_t, x_{t+2})             0 .. T-3    below node a        (h0_{T-2}, a)
        module 2    (h1_t, x_{t+3})             0 .. T-4    below nodes a, b    (h1_{T-3}, a), (h1_{T-2}, b)

    A node at depth k is computed with all k tokens of its path, after the columns that are the same for all paths.
    """

    def __init__(self, head: EagleHead, target: Target):
        self.head, heads = head, [head, *head.later]
        self.is_native = runs_natively(target.loaded, head)
        self._layers = [NativeLayer(one, one.fc, True) if self.is_native else TorchLayer(one) for one in heads]
        self._device = target.loaded.device
        self.cache = head_cache(target, replace(head.config, num_hidden_layers=len(heads)))

    def extend_cache(
        self,
        slots: Sequence[int],
        tokens: Sequence[Sequence[int]],
        states: Sequence[Tensor],
        most: int = 0,
        noise: Tensor | None = None,
        masks: int = 0,
    ) -> Level:
        """As that of `EaglePass`. Pairs that are cached are given again, one for each later module."""
        assert not masks
        firsts, last = list[Level](), list[Tensor]()
        for row, (slot, ids, hidden) in enumerate(zip(slots, tokens, states, strict=True)):
            begin, made = self.cache.lengths[slot], list[Level]()
            more = {"head_rows": 1, "top": most, "noise": None if noise is None else noise[row, None]}
            for k in range(min(len(ids), len(self._layers))):
                given = torch.tensor([ids[k:]], device=self._device), hidden[None, : len(ids) - k]
                made.append(self._read(k, slot, begin, *given, {} if k else more))
                hidden = made[-1].hidden[0]
            firsts.append(made[0])
            ends = [level.hidden[0, -1] for level in made]
            last.append(torch.stack(ends + ends[-1:] * (len(self._layers) - len(ends))))
            self.cache.lengths[slot] = begin + len(ids)
        self._slots, self._ends = list(slots), [self.cache.lengths[slot] for slot in slots]
        self._paths = [
            torch.empty(len(slots), 1, 0, dtype=torch.long, device=self._device)
        ]  # to the nodes of each level
        self._last = torch.stack(last, 1)  # of each module, [K, B, E]
        best = [level.best for level in firsts if level.best is not None]
        return Level(
            torch.cat([level.hidden[:, -1:] for level in firsts]),
            torch.cat([level.logits for level in firsts]),
            Best(*map(torch.cat, zip(*best, strict=True))) if best else None,
        )

    def step(
        self, tokens: Tensor, hidden: Tensor, parents: Tensor, most: int = 0, noise: Tensor | None = None
    ) -> Level:
        """As that of `EaglePass`. hidden: of the columns along each path of level k - 1 > 0, [B, G, k - 1, E]."""
        (batch, width), k = tokens.shape, hidden.shape[2] + 1 if hidden.dim() == 4 else 1
        place = torch.arange(batch, device=self._device)[:, None], parents.to(self._device)
        paths = torch.cat([self._paths[k - 1][place], tokens.to(self._device)[..., None]], -1)  # [B, F, k]
        self._paths[k:] = [paths]
        rows = self._last[k - 1][:, None, None].expand(-1, width, -1, -1)
        rows = rows if k == 1 else torch.cat([rows, hidden[place]], 2)  # [B, F, k, E]
        chains = torch.arange(width * k).view(width, k) - 1
        chains[:, 0] = -1
        more = {"parents": chains.view(1, -1).repeat(batch, 1), "head_rows": width * k, "top": most, "noise": noise}
        starts = [end - k for end in self._ends]
        level = self._pass(k, self._slots, starts, paths.flatten(1), rows.flatten(1, 2), more)
        ends = level.at(slice(k - 1, None, k))
        return Level(level.hidden.unflatten(1, (width, k)), ends.logits, ends.best)

    def _read(self, k: int, slot: int, begin: int, ids: Tensor, states: Tensor, more: Mapping[str, Any]) -> Level:
        """Module k over known pairs [1, P], chunk by chunk. more: for the last chunk."""
        cuts, parts = range(0, ids.shape[1], CHUNK), list[Level]()
        for cut in cuts:
            part = slice(cut, cut + CHUNK)
            options = more if cut == cuts[-1] else {}
            parts.append(self._pass(k, [slot], [begin + cut], ids[:, part], states[:, part], options))
        return Level(torch.cat([part.hidden for part in parts], 1), parts[-1].logits, parts[-1].best)

    def _pass(
        self, k: int, slots: Sequence[int], starts: Sequence[int], ids: Tensor, states: Tensor, more: Mapping[str, Any]
    ) -> Level:
        self.cache.ensure(max(starts) + ids.shape[1])
        keys, values = self.cache.keys[k : k + 1], self.cache.values[k : k + 1]
        return self._layers[k](LayerPass(keys, values, slots, starts, ids.contiguous(), states.contiguous(), **more))


def _side_by_side(rows: Sequence[Tensor]) -> Tensor:
    """[B, longest, ...], shorter rows padded with zeros."""
    return rows[0][None] if len(rows) == 1 else nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def _picked(level: Level, places: Tensor) -> Level:
    """Only the rows with these indices [B, M] into the flattened batch."""
    pick = lambda t: t.flatten(0, 1)[places]  # noqa: E731
    best = None if level.best is None else Best(pick(level.best.columns), pick(level.best.logps))
    return Level(pick(level.hidden), pick(level.logits), best)
