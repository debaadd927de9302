"""Random layers of experts, for the kernels and as a slow oracle of one row in float64."""

from collections.abc import Sequence
from ctypes import c_int64
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.kernels import library as kernels
from paceline.kernels.library import ACTIVATIONS, SCORINGS, BlockFormat, Pointers, address
from paceline.kernels.packing import Bf12, pack
from paceline.quant.packed import PackedMatrix
from tests import gguf_files
from tests.kernels.test_blocks import packed, random_blocks, rounded, weights_of

_EPS = 1e-5


@dataclass(frozen=True)
class Rules:
    """How many experts there are, of which size and form, how they are chosen, and what is beside them.

    form, bits: of weights (a dtype, "BF12" or a block format), and of the integers that blocks are multiplied with.
    second: those of their second layers, where they are others. shared: the inner size of the MLP beside them, or 0.
    The fields from `scoring` to `plus` are those of `Experts` in `abi.h`.
    """

    count: int = 7
    chosen: int = 3
    hidden: int = 72
    inner: int = 40
    form: Any = torch.float32
    bits: int = 8
    second: tuple[Any, int] | None = None
    biases: bool = False
    is_plain: bool = False
    activation: str = "silu"
    shared: int = 0
    shared_gate: bool = False
    norms: tuple[str, ...] = ("before_mlp",)
    choice_bias: bool = False
    scale: bool = False
    scoring: str = "softmax"
    divides: bool = True
    groups: int = 0
    chosen_groups: int = 0
    of_group: int = 0
    least_sum: float = 0.0
    more_sum: float = 0.0
    times: float = 1.0
    alpha: float = 1.0
    limit: float = 0.0
    plus: float = 0.0


class Linear:
    """Random weights for the kernels, and what they are in float64."""

    def __init__(self, outs: int, ins: int, form: Any = torch.float32, bits: int = 8, bias: bool = False):
        self.form, self.bits, self.bias = form, bits, torch.randn(outs) / 2 if bias else None
        if isinstance(form, BlockFormat):
            size = 0.0003 if form.name.endswith("K") else 0.01
            made = (
                gguf_files.random_blocks(form.name, outs, ins, size=size)
                if form.is_in_files
                else random_blocks(form, outs, ins)
            )
            if form is BlockFormat.MXFP4:
                made.reshape(outs, -1, 17)[..., 0] = np.random.default_rng(ins).integers(120, 124, (outs, ins // 32))
            made = np.ascontiguousarray(made[torch.randperm(outs).numpy()])
            data, weight = packed(form, made, ins), weights_of(form, made)
        else:
            weight = (torch.randn(outs, ins) * 1.5 / ins**0.5).to(torch.bfloat16 if form == "BF12" else form)
            data = Bf12.of(weight) if form == "BF12" else pack(weight)
        assert data is not None
        self.weight, self.matrix = weight.double(), PackedMatrix(outs, ins, data, self.bias, bits)

    def __call__(self, x: Tensor) -> Tensor:
        """float64 [in] -> [out], of inputs as the kernels read them."""
        if isinstance(self.form, BlockFormat):
            x = rounded(self.form, x[None], self.bits)[0]
        elif self.form in (torch.bfloat16, "BF12") and kernels.library().paceline_isa() in (b"avx512_bf16", b"amx"):
            x = x.bfloat16().double()
        return (self.weight * x).sum(-1) + (0 if self.bias is None else self.bias.double())


class Layer:
    """A layer with these rules: `struct` for the kernels, `of_row` in float64.

    router: its weights, where they are given.
    """

    def __init__(self, rules: Rules, seed: int = 0, router: Tensor | None = None):
        torch.manual_seed(seed)
        self.rules, hidden, how = rules, rules.hidden, (rules.form, rules.bits, rules.biases)
        self.router, sizes = Linear(rules.count, hidden, bias=rules.biases), (rules.shared, hidden)
        if router is not None:
            self.router.weight, self.router.matrix = (
                router.double(),
                PackedMatrix(len(router), hidden, pack(router), None),
            )
        self.gates = [] if rules.is_plain else [Linear(rules.inner, hidden, *how) for _ in range(rules.count)]
        self.ups = [Linear(rules.inner, hidden, *how) for _ in range(rules.count)]
        self.downs = [
            Linear(hidden, rules.inner, *(rules.second or (rules.form, rules.bits)), rules.biases)
            for _ in range(rules.count)
        ]
        self.shared = [Linear(*sizes), Linear(*sizes), Linear(*sizes[::-1])] if rules.shared else []
        self.shared_gate = Linear(1, hidden) if rules.shared_gate else None
        self.choice_bias = torch.randn(rules.count) if rules.choice_bias else None
        self.scale = torch.rand(rules.count) + 0.5 if rules.scale else None
        self.norms = {name: torch.rand(hidden) + 0.5 for name in rules.norms}
        self._held = Pointers()
        self.struct = self._described()

    def _described(self) -> Any:
        held, rules = self._held, self.rules

        def norm(name: str) -> Any:
            return kernels.Norm(address(self.norms.get(name)), None, _EPS, int(name in self.norms))

        def matrices(linears: list[Linear]) -> Any:
            return held.structures(kernels.Matrix, [one.matrix.struct for one in linears])

        made = kernels.Experts(
            router=self.router.matrix.struct, up=matrices(self.ups), down=matrices(self.downs),
            choice_bias=address(self.choice_bias), scale=address(self.scale), scoring=SCORINGS[rules.scoring],
        )  # fmt: skip
        for name in ("router_norm", "experts_norm", "after_shared", "after_experts"):
            setattr(made, name, norm(name))
        for name, *_ in kernels.Experts._fields_:
            if hasattr(rules, name) and name not in ("choice_bias", "scale", "scoring", "shared_gate"):
                setattr(made, name, getattr(rules, name))
        layer = kernels.Layer(head_dim=1, mlp_times=0.7, gate_times=1.0, activation=ACTIVATIONS[rules.activation])
        layer.before_mlp, layer.after_mlp = norm("before_mlp"), norm("after_mlp")
        if self.gates:
            made.gate = matrices(self.gates)
        if self.shared:
            layer.gate, layer.up, layer.down = (one.matrix.struct for one in self.shared)
        if self.shared_gate:
            made.shared_gate = self.shared_gate.matrix.struct
        layer.experts = held.pointer(made)
        return layer

    def of_row(self, x: Tensor) -> tuple[Tensor, list[int]]:
        """float64 [E] -> what the layer makes of a row, and the experts that it chose, best first."""
        rules, read = self.rules, self._norm("before_mlp", x)
        logits = self.router(self._norm("router_norm", x) if "router_norm" in self.norms else read)
        scores = logits.softmax(0) if rules.scoring == "softmax" else logits.sigmoid()
        chosen = self.choose([*map(float, scores if self.choice_bias is None else scores + self.choice_bias)])
        total = sum(float(scores[i]) for i in chosen)
        given = self._norm("experts_norm", x) if "experts_norm" in self.norms else read
        y = torch.zeros_like(x)
        for i in chosen:
            weight = float(scores[i]) * rules.times * (1 if self.scale is None else float(self.scale[i]))
            y += (
                weight / (max(total, rules.least_sum) + rules.more_sum if rules.divides else 1) * self._expert(i, given)
            )
        y = self._norm("after_experts", y)
        if self.shared:
            gate, up, down = self.shared
            factor = 1 if self.shared_gate is None else self.shared_gate(read).sigmoid()
            y += factor * self._norm("after_shared", down(self._active(gate(read)) * up(read)))
        return x + 0.7 * self._norm("after_mlp", y), chosen

    def choose(self, keys: list[float]) -> list[int]:
        """The experts with the best keys: on a tie the first, and NaN last."""
        rules, allowed = self.rules, range(len(keys))

        def best(of: Sequence[float], places: Sequence[int], count: int) -> list[int]:
            return sorted(places, key=lambda i: (of[i] != of[i], -of[i], i))[:count]

        if rules.groups:
            size = len(keys) // rules.groups
            groups = [range(g * size, g * size + size) for g in range(rules.groups)]
            sums = [sum(keys[i] for i in best(keys, group, rules.of_group)) for group in groups]
            allowed = [i for g in best(sums, range(rules.groups), rules.chosen_groups) for i in groups[g]]
        return best(keys, allowed, rules.chosen)

    def _expert(self, i: int, x: Tensor) -> Tensor:
        rules, up = self.rules, self.ups[i](x)
        if rules.is_plain:
            return self.downs[i](self._active(up))
        gate, infinity = self.gates[i](x), float("inf")
        gate, up = (
            gate.clamp(max=rules.limit or infinity),
            up.clamp(*(-(rules.limit or infinity), rules.limit or infinity)),
        )
        inner = gate * (rules.alpha * gate).sigmoid() if rules.activation == "silu" else self._active(gate)
        return self.downs[i](inner * (up + rules.plus))

    def _active(self, x: Tensor) -> Tensor:
        if self.rules.activation == "relu2":
            return x.relu() ** 2
        return nn.functional.silu(x) if self.rules.activation == "silu" else nn.functional.gelu(x, approximate="tanh")

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean() + _EPS).sqrt() * self.norms[name].double() if name in self.norms else x


def run(layers: Sequence[Layer], rows: Tensor, sizes: Sequence[int] | None = None) -> tuple[Tensor, int]:
    """Layers over float32 [B, N, E] by the kernels: what they make of the rows, and how many experts the pass read."""
    held, (batch, nodes, hidden), out, read = Pointers(), rows.shape, torch.zeros_like(rows), c_int64()
    model = kernels.Model(
        layers=held.structures(kernels.Layer, [layer.struct for layer in layers]),
        num_layers=len(layers), hidden=hidden, cache_format=2,
    )  # fmt: skip
    step = kernels.Pass(
        batch=batch, nodes=nodes, capacity=nodes, rows=held.tensor(rows.contiguous()), last_hidden=address(out),
        starts=held.integers([0] * batch), slots=held.integers([0] * batch), num_experts=kernels.start_of(read),
        sizes=None if sizes is None else held.integers(sizes),
    )  # fmt: skip
    kernels.run(model, step)
    return out, read.value
