"""Recurrent layers on a GPU: after rounds of drafts, the outputs and states of one token after another, bit for bit.

The kernels are called as passes call them; a reference in float64 shares no code with them.
"""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from paceline.attention.recurrent import RecurrentLayer, RecurrentStates
from paceline.kernels.gpu import Matrix, Norm, Recurrent, recurrent
from paceline.kernels.gpu.rows import plan
from tests.kernels.gpu.faults import with_fault
from tests.kernels.test_passes import random_tree

KINDS = ["delta rule", "state space", "short convolution"]
FAULTS = {  # what is there, and what takes its place
    "the node before": ("tl.maximum(node, 0)", "tl.maximum(node - 1, 0)"),
    "a convolution one token late": ("own - (TAPS - 1 - tap)", "own - (TAPS - tap)"),
    "a decay applied twice": ("state * decay)", "state * decay * decay)"),
    "a draft in the state": ("(step == moves - 1)", "(step == last - 1)"),
    "a ring row off by one": ("ring + column % ring)", "ring + (column + 1) % ring)"),
    "a row that the ring lacks": ("steps + b) - (TAPS - 1), 0)", "steps + b) - (TAPS - 2), 0)"),
    "waiting rows forgotten": ("first = moves", "first = waiting"),
    "the gate of the first head": ("gate_at + at, mask", "gate_at + lane, mask"),
}  # fmt: skip


def layer_of(kind: str) -> Any:
    """A small layer whose state has two blocks of values, or with biases, scales, a skip and norms of a group."""
    torch.manual_seed(1)
    which, (heads, key, value, taps) = KINDS.index(kind), ((2, 4, 20, 3), (4, 4, 8, 4), (0, 0, 0, 3))[KINDS.index(kind)]
    keys, values = key * (1 + (which == 1)), heads * value
    channels, groups = (2 * keys + values, 2 if which == 1 else 1) if heads else (20, 0)
    padded = -(-channels // 16) * 16
    conv = torch.zeros(taps, padded)
    conv[:, :channels] = torch.randn(taps, channels)
    layer = Recurrent(
        kind=which, conv=conv, taps=taps, channels=channels,
        heads=heads, key_heads=groups, key_dim=key, value_dim=value, width=channels + values + 2 * heads,
        gate_at=channels, step_at=channels + values, beta_at=channels + values + heads,
        q_at=0, k_at=keys, v_at=2 * keys, beta_scale=2.0, most_step=float("inf"), times=1.0,
        decay=-torch.rand(heads), step_bias=torch.randn(heads), norm_size=value, norm_shared=1,
        norm=Norm(torch.rand(max(1, value)), None, 1e-6, 1),
    )  # fmt: skip
    if kind == "state space":
        layer.scales, layer.skip = torch.rand(layer.width) + 0.5, torch.randn(heads)
        layer.conv_bias = torch.randn(padded)
        layer.norm_size, layer.norm_shared, layer.gate_first = values // 2, 0, 1
        layer.norm.weight = torch.rand(values)
    if not heads:
        layer.width, layer.gate_at, layer.times_at = 3 * channels, channels, 2 * channels
        layer.norm, layer.norm_size = Norm(), 0
    layer.inputs, layer.num_inputs = [Matrix(outs=layer.width, bias=torch.randn(layer.width))], 1
    return layer


def expected(r: Any, rows: Tensor) -> Tensor:
    """The output after each of these rows [T, width], in float64."""
    rows = rows.double() + r.inputs[0].bias
    if r.scales is not None:
        rows = rows * r.scales
    x, gate = rows[:, : r.channels], rows[:, r.gate_at : r.gate_at + (r.heads * r.value_dim or r.channels)]
    if not r.heads:
        x = x * rows[:, r.times_at : r.times_at + r.channels]
    x = torch.cat([x.new_zeros(r.taps - 1, r.channels), x])
    x = torch.stack([x[tap : tap + len(rows)] * r.conv[tap, : r.channels] for tap in range(r.taps)]).sum(0)
    if r.conv_bias is not None:
        x = x + r.conv_bias[: r.channels]
    if not r.heads:
        return gate * x
    x, groups, size = silu(x), r.key_heads, r.key_dim
    q, k = (x[:, at : at + groups * size].view(-1, groups, size) for at in (r.q_at, r.k_at))
    v = x[:, r.v_at : r.v_at + r.heads * r.value_dim].view(-1, r.heads, r.value_dim)
    is_delta = r.kind == 0
    if is_delta:
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        q = q / size**0.5
    q, k = (part.repeat_interleave(r.heads // groups, 1) for part in (q, k))
    step = softplus(rows[:, r.step_at : r.step_at + r.heads] + r.step_bias)
    decay = (step * r.decay).exp()
    factor = r.beta_scale * rows[:, r.beta_at : r.beta_at + r.heads].sigmoid() if is_delta else step
    state, out = torch.zeros(r.heads, size, r.value_dim, dtype=torch.float64), []
    for t in range(len(rows)):
        state = state * decay[t][:, None, None]
        known = torch.einsum("hkv,hk->hv", state, k[t]) if is_delta else 0.0
        state = state + torch.einsum("hk,hv->hkv", k[t], (v[t] - known) * factor[t][:, None])
        y = torch.einsum("hkv,hk->hv", state, q[t])
        out.append(y if r.skip is None else y + r.skip[:, None] * v[t])
    y, gate = torch.stack(out).view(len(rows), -1), silu(gate)
    y = (y * gate if r.gate_first else y).view(len(rows), -1, r.norm_size)
    y = y / (y.square().mean(-1, keepdim=True) + r.norm.eps).sqrt()
    y = (y * r.norm.weight.view(1, -1, r.norm_size)).view(len(rows), -1)
    return y if r.gate_first else y * gate


class Mixer:
    """A layer with three sequences, called as passes call it."""

    def __init__(self, layer: Any, walk: Callable[..., Any]):
        self.layer, self.walk, self.lengths = layer, walk, [0] * 3
        pad = lambda size: -(-size // 16) * 16  # noqa: E731
        state = (layer.heads, pad(layer.value_dim) // 16, layer.key_dim, 16) if layer.heads else (0,)
        kept = RecurrentLayer(0, pad(layer.channels) + 2 * pad(layer.heads), layer.taps - 1, state)
        self.kept = RecurrentStates([kept], self.lengths, torch.float32, torch.device("cpu"))

    def run(
        self, slots: list[int], rows: list[Tensor], parents: list[list[int]] | None = None, text: int = 0
    ) -> list[Tensor]:
        """The outputs of the nodes of each slot, whose inputs are `rows`."""
        sizes = [len(each) for each in rows]
        nodes = max(sizes)
        self.kept.begin(slots, nodes, text)
        number = lambda numbers: torch.tensor(numbers, dtype=torch.int32)  # noqa: E731
        padded = None if parents is None else number([[*up, *[-1] * (nodes - len(up))] for up in parents]).flatten()
        inputs: Any = SimpleNamespace(
            starts=number([self.lengths[slot] for slot in slots]), slots=number(slots), sizes=number(sizes),
            offsets=number([0] * len(slots)), bases=number([self.kept.bases[slot] for slot in slots]),
            steps=number(self.kept.steps), parents=padded,
        )  # fmt: skip
        x = torch.zeros(len(slots), nodes, self.layer.width)
        for to, each in zip(x, rows, strict=True):
            to[: len(each)] = each
        sums = torch.stack([x, x]).view(2, -1, self.layer.width) / 2  # in two parts
        places, paths = plan(inputs, nodes, 0, 1 << 20)
        held = self.kept.states[0], self.kept.rows[0]
        out = self.walk(self.layer, sums, *held, inputs, places, paths, torch.float32, False)
        self.kept.finish()
        return [each[:size] for each, size in zip(out.view(len(slots), nodes, -1), sizes, strict=True)]

    def commit(self, slot: int, nodes: list[int]) -> None:
        """Keep the root of the last pass and these nodes."""
        self.kept.commit(slot, self.lengths[slot], nodes)
        self.lengths[slot] += 1 + len(nodes)


def agrees(kind: str, walk: Callable[..., Any], seed: int = 3) -> bool:
    """Whether nodes of trees have the outputs of their paths, and rounds the bits of one token after another."""
    rng, layer = random.Random(seed), layer_of(kind)
    mixer, (one, other, plain) = Mixer(layer, walk), range(3)
    torch.manual_seed(seed)
    text = torch.randn(5, layer.width)
    got = mixer.run([one], [text], text=len(text))[0]
    mixer.commit(one, [*range(1, len(text))])
    if not torch.allclose(got.double(), expected(layer, text), atol=1e-4):
        return False
    for size, is_chain, is_held in ((5, False, False), (3, True, False), (3, False, True)):
        trees = [random_tree(count, rng).rows[0] for count in (size, 2)]
        trees[0].parents[:] = range(-1, size - 1) if is_chain else trees[0].parents
        rows = [torch.randn(len(tree), layer.width) for tree in trees]
        with mixer.kept.held([one] if is_held else []):
            if is_chain:
                outs = mixer.run([one], rows[:1])
            else:
                outs = mixer.run([other, one], rows[::-1], [tree.parents for tree in trees[::-1]])[::-1]
        for node in range(size):
            path = [0, *trees[0].path_to(node)]
            want = expected(layer, torch.cat([text, rows[0][path]]))[-1]
            if not torch.allclose(outs[0][node].double(), want, atol=1e-4):
                return False
        path = trees[0].path_to(rng.randrange(size))
        mixer.commit(one, path)
        text, got = torch.cat([text, rows[0][[0, *path]]]), torch.cat([got, outs[0][[0, *path]]])
    text = torch.cat([text, torch.randn(1, layer.width)])
    got = torch.cat([got, mixer.run([one], [text[-1:]])[0]])
    for row, out in zip(text, got, strict=True):
        if not torch.equal(mixer.run([plain], [row[None]])[0][0], out):
            return False
        mixer.lengths[plain] += 1
    return torch.equal(mixer.kept.states[0][one], mixer.kept.states[0][plain])


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_of_drafts_have_the_bits_of_one_token_after_another(kind):
    assert agrees(kind, recurrent.walk)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault, tmp_path):
    assert not agrees("delta rule", with_fault(recurrent, *FAULTS[fault], tmp_path).walk)
