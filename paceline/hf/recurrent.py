"""Describes the recurrent layers of hybrids for the native library, see `kernels/recurrent.h`."""

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.recurrent import RecurrentLayer
from ..kernels.library import RECURRENCES, Matrix, Norm, Pointers, Recurrent

_WIDE = 16  # columns of a block of a state, and what channels are padded to
MIXERS = ("linear_attn", "mamba", "mixer", "conv")
"""The names of recurrent sublayers in transformers' layers."""


def mixer_of(layer: nn.Module) -> Any:
    """The recurrent sublayer of a decoder layer, or None."""
    return next((getattr(layer, name) for name in MIXERS if hasattr(layer, name)), None)


def _padded(size: int) -> int:
    return -(-size // _WIDE) * _WIDE


class RecurrentDescription:
    """One recurrent layer as a structure of the library, and what it keeps of a sequence.

    matrix, held: as of `describe.Description`. Raises AttributeError for a layer of another kind.
    """

    def __init__(self, mixer: Any, index: int, matrix: Any, held: Pointers):
        self._held = held
        if hasattr(mixer, "in_proj_qkv"):
            self.struct = self._delta_rule(mixer, matrix)
        else:
            raise AttributeError(type(mixer).__name__)
        r = self.struct
        if r.key_dim % 4 or r.taps > 16:
            raise AttributeError(f"a key of {r.key_dim} numbers, {r.taps} taps")
        state = (r.heads, _padded(r.value_dim) // _WIDE, r.key_dim, _WIDE) if r.heads else (0,)
        self.kept = RecurrentLayer(index, _padded(r.channels) + 2 * _padded(r.heads), r.taps - 1, state)

    def _delta_rule(self, mixer: Any, matrix: Any) -> Recurrent:
        """Qwen3.5's gated delta net."""
        heads, key_heads, key_dim, value_dim = (
            int(getattr(mixer, name)) for name in ("num_v_heads", "num_k_heads", "head_k_dim", "head_v_dim")
        )
        channels, values, keys = int(mixer.conv_dim), heads * value_dim, key_heads * key_dim
        inputs = [mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_a, mixer.in_proj_b]
        return Recurrent(
            **self._common(mixer.conv1d, inputs, mixer.out_proj, matrix),
            **self._steps(mixer),
            kind=RECURRENCES["delta_rule"],
            width=channels + values + 2 * heads,
            heads=heads, key_heads=key_heads, key_dim=key_dim, value_dim=value_dim,
            q_at=0, k_at=keys, v_at=2 * keys,
            channels_at=0, gate_at=channels, step_at=channels + values, beta_at=channels + values + heads,
            norm=self._norm(mixer.norm), norm_size=value_dim, norm_shared=1,
            beta_scale=1.0,
        )  # fmt: skip

    def _common(self, conv: nn.Conv1d, inputs: list[Any], out: Any, matrix: Any) -> dict[str, Any]:
        """The matrices and the convolution."""
        channels, taps = conv.weight.shape[0], conv.weight.shape[-1]
        kernel = torch.zeros(taps, _padded(channels))
        kernel[:, :channels] = conv.weight.detach().float().view(channels, taps).T
        bias = None if conv.bias is None else nn.functional.pad(conv.bias.detach().float(), (0, -channels % _WIDE))
        return {
            "inputs": (Matrix * 6)(*map(matrix, inputs)), "num_inputs": len(inputs), "out": matrix(out),
            "conv": self._held.floats(kernel), "conv_bias": self._held.floats(bias),
            "channels": channels, "taps": taps, "times": 1.0,
        }  # fmt: skip

    def _steps(self, mixer: Any) -> dict[str, Any]:
        """The decay and the step of each head."""
        least, most = getattr(mixer, "time_step_limit", (0.0, float("inf")))
        decay: Tensor = -mixer.A_log.detach().float().exp()
        return {
            "decay": self._held.floats(decay), "step_bias": self._held.floats(mixer.dt_bias),
            "least_step": float(least), "most_step": float(most),
        }  # fmt: skip

    def _norm(self, norm: Any) -> Norm:
        eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        return Norm(self._held.floats(norm.weight), None, float(eps), 1)

    @property
    def pointer(self) -> Any:
        self._held.append(self.struct)
        return ctypes.pointer(self.struct)
