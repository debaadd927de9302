"""DFlash heads draft a block of tokens in one pass over the target's states (see `methods.dflash.head`).

The distributions of a block do not depend on one another, so a tree crosses them (DDTree, arXiv 2604.12989): its nodes
are those of the largest products of probabilities.
"""

from collections.abc import Sequence
from typing import ClassVar, final

import torch
from torch import Tensor

from ...attention.kv_cache import SlotCache
from ...core.interfaces import Target
from ...core.tree import ancestors
from ...schema import checked
from ..eagle.drafter import Eagle, EagleSpec
from ..eagle.passes import CHUNK
from ..heads.draft_layer import LayerPass, Level, NativeLayer, head_cache, runs_natively
from .head import DFlashHead, attending


@final
class DFlashPass:
    """A head attached to its target (see `attach_head`), and the keys and values of every layer for its states."""

    def __init__(self, head: DFlashHead, target: Target):
        self.head, self._device = head, target.loaded.device
        self.is_native = runs_natively(target.loaded)
        if self.is_native:
            self._block = NativeLayer(head, None, pairs=False)
            self._context = NativeLayer(head, head.fc, pairs=False, context=head.hidden_norm)
        self.cache: SlotCache = head_cache(target, head.config)

    def extend_cache(
        self,
        slots: Sequence[int],
        tokens: Sequence[Sequence[int]],
        states: Sequence[Tensor],
        most: int = 0,
        noise: Tensor | None = None,
        masks: int = 0,
    ) -> Level:
        """Cache the states that each slot lacks, and draft the tokens after its text: [B, 1 + masks, ...].

        tokens: some tokens of each text, of which the last is read.
        states: f_n .. f_{T-2} of each row, [P, len(states) E].
        most: how many of the largest logits to find. noise: not read; see `EaglePass`.
        masks: how many tokens to draft after the first.
        """
        cache, head, size = self.cache, self.head, self.head.config.block_size
        drafting = head.config.num_speculative_tokens  # the last rows
        for slot, new in zip(slots, states, strict=True):
            for chunk in new.split(CHUNK):
                self._read(slot, chunk)
        starts = [cache.lengths[slot] for slot in slots]
        block = head.block(torch.tensor([row[-1] for row in tokens], device=self._device))
        if self.is_native:
            cache.ensure(max(starts) + size)  # the block's own keys and values lie behind the text's
            block_pass = LayerPass(
                cache.keys, cache.values, slots, starts, block, None, head_rows=drafting, top=most,
                is_block=not head.config.causal,
            )  # fmt: skip
            return self._block(block_pass).at(slice(0, masks + 1))
        sees = torch.ones(1, size, size, dtype=torch.bool)
        hidden = self._in_torch(slots, block, torch.arange(size), sees.tril() if head.config.causal else sees)
        hidden = hidden[:, -drafting:][:, : masks + 1]
        return Level(hidden, head.logits(hidden))

    def behind(self, slots: Sequence[int], tokens: Tensor, parents: Tensor, most: int = 0) -> Level:
        """Draft the token behind each node of trees [B, N], the root's aside, by a causal head: [B, N - 1, ...].

        The text of each slot is cached up to the root, its last token. most: as in `extend_cache`.
        """
        cache, head, (batch, count) = self.cache, self.head, tokens.shape
        masks = tokens.new_full((batch, count - 1), head.config.mask_token_id)
        ids = torch.cat([tokens, masks], 1).to(self._device)
        parents = torch.cat([parents, torch.arange(1, count).expand(batch, -1)], 1)
        if self.is_native:
            starts = [cache.lengths[slot] for slot in slots]
            cache.ensure(max(starts) + ids.shape[1])
            return self._block(
                LayerPass(
                    cache.keys, cache.values, slots, starts, ids, None, parents=parents, head_rows=count - 1, top=most
                )
            )
        sees = ancestors(parents)
        hidden = self._in_torch(slots, ids, sees.sum(-1) - 1, sees)[:, count:]
        return Level(hidden, head.logits(hidden))

    def _in_torch(self, slots: Sequence[int], ids: Tensor, offsets: Tensor, sees: Tensor) -> Tensor:
        """Hidden states [B, N, E] of rows [B, N] behind the cached texts, which see these and one another [B, N, N]."""
        cache, device, lengths = self.cache, self._device, [self.cache.lengths[slot] for slot in slots]
        (where, ends), width = torch.tensor([list(slots), lengths], device=device), max(lengths)
        text = (torch.arange(width, device=device) < ends[:, None])[:, None].expand(-1, ids.shape[1], -1)
        seen = torch.cat([text, sees.to(device).expand(len(ids), -1, -1)], -1)[:, None]  # after the longest text
        layers = zip(cache.keys, cache.values, strict=True)
        context = ((keys[where, :, :width], values[where, :, :width]) for keys, values in layers)
        return self.head(ids, ends[:, None] + offsets.to(device), attending(context, seen))

    def _read(self, slot: int, states: Tensor) -> None:
        """Cache the keys and values of the next states of a slot, [N, len(states) E]."""
        cache, begin = self.cache, self.cache.lengths[slot]
        end = begin + len(states)
        cache.ensure(end)
        if self.is_native:
            ids = torch.zeros(1, len(states), dtype=torch.long)  # not read
            self._context(LayerPass(cache.keys, cache.values, [slot], [begin], ids, states[None], True, kv_only=True))
        else:
            rows, positions = (
                states[None].to(self.head.norm.weight.dtype),
                torch.arange(begin, end, device=self._device),
            )
            contexts = self.head.context(rows, positions[None])
            for keys, values, (key, value) in zip(cache.keys, cache.values, contexts, strict=True):
                # Finite: an overflow must not reach other slots as 0 * NaN.
                keys[slot, :, begin:end], values[slot, :, begin:end] = map(torch.nan_to_num, (key[0], value[0]))
        cache.lengths[slot] = end


@final
class DFlash(Eagle):
    """Draft trees with a DFlash head. Options are those of `Eagle`; trees are no deeper than its block."""

    name: ClassVar[str] = "dflash"
    _head, _pass = DFlashHead, DFlashPass


@checked
class DFlashSpec(EagleSpec):
    """Options of `DFlash`."""

    method = "dflash"
    drafter = DFlash
    tokens = 8

    def elsewhere(self, tokens: int) -> dict[str, tuple[str, str]]:
        """A chain of a whole block, however many tokens are asked for."""
        if self.model.endswith(".gguf"):
            return super().elsewhere(tokens)
        flags, (folder, remark) = super().elsewhere(tokens), self.export("SGLang")
        return {**flags, "SGLang": (f"--speculative-algorithm DFLASH --speculative-draft-model-path {folder}", remark)}
