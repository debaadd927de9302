"""Sinks and rotations of one layer of attention against an oracle of one row in float64."""

import random

import pytest
import torch
from torch import Tensor

from paceline.kernels import library as kernels
from paceline.kernels import load
from paceline.kernels.library import Pointers, address
from tests.kernels.expert_layers import Linear
from tests.kernels.kv_formats import KvFormat, is_rounded, read_rows, row_width
from tests.kernels.test_passes import random_tree

pytestmark = pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}")

HEADS, KEYS, ROTATED = 6, 2, 12


def attends(
    has_sinks: bool = False, pairs: bool = False, window: int = 0, nodes: int = 23, width: int = 16,
    form: KvFormat | None = None,
) -> bool:  # fmt: skip
    """Whether a pass over a random tree makes of each row what the oracle does, of keys and values as cached."""
    torch.manual_seed(0)
    tree, held, hidden = random_tree(nodes, random.Random(nodes)).rows[0], Pointers(), 40
    q, k, v, o = (
        Linear(HEADS * width, hidden),
        *(Linear(KEYS * width, hidden) for _ in "kv"),
        Linear(hidden, HEADS * width),
    )
    rows, sinks, angles = torch.randn(nodes, hidden), torch.randn(HEADS) * 2, torch.rand(nodes, ROTATED // 2) * 6
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    paths = [[0, *tree.path_to(node)] for node in range(nodes)]

    def rotated(x: Tensor, position: int) -> Tensor:
        first, second = (
            (slice(0, ROTATED, 2), slice(1, ROTATED, 2))
            if pairs
            else (slice(ROTATED // 2), slice(ROTATED // 2, ROTATED))
        )
        turned, angle = x.clone(), angles[position].double()
        turned[:, first] = x[:, first] * angle.cos() - x[:, second] * angle.sin()
        turned[:, second] = x[:, second] * angle.cos() + x[:, first] * angle.sin()
        return turned

    parts = [[one(row).view(-1, width) for row in rows.double()] for one in (q, k, v)]
    queries, keys = ([rotated(x, len(path) - 1) for x, path in zip(part, paths, strict=True)] for part in parts[:2])
    layer = kernels.Layer(
        heads=HEADS, kv_heads=KEYS, head_dim=width, rotary_dim=ROTATED, rotary_pairs=pairs, window=window, scale=0.3,
        attention_times=1.0, sinks=address(sinks) if has_sinks else None,
        **{name: one.matrix.struct for name, one in zip("qkvo", (q, k, v, o), strict=True)},
    )  # fmt: skip
    model = kernels.Model(layers=held.structures(kernels.Layer, [layer]), num_layers=1, hidden=hidden, cache_format=2)
    out, cache = torch.zeros(nodes, hidden), [*torch.zeros(2, 1, KEYS, nodes, width)]
    if form is not None:
        model.kv_format = form
        cache = [*torch.zeros(2, 1, KEYS, nodes, row_width(form, width), dtype=torch.uint8)]
    step = kernels.Pass(
        batch=1, nodes=nodes, capacity=nodes, rows=address(rows), last_hidden=address(out), max_position=nodes - 1,
        parents=held.integers(tree.parents), starts=held.integers([0]), slots=held.integers([0]),
        cos=held.tensors([cos]), sin=held.tensors([sin]), keys=held.tensors(cache[:1]), values=held.tensors(cache[1:]),
    )  # fmt: skip
    kernels.run(model, step)
    exact = torch.stack([torch.stack(part) for part in (keys, parts[2])]).transpose(1, 2)  # [2, KEYS, nodes, width]
    held = torch.stack([part[0] if form is None else read_rows(part[0], form, width) for part in cache]).double()
    want = []
    for row, query, path in zip(rows.double(), queries, paths, strict=True):
        seen, outputs = path[-window:], []
        for head in range(HEADS):
            own_keys, own_values = held[:, head // (HEADS // KEYS), seen]
            scores = 0.3 * own_keys @ query[head]
            if has_sinks:
                scores = torch.cat([scores, sinks[head : head + 1].double()])
            outputs.append(scores.softmax(0)[: len(seen)] @ own_values)
        want.append(row + o(torch.cat(outputs)))
    is_close = (held - exact).abs().max() < 1e-5 if form is None else is_rounded(held, exact, form)
    return bool(is_close and (out - torch.stack(want)).abs().max() < 1e-5)


@pytest.mark.parametrize("nodes", [1, 23])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("pairs", [False, True])
def test_attention_is_what_the_oracle_says(isa, has_sinks, pairs, window, nodes):
    assert attends(has_sinks, pairs, window, nodes)
