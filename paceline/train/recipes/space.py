"""SPACE's training (SAR-SFT, arXiv 2402.11809): mask tokens hung at many places of an answer at once.

    column        t          t+1        t+2        t+3          rows of the second pass, at an anchor t:
    token         x_t        x_{t+1}    x_{t+2}    x_{t+3}      mask 0 at t+1: label x_{t+2}, or its law at column t+1
                                                                mask 1 at t+2: label x_{t+3}, or its law at column t+2

The paper cuts an answer at a random place and appends k+1 masks, one lesson group a pass; here `rows` mask tokens share
a pass, each seeing the columns up to its own anchor and the masks before it in its own group:

                  columns 0..t   t+1..    own masks before   other groups
    mask j at t       yes         no           yes               no

Gated: the text is read by the untouched model, the masks by the adapted one. Full: the adapted model reads both, and
what it says of the text is trained too (`ar_weight`), on some batches alone (`ar_share`, the paper's p_AR).
A layer with a sliding window sees no further back, by position, than it will when it drafts.
Deep masks seldom decide, so a group keeps mask j with probability keep^j (conditional drop, as P-EAGLE, 2602.01469).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedTokenizerBase

from ...attention.masks import layer_masks
from ...errors import ConfigError
from ...heads.parts import draft_index
from ...runner import LoadedModel
from ..losses import Loss
from ..recipe import Batch, Losses, Recipe
from .shared import shifted
from .space_model import Trained, save_merged, windows_of, without_factors


@dataclass(frozen=True)
class Layout:
    """Mask tokens of a pass; R is the same in every row, what is missing is no lesson.

    column: of the anchor, -1 where nothing stands. mask: j. group: counted within the row.
    """

    column: Tensor  # [B, R]
    mask: Tensor  # [B, R]
    group: Tensor  # [B, R]

    def visible(self, width: int) -> Tensor:
        """What each mask sees: columns of the text, then masks. [B, R, width + R]."""
        text = torch.arange(width, device=self.column.device) <= self.column[:, :, None]
        same = self.group[:, :, None] == self.group[:, None, :]
        return torch.cat([text, same & (self.mask[:, None, :] <= self.mask[:, :, None])], -1)


def lay_out(is_answer: Tensor, num_masks: int, rows: int, keep: float, chance: torch.Generator | None) -> Layout:
    """Groups of masks at random anchors until `rows` are used in all; chance: None for the generator of all.

    An anchor is a column behind which at least two tokens of the answer follow, so that mask 0 has a lesson.
    """
    batch, width = is_answer.shape
    fits = shifted(is_answer, 1) & shifted(is_answer, 2)
    order = torch.rand(batch, width, generator=chance).to(is_answer.device).masked_fill(~fits, -1.0)
    order = order.argsort(1, descending=True).tolist()
    counts, ends = fits.sum(1).tolist(), (is_answer * torch.arange(width, device=is_answer.device)).amax(1).tolist()
    lengths = (torch.rand(batch, width, num_masks, generator=chance) < keep).long()
    lengths[:, :, 0] = 1
    lengths = lengths.cumprod(-1).sum(-1).tolist()  # mask j is there if those before it are
    share, found = max(1, rows // batch), list[list[tuple[int, int, int]]]()
    for row in range(batch):
        mine = list[tuple[int, int, int]]()
        for group, column in enumerate(order[row][: counts[row]]):
            if len(mine) >= share:
                break
            mine += [(column, j, group) for j in range(min(lengths[row][group], ends[row] - column - 1))]
        found.append(mine[:share])
    longest = max(1, *map(len, found))
    # A row without a lesson sees itself alone, in a group of its own.
    padded = [mine + [(-1, 0, -1 - i) for i in range(longest - len(mine))] for mine in found]
    table = torch.tensor(padded, device=is_answer.device)
    return Layout(*table.unbind(-1))


@final
class SpaceRecipe(Recipe):
    """Train a SPACE adapter, or the whole model with it.

    trained: the models that read text and masks, see `space_model`. tokenizer: goes with a fine-tuned model. loss:
    between the target's law and a mask's, see `losses`; None: cross entropy with the token that followed. rows: mask
    tokens a pass. decay: mask j weighs decay^j. ar_weight, ar_share: of a full run. draft_ids: tokens whose logits are
    compared, which saves most of the output layer; None: all of them. What is foreseen of the others stays as it was.
    start: which weights it goes on from. Raises `ConfigError`.
    """

    states = ()

    def __init__(
        self,
        trained: Trained,
        gated: bool,
        tokenizer: PreTrainedTokenizerBase | None = None,
        loss: Loss | None = None,
        rows: int = 512,
        keep: float = 0.8,
        decay: float = 0.8,
        ar_weight: float = 1.0,
        ar_share: float = 0.5,
        draft_ids: Tensor | None = None,
        start: str = "none",
    ):
        for name, value in (("decay", decay), ("keep", keep)):
            if not 0 < value <= 1:
                raise ConfigError(f"{name} is out of range", got=value, expected="above 0 and at most 1")
        if not 0 <= ar_share < 1:
            raise ConfigError("ar_share is out of range", got=ar_share, expected="at least 0 and below 1")
        self.module, self.adapter, self._trained, self._tokenizer = trained.module, trained.adapter, trained, tokenizer
        if rows < self.adapter.num_masks:
            least = self.adapter.num_masks
            raise ConfigError("there is no room for one group of masks", got=rows, expected=f">= {least}")
        self._plain, self._adapted = trained.plain, trained.adapted
        self.gated, self._loss, self.rows, self.keep, self.decay = gated, loss, rows, keep, decay
        self.ar_weight, self.ar_share = ar_weight, ar_share
        vocab = self.adapter.config.vocab_size
        self._ids = None if draft_ids is None else draft_ids.to(trained.plain.device)
        self._windows = windows_of(trained.plain)
        self.identity = f"{'gated' if gated else 'full'}, trains {type(self.module).__name__}, start {start}"
        self._index = draft_index(self._ids if self._ids is not None else torch.arange(vocab), vocab).to(
            trained.plain.device
        )

    def result(self, target: LoadedModel, model: Path) -> tuple[nn.Module, LoadedModel]:
        """The adapter; of a full run its masks alone, and the fine-tuned model, which is then the target."""
        if self.gated:
            return self.adapter, target
        return without_factors(self.adapter), save_merged(model, self._trained, target, self._tokenizer)

    def loss(self, batch: Batch) -> Losses:
        """Mean over the masks' lessons, weighted by decay^j; of a full run the loss of the text beside it."""
        ids, training = batch.token_ids, self.module.training
        only_text = not self.gated and training and float(torch.rand(())) < self.ar_share
        cache = DynamicCache()
        with torch.set_grad_enabled(not self.gated and torch.is_grad_enabled()):
            reader = self._plain if self.gated else self._adapted
            said = self._read(reader, self.gated, input_ids=ids, past_key_values=cache)
        parts, total = dict[str, Tensor](), said.new_zeros(())
        if not self.gated:
            text = shifted(batch.is_answer, 1)
            total = nn.functional.cross_entropy(said[text], shifted(ids, 1)[text])
            parts["text"], total = total.detach(), self.ar_weight * total
        nothing = torch.full((self.adapter.num_masks,), float("nan"), device=ids.device)
        if only_text:
            return Losses(total, parts, nothing)
        chance = None if training else torch.Generator().manual_seed(0)
        # Evaluation asks every mask, so that the shares of all depths come from the same anchors.
        layout = lay_out(batch.is_answer, self.adapter.num_masks, self.rows, self.keep if training else 1.0, chance)
        logits = self._masked(ids, layout, cache)
        values, agreement = self._lessons(ids, layout, logits, said.detach(), nothing, parts)
        return Losses(total + values, parts, agreement)

    def _masked(self, ids: Tensor, layout: Layout, cache: DynamicCache) -> Tensor:
        """Logits of the mask tokens, transition included. [B, R, V]."""
        embeds, places = self.adapter.embed(layout.mask), layout.column + 1 + layout.mask
        logits = self._read(
            self._adapted,
            True,
            inputs_embeds=embeds,
            attention_mask=self._visible(layout, ids.shape[1], embeds.dtype),
            position_ids=places.clamp_min(0),
            past_key_values=cache,
        )
        before = ids.gather(1, places.clamp_min(0))
        shift = self.adapter.shift(self._plain.get_input_embeddings()(before).detach())
        if shift is None:
            return logits
        return logits + nn.functional.linear(shift, self._rows())

    def _visible(self, layout: Layout, width: int, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """Additive masks [B, 1, R, width + R] as transformers takes them, by kind of layer where they differ."""
        seen, places = layout.visible(width), layout.column + 1 + layout.mask
        text = torch.arange(width, device=places.device).expand(len(places), -1)
        back = places[:, :, None] - torch.cat([text, places], -1)[:, None]  # [B, R, width + R]
        return layer_masks(seen, back, self._windows, dtype)

    def _rows(self) -> Tensor:
        """Output rows of the tokens whose logits are compared, as they are now: a full run may train them. [Vd, E]."""
        every = cast("Any", self._plain.get_output_embeddings()).weight
        return every if self._ids is None else every[self._ids]

    def _read(self, model: nn.Module, drafts: bool, **given: object) -> Tensor:
        """Logits, of the draft vocabulary alone where there is one and nothing else is asked for."""
        if self._ids is None or not drafts:
            return cast("Any", model)(use_cache=True, **given).logits
        base = cast("Any", model)
        inner = base.get_base_model().base_model if hasattr(base, "get_base_model") else base.base_model
        return nn.functional.linear(inner(use_cache=True, **given).last_hidden_state, self._rows())

    def _lessons(
        self, ids: Tensor, layout: Layout, logits: Tensor, said: Tensor, agreement: Tensor, parts: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The loss, and the share that each mask foresees."""
        foreseen = (layout.column + 2 + layout.mask).clamp(0, ids.shape[1] - 1)
        labels = self._index[ids.gather(1, foreseen)]
        agreement, total, weight = agreement.clone(), logits[:, :0].sum(), 0.0
        rows = torch.arange(len(ids), device=ids.device)[:, None].expand_as(foreseen)
        for j in range(self.adapter.num_masks):
            of_mask = (layout.mask == j) & (layout.column >= 0)
            counts = of_mask & (labels >= 0)
            if bool(of_mask.any()):
                agreement[j] = 0.0  # unless some label can be drafted
            if not bool(counts.any()):
                continue
            if self._loss is None:
                value = nn.functional.cross_entropy(logits[counts], labels[counts])
            else:
                taught = said[rows[counts], foreseen[counts] - 1]
                narrow = self._ids is not None and taught.shape[-1] != logits.shape[-1]
                value = self._loss(taught[:, self._ids] if narrow else taught, logits[counts])
            share = self.decay**j * float(counts.sum())
            total, weight = total + share * value, weight + share
            parts[f"mask{j}"] = value.detach()
            right = (logits[counts].detach().argmax(-1) == labels[counts]).sum()
            agreement[j] = right / of_mask.sum()  # a token that cannot be drafted is foreseen wrongly
        return total / max(weight, 1e-9), agreement
