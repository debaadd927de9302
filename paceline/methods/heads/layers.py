"""Decoder layers of heads in Llama's and Qwen3's form, and their rotary positions.

h = x + attention(norm x)      y = h + mlp(norm h)      mlp(x) = down(silu(gate x) * up x)
"""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY
from typing import Annotated, Any, TypeAlias

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ...errors import ConfigError
from ...hf.settings import ROPE, check_settings
from ...schema import Positive, checked
from .parts import Count, HeadConfig, Width


@checked
class LayersConfig(HeadConfig):
    """Shape of a head of decoder layers.

    attention_bias: of queries, keys and values. qk_norm: queries and keys are normed, as in Qwen3. rope_scaling: of
    rotary positions, as in the config.json of a Llama model, of type "llama3", "yarn" or "linear"; None: they are not
    scaled. output_gate: the output of attention is gated, by as many more outputs of the queries' layer, as in Qwen3.5.
    partial_rotary_factor: the part of each head that is rotated.
    """

    intermediate_size: Width
    num_attention_heads: Width
    num_key_value_heads: Width
    head_dim: Width
    _: KW_ONLY
    num_hidden_layers: Count = 1
    rms_norm_eps: Positive = 1e-5
    rope_theta: Positive = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    attention_bias: bool = False
    qk_norm: bool = False
    output_gate: bool = False
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2 or self.rotary_dim % 2:
            raise ConfigError(
                "the attention of this head does not work out",
                got=f"{self.num_attention_heads} heads of {self.head_dim} over {self.num_key_value_heads} of keys",
                expected="as many for each of the keys, of an even size",
            )
        frequencies(self, torch.device("cpu"))  # which may raise

    @property
    def rotary_dim(self) -> int:
        """How many channels of each head are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    def norm(self, width: int | None = None) -> nn.RMSNorm:
        """A norm over this many channels; None: `hidden_size`."""
        return nn.RMSNorm(width or self.hidden_size, self.rms_norm_eps)


Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of queries [B, Hq, N, d] given the new keys and values [B, H, N, d]; returns [B, Hq, N, d].

It is called once for each layer, in their order.
"""


def attend_causally(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of a text to itself."""
    return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; the caller's `attend` keeps the keys and masks them.

    width: of the input.
    """

    def __init__(self, config: LayersConfig, width: int):
        super().__init__()
        self.head_dim, bias = config.head_dim, config.attention_bias
        self.parts = 2 if config.output_gate else 1  # of the queries: themselves, and the gates of the output
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, queries * self.parts, bias)
        self.k_proj = nn.Linear(width, keys, bias)
        self.v_proj = nn.Linear(width, keys, bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, False)
        self.q_norm, self.k_norm = (config.norm(self.head_dim) if config.qk_norm else nn.Identity() for _ in range(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of rows: [B, N, width] -> [B, H, N, d] each."""
        key = self.k_norm(self._heads(self.k_proj(x)))
        return rotated(key, cos, sin), self._heads(self.v_proj(x))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """[B, N, width] -> [B, N, E]."""
        query, *gate = self.q_proj(x).view(*x.shape[:2], -1, self.parts * self.head_dim).chunk(self.parts, -1)
        query = rotated(self.q_norm(query.transpose(1, 2)), cos, sin)
        attended = attend(query, *self.keys_values(x, cos, sin)).transpose(1, 2)
        return self.o_proj((attended * gate[0].sigmoid() if gate else attended).reshape(*x.shape[:2], -1))


class Mlp(nn.Module):
    """The gated MLP: down(silu(gate x) * up x)."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """An ordinary decoder layer."""

    def __init__(self, config: LayersConfig):
        super().__init__()
        self.self_attn = Attention(config, config.hidden_size)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size)
        self.input_layernorm, self.post_attention_layernorm = config.norm(), config.norm()

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """[B, N, E] -> [B, N, E]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Rotary:
    """Cosines and sines of rotary positions (Su et al. 2021, arXiv 2104.09864)."""

    def __init__(self, config: LayersConfig):
        self._config = config
        self._frequencies: tuple[Tensor, float] | None = None  # on the device where they were needed last

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[B, N] -> float32 [B, 1, N, rotary_dim] each."""
        if self._frequencies is None or self._frequencies[0].device != positions.device:
            self._frequencies = frequencies(self._config, positions.device)
        angles_of, factor = self._frequencies
        angles = positions.float()[..., None] * angles_of
        angles = torch.cat([angles, angles], -1)[:, None]
        return angles.cos() * factor, angles.sin() * factor


_SCALES = ROPE.keys() - {"rope_theta", "partial_rotary_factor"} | {"rope_type", "type"}


def frequencies(config: LayersConfig, device: torch.device) -> tuple[Tensor, float]:
    """Angles per position, float32 [rotary_dim / 2], and the factor of cosines and sines.

    With `rope_scaling`, as transformers computes them. Raises `ConfigError`.
    """
    d, theta, scaling = config.rotary_dim, config.rope_theta, config.rope_scaling
    if scaling is None:
        return theta ** -(torch.arange(0, d, 2, dtype=torch.float32, device=device) / d), 1.0
    kind, length = scaling.get("rope_type", scaling.get("type")), scaling.get("original_max_position_embeddings")
    if kind not in ("llama3", "yarn", "linear"):
        raise ConfigError("unknown rope_scaling of a head", got=kind, expected="llama3, yarn or linear")
    if unknown := scaling.keys() - _SCALES:
        expected = "some of " + ", ".join(sorted(_SCALES))
        raise ConfigError("unknown rope_scaling of a head", got=min(unknown), expected=expected)
    check_settings("the rope_scaling of this head", scaling)
    try:
        if kind != "linear" and not length:
            raise ValueError("no original_max_position_embeddings")
        rope = {**scaling, "rope_theta": theta}
        llama = LlamaConfig(head_dim=d, max_position_embeddings=1 << 30, rope_parameters=rope)
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](llama, device)
        if not bool(frequencies.isfinite().all()):
            raise ValueError(f"factor {scaling.get('factor')}")
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError("the rope_scaling of this head is not sound", got=str(error)) from error
    return frequencies, factor


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys [B, H, N, d] by their positions, in the half-split form of Llama: their first channels.

    (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)
    """
    x, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    first, second = x.chunk(2, -1)
    return torch.cat([(x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype), rest], -1)
