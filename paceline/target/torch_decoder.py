"""Runs models in torch, with the layers of transformers or, for Llama-like models, with fused layers.

A small model on few rows spends most of a pass on small operations, not on weights. Fused layers need fewer operations;
they replace those of transformers in the module tree. `self_test` compares their results.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..attention.attend import Scores, attend
from ..attention.kv_cache import SlotCache
from ..attention.masks import PassLayout
from ..attention.recurrent import RecurrentLayer
from ..attention.states import StateStore
from ..hf.describe import has_fixed_ropes
from ..hf.load import KV_CACHE
from .adapters import AdaptedLinear, AttachedAdapter
from .recurrent_layers import recurrent_layers
from .waves import Waves

if TYPE_CHECKING:
    from transformers import PreTrainedModel
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


def _rms_norm(norm: Any) -> nn.RMSNorm:
    """A norm of transformers as torch's, which is a single operation."""
    fused = nn.RMSNorm(norm.weight.shape, float(norm.variance_epsilon), device="meta")
    fused.weight = norm.weight
    return fused


class FusedLayer(nn.Module):
    """x + o(attend(qkv(norm x))), then x + down(silu(gate(norm x)) * up(norm x)).

    It takes over the weights of a transformers layer. q, k and v are joined in one matrix [(Hq + 2 H) d, E], gate and
    up in one [2 I, E].
    """

    def __init__(self, layer: Any, index: int):
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.index, self.head_dim = index, int(attention.head_dim)
        self.kv_heads = int(attention.k_proj.out_features) // self.head_dim
        self.heads = int(attention.q_proj.out_features) // self.head_dim
        everywhere = getattr(attention.config, "sliding_window", None)  # Mistral; other models set it for each layer
        self.scores = Scores(float(attention.scaling), getattr(attention, "sliding_window", everywhere))
        self.qkv: nn.Module = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o: nn.Module = attention.o_proj
        self.gate_up: nn.Module = _joined(mlp.gate_proj, mlp.up_proj)
        self.down: nn.Module = mlp.down_proj
        self.norm = _rms_norm(layer.input_layernorm)
        self.mlp_norm = _rms_norm(layer.post_attention_layernorm)
        self.q_norm = _rms_norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.k_norm = _rms_norm(attention.k_norm) if hasattr(attention, "k_norm") else None
        inner, width = int(mlp.down_proj.in_features), int(mlp.down_proj.out_features)
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.places: dict[str, tuple[str, int, int]] = {  # transformers' name: module here, first output, outputs
            "self_attn.q_proj": ("qkv", 0, q),
            "self_attn.k_proj": ("qkv", q, kv),
            "self_attn.v_proj": ("qkv", q + kv, kv),
            "self_attn.o_proj": ("o", 0, width),
            "mlp.gate_proj": ("gate_up", 0, inner),
            "mlp.up_proj": ("gate_up", inner, inner),
            "mlp.down_proj": ("down", 0, width),
        }

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layout: PassLayout, cache: SlotCache) -> Tensor:
        """[B N, E] -> [B N, E]; cos and sin [B N, 1, d] are those of `FusedDecoder.rotations`."""
        batch, heads, d = len(layout.starts), self.heads, self.head_dim
        rotated_heads = heads + self.kv_heads
        qkv = project(self.qkv, self.norm.forward(x)).view(-1, rotated_heads + self.kv_heads, d)
        if self.q_norm is not None and self.k_norm is not None:
            qkv[:, :heads] = self.q_norm.forward(qkv[:, :heads])
            qkv[:, heads:rotated_heads] = self.k_norm.forward(qkv[:, heads:rotated_heads])
        qk = qkv[:, :rotated_heads]
        swapped = qk.roll(d // 2, -1)
        qk.mul_(cos).addcmul_(swapped, sin)
        query, key, value = (
            qkv.view(batch, -1, heads + 2 * self.kv_heads, d)
            .transpose(1, 2)
            .split((heads, self.kv_heads, self.kv_heads), 1)
        )
        keys, values = cache.update(key, value, self.index)
        out = attend(query, keys, values, layout, self.scores)
        x = project(self.o, out.reshape(x.shape[0], heads * d), plus=x)
        gate, up = project(self.gate_up, self.mlp_norm.forward(x)).chunk(2, -1)
        return project(self.down, nn.functional.silu(gate).mul_(up), plus=x)


class FusedDecoder:
    """Runs a model whose layers are fused: embeddings, layers, final norm, head."""

    recurrent: Sequence[RecurrentLayer] = ()

    def __init__(self, model: "PreTrainedModel", attached: AttachedAdapter | None = None):
        base: Any = model.base_model
        self.embeddings: Tensor = base.embed_tokens.weight
        self.layers: list[FusedLayer] = list(base.layers)
        self.norm = _rms_norm(base.norm)
        self.rotary_emb: Any = base.rotary_emb
        self.head: Any = model.get_output_embeddings()
        self.attached = attached
        self._cos = self._sin = torch.empty(0)

    def logits(
        self, token_ids: Tensor | None, layout: PassLayout, cache: SlotCache, states: StateStore | None
    ) -> Tensor:
        """Raw logits [B, N, V] of the last `layout.head_rows` nodes; hidden states go to `states`."""
        assert token_ids is not None
        if layout.rows is not None:
            x = layout.rows.embeds.flatten(0, 1).clone()  # the layers add to it in place
        else:
            x = nn.functional.embedding(token_ids.reshape(-1), self.embeddings)
        if self.attached is not None:
            x = self.attached.embed(x)
        places = layout.position_ids.reshape(-1)
        cos, sin = self.rotations(int(places.max()) + 1, x)
        watched = () if states is None else states.layers
        x, hidden_states = self.run_layers(x, cos[places], sin[places], layout, cache, watched)
        if states is not None:
            nodes = {layer: state.view(*token_ids.shape, -1) for layer, state in hidden_states.items()}
            states.write(layout.slots, layout.starts, nodes, layout.num_nodes, cache.capacity)
        if layout.head_rows == 0:
            return torch.empty(0)
        x = x.view(*token_ids.shape, -1)[:, -(layout.head_rows or 0) :]
        return self.head(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    def run_layers(
        self, x: Tensor, cos: Tensor, sin: Tensor, layout: PassLayout, cache: SlotCache, watched: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The last states [B N, E] after the final norm, and the hidden states of the watched layers."""
        hidden_states = dict[int, Tensor]()
        for index, layer in enumerate(self.layers):
            if index in watched:  # no others: they would take memory in every CUDA graph
                hidden_states[index] = x
            x = layer.forward(x, cos, sin, layout, cache)
        x = self.norm(x)
        if len(self.layers) in watched:
            hidden_states[len(self.layers)] = x
        return x, hidden_states

    def rotations(self, longest: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [P, 1, d] of at least all positions below `longest`; the first half of sin is negated.

        rotate_half(x) = (-x2, x1)      so      x cos + rotate_half(x) sin = x cos + (x2, x1) (-sin, sin)
        """
        if longest > len(self._cos):
            every = torch.arange(max(2 * longest, 1024), device=like.device)[None]
            cos, sin = self.rotary_emb(like, every)
            half = sin.shape[-1] // 2
            self._cos, self._sin = cos[0, :, None], torch.cat([-sin[..., :half], sin[..., half:]], -1)[0, :, None]
        return self._cos, self._sin


class TransformersDecoder:
    """Runs a model with the layers of transformers.

    attends_trees: whether they call our attention function; if not, they get a 4-D mask.
    """

    recurrent: Sequence[RecurrentLayer] = ()

    def __init__(self, model: "PreTrainedModel", attends_trees: bool, attached: AttachedAdapter | None = None):
        self.attached, self.recurrent = attached, recurrent_layers(model)
        self._model, self._attends_trees = model, attends_trees

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


def fuse(model: "PreTrainedModel") -> bool:
    """Replace the decoder layers of a Llama-like model; returns False for any other model, which is left unchanged."""
    config = model.config
    if config.model_type not in MODEL_TYPES or not has_fixed_ropes(config):
        return False
    if getattr(config, "hidden_act", "silu") not in ("silu", "swish"):
        return False
    layers: Any = model.base_model.layers
    for index, layer in enumerate(layers):
        layers[index] = FusedLayer(layer, index)
    return True


def is_fused(model: "PreTrainedModel") -> bool:
    """Whether `fuse` has replaced the layers."""
    return any(isinstance(module, FusedLayer) for module in model.modules())


def _joined(*linears: nn.Linear) -> nn.Linear:
    """One linear layer with the outputs of all given layers, one after another."""
    first = linears[0]
    rows = sum(linear.out_features for linear in linears)
    joined = nn.Linear(first.in_features, rows, first.bias is not None, device="meta")
    joined.weight = nn.Parameter(torch.cat([linear.weight for linear in linears]), requires_grad=False)
    if first.bias is not None:
        joined.bias = nn.Parameter(torch.cat([linear.bias for linear in linears]), requires_grad=False)
    return joined


def project(linear: nn.Module, x: Tensor, plus: Tensor | None = None) -> Tensor:
    """Apply a linear layer, [T, in] -> [T, out], and add `plus` [T, out] to the result in place."""
    if plus is None:
        return linear.forward(x)
    if type(linear) is AdaptedLinear:  # the same operation as without an adapter, so that plain rows keep their bits
        return linear.corrected(project(linear.base, x, plus), x)
    return linear.forward(x).add_(plus)
