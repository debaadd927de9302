"""Drafts with MTP modules: module k reads the state of module k - 1 and the last drafted token (see `heads.mtp`).

docs/how_it_works.md shows a round of T tokens and K modules. Every step runs over the same window of rows, from the
first uncached one to T-2. Its last K-1 rows read drafted tokens and are computed again in the next round.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from os import PathLike
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from ..core.draft import Draft
from ..core.interfaces import DraftBudget, Drafter, DrafterInfo, DraftOptions, TargetView, Verifier
from ..core.request import Sequence
from ..heads.mtp import MtpHead
from ..runner.model_runner import median_seconds
from ..schema import checked, checked_call
from .draft_layer import LayerParts, LayerPass, NativeLayer, TorchLayer, head_cache, make_layer
from .fitting import attach_head, row_dtype
from .registry import HeadSpec
from .top_tokens import TokenRanking
from .trees import DynamicTree, draft_of

_CHUNK = 256
"""Rows of one prefill pass."""

_LAG = 16
"""How many rows the later modules may lag behind, if drafts end before these modules run."""


@final
class Mtp(Drafter):
    """A chain from multi-token prediction modules (DeepSeek-V3, arXiv 2412.19437; FastMTP, arXiv 2509.18362).

    head: a folder that `paceline train` wrote, or a module. After its K modules the last one continues alone.
    """

    name: ClassVar[str] = "mtp"
    info = DrafterInfo(reads_states=True)

    @checked_call
    def __init__(self, head: str | PathLike[str] | MtpHead):
        self._given = head

    def bind(self, target: TargetView, verifier: Verifier) -> None:
        self.head, self._target = attach_head(self._given, MtpHead, target), target
        self._ranking = TokenRanking.of(self.head.draft_ids, target, verifier)
        self._dtype, config = row_dtype(target), self.head.config
        self._cache = head_cache(target, config, config.num_modules)
        self._layers = list[NativeLayer | TorchLayer]()
        for step in range(config.num_modules):  # their projections, norms and output rows stay in Python
            one = self.head.module(step)
            parts = LayerParts(one, self.head.output, config.rope_theta, one.input_layernorm, one.norm)
            self._layers.append(make_layer(parts))
        target.watch_states([target.loaded.num_layers])

    def draft_options(self, seq: Sequence) -> Seq[DraftOptions]:
        """Uncached rows beyond those of an ordinary step count; the hint is -1 if the target has no state yet."""
        known, count = self._cache.lengths[seq.slot], self.head.config.num_modules
        return (DraftOptions(self.name, 0 if seq.num_cached else -1, max(0, seq.num_cached - known - count)),)

    def seconds(self) -> Mapping[str, tuple[float, float]]:
        """A step over one row with its logits; and a prefill per row, through all modules."""
        length = self._cache.lengths[0]  # the next pass overwrites what is written here
        many = min(64, self._target.max_length)

        def step() -> None:
            hidden = self._step(0, [0], [[0]], self._zeros(1), [length])
            self.head.logits(hidden, 0).topk(1).indices.tolist()

        def read() -> None:
            hidden = self._zeros(many)
            for module in range(self.head.config.num_modules):
                hidden = self._step(module, [0], [[0] * many], hidden, [length])
            hidden[0, 0, 0].item()  # waits for the device

        return {self.name: (median_seconds(step), median_seconds(read) / many)}

    def release(self, slots: Seq[int]) -> None:
        for slot in slots:
            self._cache.release(slot)

    @torch.inference_mode()
    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> Draft:
        """Cache what was emitted since the last round, then draft a chain; each step reads the token before."""
        chains = [
            DynamicTree(budget, 1, None if seq.num_cached else 0) for seq, budget in zip(seqs, budgets, strict=True)
        ]
        growing = [row for row, chain in enumerate(chains) if chain.frontier]
        for row in growing:
            self._catch_up(seqs[row])
        if growing:
            self._draft([seqs[row] for row in growing], [chains[row] for row in growing])
        return draft_of(seqs, [chain.finish() for chain in chains], self.name)

    def _catch_up(self, seq: Sequence) -> None:
        """Prefill whole chunks of rows that read no drafted token."""
        lengths, count = self._cache.lengths, self.head.config.num_modules
        while len(seq.token_ids) - count - lengths[seq.slot] > _CHUNK:
            begin = lengths[seq.slot]
            hidden = self._states(seq, begin, begin + _CHUNK).unsqueeze(0)
            for module in range(count):
                tokens = seq.token_ids[begin + module + 1 : begin + module + 1 + _CHUNK]
                hidden = self._step(module, [seq.slot], [tokens], hidden, [begin])
            lengths[seq.slot] = begin + _CHUNK

    def _draft(self, seqs: Seq[Sequence], chains: Seq[DynamicTree]) -> None:
        """Draft all chains together, step by step."""
        cache, count = self._cache, self.head.config.num_modules
        slots = [seq.slot for seq in seqs]
        starts = [cache.lengths[slot] for slot in slots]
        widths = [seq.num_cached - start for seq, start in zip(seqs, starts, strict=True)]
        states = [self._states(seq, start, seq.num_cached) for seq, start in zip(seqs, starts, strict=True)]
        hidden = nn.utils.rnn.pad_sequence(states, batch_first=True)  # [R, N, E]
        ends = torch.tensor(widths, device=hidden.device) - 1
        every = torch.arange(len(seqs), device=hidden.device)
        last = hidden[every, ends]
        for step in range(count):
            if step and max(widths) <= count + _LAG and not any(chain.frontier for chain in chains):
                break
            tokens = []
            for seq, chain, start, width in zip(seqs, chains, starts, widths, strict=True):
                read = [*seq.token_ids, *chain.tokens][start + step + 1 : start + step + 1 + width]
                tokens.append(read + [0] * (hidden.shape[1] - len(read)))
            hidden = self._step(step, slots, tokens, hidden, starts)
            last = hidden[every, ends]
            self._take(step, last, seqs, chains)
        else:
            for seq in seqs:
                cache.lengths[seq.slot] = max(0, len(seq.token_ids) - count)
        step = count
        while rows := [row for row, chain in enumerate(chains) if chain.frontier]:
            places = [seqs[row].num_cached + step - count for row in rows]
            tokens = [chains[row].tokens[-1:] for row in rows]
            hidden = self._step(step, [slots[row] for row in rows], tokens, last[rows].unsqueeze(1), places)
            last[rows] = hidden.squeeze(1)
            self._take(step, last, seqs, chains)
            step += 1

    def _take(self, step: int, last: Tensor, seqs: Seq[Sequence], chains: Seq[DynamicTree]) -> None:
        """Add a token to each open chain, from the hidden states [R, E] of a step."""
        rows = [row for row, chain in enumerate(chains) if chain.frontier]
        if not rows:
            return
        logits = self.head.logits(last[rows], step)
        chosen = [seqs[row] for row in rows]
        tokens, logps = self._ranking.top(logits, chosen, step, 1)
        for row, token, logp in zip(rows, tokens, logps, strict=True):
            chains[row].add([token], [logp])

    def _step(self, step: int, slots: list[int], tokens: list[list[int]], hidden: Tensor, starts: list[int]) -> Tensor:
        """One step over rows in the columns from `starts` on. [R, N], [R, N, E] -> [R, N, E]."""
        cache, module, ids = self._cache, self.head.module(step), torch.tensor(tokens, device=hidden.device)
        cache.ensure(max(starts) + hidden.shape[1])
        rows, index = module.begin(self.head.embed(ids, hidden), hidden), self.head.module_of(step)
        return self._layers[index](LayerPass(cache.keys[index], cache.values[index], slots, starts, rows)).hidden

    def _states(self, seq: Sequence, begin: int, end: int) -> Tensor:
        return self._target.read_states(seq.slot, begin, end, [self._target.loaded.num_layers]).to(self._dtype)

    def _zeros(self, rows: int) -> Tensor:
        loaded = self._target.loaded
        return torch.zeros(1, rows, loaded.hidden_size, dtype=self._dtype, device=loaded.device)


@checked
class MtpSpec(HeadSpec):
    """Options of `Mtp`."""

    method = "mtp"
    drafter = Mtp
    tokens = 3
