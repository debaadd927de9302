"""Describes the recurrent layers of hybrids for the native library, see `kernels/recurrent.h`."""

from typing import Any

import torch
from torch import Tensor, nn

from ..attention.recurrent import RecurrentLayer
from ..kernels.library import RECURRENCES

_WIDE = 16  # columns of a block of a state, and what channels are padded to


def is_recurrent(part: Any) -> bool:
    """Whether a module is a recurrent layer of a kind that transformers has with a convolution."""
    return any(isinstance(getattr(part, name, None), nn.Conv1d) for name in ("conv1d", "conv"))


def _padded(size: int) -> int:
    return -(-size // _WIDE) * _WIDE


def _orders(mixer: Any) -> tuple[Tensor, Tensor]:
    """Where the outputs of `in_proj_qkvz` and `in_proj_ba`, which lie by key head, are when each kind lies together:
    queries, keys, values, gates; a, b."""
    heads, each = int(mixer.num_k_heads), int(mixer.num_v_heads // mixer.num_k_heads)
    keys, values = int(mixer.head_k_dim), each * int(mixer.head_v_dim)

    def order(*sizes: int) -> tuple[Tensor, ...]:
        return torch.arange(heads * sum(sizes)).view(heads, -1).split(sizes, 1)

    b, a = order(each, each)
    return torch.cat([part.flatten() for part in order(keys, keys, values, values)]), torch.cat((a, b)).flatten()


class RecurrentDescription:
    """One recurrent layer as a structure of the library, and what it keeps of a sequence.

    matrix, held, kernels: as of `describe.Description`. Raises AttributeError for a layer of another kind.
    """

    def __init__(self, mixer: Any, index: int, matrix: Any, held: Any, kernels: Any):
        self._held, self._kernels = held, kernels
        if isinstance(getattr(mixer, "conv", None), nn.Conv1d):
            self.struct = self._short_conv(mixer, matrix)
        elif hasattr(mixer, "ssm_state_size"):
            self.struct = self._state_space(mixer, matrix)
        else:
            self.struct = self._delta_rule(mixer, matrix)
        r = self.struct
        if r.key_dim % 4 or r.taps > 16 or getattr(mixer, "activation", "silu") not in ("silu", "swish"):
            raise AttributeError(f"a key of {r.key_dim} numbers, {r.taps} taps, {mixer.activation}")
        state = (r.heads, _padded(r.value_dim) // _WIDE, r.key_dim, _WIDE) if r.heads else (0,)
        self.kept = RecurrentLayer(index, _padded(r.channels) + 2 * _padded(r.heads), r.taps - 1, state)

    def _delta_rule(self, mixer: Any, matrix: Any) -> Any:
        """The gated delta net of Qwen3-Next, Qwen3.5 and OLMo Hybrid."""
        heads, key_heads, key_dim, value_dim = (
            int(getattr(mixer, name)) for name in ("num_v_heads", "num_k_heads", "head_k_dim", "head_v_dim")
        )
        channels, values, keys = int(mixer.conv_dim), heads * value_dim, key_heads * key_dim
        names = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b")
        if not hasattr(mixer, names[0]):
            names = ("q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj")
        out = mixer.out_proj if hasattr(mixer, "out_proj") else mixer.o_proj
        if hasattr(mixer, "in_proj_qkvz"):
            inputs = [*map(self._apart, (mixer.in_proj_qkvz, mixer.in_proj_ba), _orders(mixer))]
        else:
            inputs = [matrix(getattr(mixer, name)) for name in names]
        return self._kernels.Recurrent(
            **self._common(mixer.conv1d, inputs, matrix(out)),
            **self._steps(mixer),
            kind=RECURRENCES["delta_rule"], width=channels + values + 2 * heads,
            heads=heads, key_heads=key_heads, key_dim=key_dim, value_dim=value_dim,
            q_at=0, k_at=keys, v_at=2 * keys,
            channels_at=0, gate_at=channels, step_at=channels + values, beta_at=channels + values + heads,
            norm=self._norm(mixer.norm if hasattr(mixer, "norm") else mixer.o_norm), norm_size=value_dim, norm_shared=1,
            beta_scale=2.0 if getattr(mixer, "allow_neg_eigval", False) else 1.0,
        )  # fmt: skip

    def _state_space(self, mixer: Any, matrix: Any) -> Any:
        """Mamba-2, as in Bamba, Falcon-H1, Granite 4 and Nemotron-H."""
        heads, groups, size = int(mixer.num_heads), int(mixer.n_groups), int(mixer.ssm_state_size)
        values, channels = int(mixer.intermediate_size), int(mixer.conv_dim)
        norm = None if isinstance(mixer.norm, nn.Identity) else mixer.norm
        struct = self._kernels.Recurrent(
            **self._common(mixer.conv1d, [matrix(mixer.in_proj)], matrix(mixer.out_proj)),
            **self._steps(mixer),
            kind=RECURRENCES["state_space"], width=values + channels + heads, skip=self._held.floats(mixer.D),
            heads=heads, key_heads=groups, key_dim=size, value_dim=int(mixer.head_dim),
            v_at=0, k_at=values, q_at=values + groups * size,
            gate_at=0, channels_at=values, step_at=values + channels,
            norm_size=values // groups, gate_first=not getattr(norm, "norm_before_gate", False),
        )  # fmt: skip
        if norm is not None:
            struct.norm = self._norm(norm)
        if hasattr(mixer, "mup_vector"):  # Falcon-H1
            struct.scales = self._held.floats(mixer.mup_vector.flatten() * mixer.ssm_in_multiplier)
        return struct

    def _short_conv(self, mixer: Any, matrix: Any) -> Any:
        """The gated convolution of LFM2."""
        size = int(mixer.conv.weight.shape[0])
        return self._kernels.Recurrent(
            **self._common(mixer.conv, [matrix(mixer.in_proj)], matrix(mixer.out_proj)),
            kind=RECURRENCES["short_conv"], width=3 * size, times_at=0, gate_at=size, channels_at=2 * size,
        )  # fmt: skip

    def _apart(self, linear: Any, order: Tensor) -> Any:
        """The outputs of a layer in another order."""
        self._held.append(made := self._kernels.matrix_of(linear).rows(order))
        return made.struct

    def _common(self, conv: nn.Conv1d, inputs: list[Any], out: Any) -> dict[str, Any]:
        """The matrices and the convolution."""
        channels, taps = conv.weight.shape[0], conv.weight.shape[-1]
        kernel = torch.zeros(taps, _padded(channels), device=conv.weight.device)
        kernel[:, :channels] = conv.weight.detach().float().view(channels, taps).T
        bias = None if conv.bias is None else nn.functional.pad(conv.bias.detach().float(), (0, -channels % _WIDE))
        return {
            "inputs": self._held.structures(self._kernels.Matrix, inputs, 6),
            "num_inputs": len(inputs), "out": out,
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

    def _norm(self, norm: Any) -> Any:
        eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        return self._kernels.Norm(self._held.floats(norm.weight), None, float(eps), 1)
