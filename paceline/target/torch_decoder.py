"""Runs models in torch, with the layers of transformers: those that our kernels do not run, see `hf.describe`."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..attention.kv_cache import SlotCache
from ..attention.masks import PassLayout
from ..attention.recurrent import RecurrentLayer
from ..attention.states import StateStore
from ..hf.load import KV_CACHE
from .adapters import AttachedAdapter
from .corrections import Corrected, LowRank
from .recurrent_layers import recurrent_layers
from .waves import Waves

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TransformersDecoder:
    """Runs a model with the layers of transformers.

    attends_trees: whether they call our attention function; if not, they get a 4-D mask.
    """

    recurrent: Sequence[RecurrentLayer] = ()
    num_experts = experts_read = 0  # not counted

    def __init__(self, model: "PreTrainedModel", attends_trees: bool):
        self.attached: AttachedAdapter | None = None
        self.corrected: Corrected | None = None  # of its adapted layers, if it has some
        self.recurrent = recurrent_layers(model)
        self._model, self._attends_trees = model, attends_trees

    def prepare(self, low_rank: LowRank) -> int:
        """Nothing: a layer makes what it needs for its corrections in the first pass."""
        return 0

    def logits(
        self, token_ids: Tensor | None, layout: PassLayout, cache: SlotCache, states: StateStore | None
    ) -> Tensor:
        """Raw logits [B, N, V] of the last `layout.head_rows` nodes; hidden states go to `states`."""
        waves = None if cache.recurrent is None else Waves(cache.recurrent, layout)
        options: dict[str, object] = {"position_ids": layout.position_ids, KV_CACHE: cache, "use_cache": waves is None}
        if states is not None:
            options["output_hidden_states"] = True
        if layout.head_rows and layout.head_rows < layout.num_nodes:
            # Not as a number, by which some models cut the rows of layers that make no keys and values.
            options["logits_to_keep"] = torch.arange(-layout.head_rows, 0, device=layout.device)
        if self._attends_trees:
            options["paceline_pass"] = layout
        else:
            options["attention_mask"] = layout.mask_4d(self._model.dtype)
        rows = layout.rows
        if rows is not None:
            own = self._per_layer_inputs(token_ids, rows.is_image)
            options |= {"inputs_embeds": rows.embeds, **own, **rows.extras}
            if rows.deepstack:
                options |= {"visual_pos_masks": rows.is_image, "deepstack_visual_embeds": list(rows.deepstack)}
        elif self.attached is not None and layout.is_mask is not None:
            embeddings: nn.Module = self._model.get_input_embeddings()  # type: ignore[assignment]
            embeds = self.attached.embed(embeddings(token_ids))
            options |= {"inputs_embeds": embeds, **self._per_layer_inputs(token_ids)}
        else:
            options["input_ids"] = token_ids
        head_rows = layout.head_rows
        with nullcontext() if self.corrected is None else self.corrected.by(layout.corrections):
            out: Any = (self._model.base_model if head_rows == 0 else self._model)(**options)
        if waves is not None:
            waves.finish()
        if states is not None:
            nodes = {index: out.hidden_states[index] for index in states.layers}
            states.write(layout.slots, layout.starts, nodes, layout.num_nodes, cache.capacity)
        return torch.empty(0) if head_rows == 0 else out.logits[:, -(head_rows or 0) :]

    def _per_layer_inputs(self, token_ids: Tensor | None, is_image: Tensor | None = None) -> dict[str, Tensor]:
        """What a model with per-layer inputs looks up by tokens; images have those of padding."""
        base: Any = self._model.base_model
        if token_ids is None or not getattr(base, "hidden_size_per_layer_input", None):
            return {}
        if is_image is not None:
            token_ids = token_ids.masked_fill(is_image, base.padding_idx or 0)
        return {"per_layer_inputs": base.get_per_layer_inputs(token_ids)}
