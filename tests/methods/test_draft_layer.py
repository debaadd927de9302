"""A draft layer in the native library: level by level as in one pass, by the torch modules, and its best tokens."""

import itertools
import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from paceline.kernels import load
from paceline.kernels.packing import Bf12
from paceline.methods.eagle.head import EagleConfig, EagleHead
from paceline.methods.heads import draft_layer
from paceline.methods.heads.draft_layer import LayerPass, NativeLayer, pack_head
from paceline.methods.heads.top_tokens import TokenRanking
from paceline.quant.int8 import to_int8
from paceline.quant.packed import PackedLinear, PackedMatrix
from tests.kernels import conftest
from tests.methods.heads import causal

pytestmark = pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}")
E, H, D, V = 64, 2, 16, 300
isa = conftest.isa  # the fixture


@dataclass(frozen=True)
class Sizes:
    """Of a head. GPU kernels have smaller ones, since Triton's interpreter is slow."""

    width: int = E
    heads: int = H
    head_dim: int = D
    vocabulary: int = V
    inner: int = 96


def made(
    version: int | str, dtype: torch.dtype, sizes: Sizes = Sizes(), **options
) -> tuple[EagleHead, NativeLayer, Tensor]:
    """A head with random weights, its layer for the kernels, and embeddings."""
    torch.manual_seed(1)
    e, h, v = sizes.width, sizes.heads, sizes.vocabulary
    config = EagleConfig(e, (0,), v, v, sizes.inner, 2 * h, h, sizes.head_dim, version, e, own_lm_head=True, **options)
    head = EagleHead(config).to(dtype).eval().requires_grad_(False)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    embeddings = torch.randn(v, e, dtype=dtype)
    head.attach(embeddings, embeddings)
    copied = EagleHead(config).to(dtype).requires_grad_(False)
    copied.load_state_dict(head.state_dict())
    pack_head(copied.attach(embeddings, embeddings))
    return head, NativeLayer(copied, copied.fc, version != 3), embeddings


def held(dtype: torch.dtype) -> torch.dtype:
    """What a packed head of this dtype holds here."""
    return dtype if dtype is torch.float32 or load().isa == "portable" else torch.uint8


def cache(slots: int, dtype: torch.dtype, layers: int = 1, sizes: Sizes = Sizes()) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values with rubbish in them: no row may read a column that was not written for it."""
    size = slots, sizes.heads, 160, sizes.head_dim
    return tuple([torch.full(size, rubbish, dtype=dtype) for _ in range(layers)] for rubbish in (torch.nan, torch.inf))


def random_parents(count: int, batch: int, rng: random.Random) -> Tensor:
    """Trees below the last kept column, nodes in the order of their levels. [B, N]."""
    rows = []
    for _ in range(batch):
        rows.append([-1] + [rng.randrange(-1, n) for n in range(1, count)])
    return torch.tensor(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("version", "options"),
    [(1, {}), (3, {}), (3, {"num_hidden_layers": 2}), (3, {"fc_norm": True, "norm_output": True}), ("mtp", {})],
    ids=str,
)
def test_levels_have_the_bits_of_one_pass(version, options, dtype, isa):
    """Whatever was written by passes before, in whichever slots and behind texts of other lengths."""
    for starts in ([5, 90, 31], [17], [0, 3]):
        assert levels_have_the_bits_of_one_pass(starts, 13, [0, 1, 4, 5, 13], version, dtype, **options)


def levels_have_the_bits_of_one_pass(starts, count, cuts, version, dtype, sizes=Sizes(), **options) -> bool:
    """cuts: where the levels of trees of `count` nodes begin and end. starts: the committed columns of each tree."""
    rng, batch = random.Random(1), len(starts)
    head, layer, _ = made(version, dtype, sizes, **options)
    slots, draw = rng.sample(range(4), batch), lambda *shape: torch.randint(sizes.vocabulary, shape)
    text = torch.randn(batch, max(starts) + 1, sizes.width), draw(batch, max(starts) + 1)
    rows, ids = torch.randn(batch, count, sizes.width), draw(batch, count)
    parents = random_parents(count, batch, rng)
    found = []
    for places in ([0, count], cuts):
        keys, values = cache(4, dtype, head.config.num_hidden_layers, sizes)
        for row, (slot, start) in enumerate(zip(slots, starts, strict=True)):
            if start:
                one = slice(row, row + 1), slice(0, start)
                layer(LayerPass(keys, values, [slot], [0], text[1][one], text[0][one], kv_only=True))
        levels = [
            layer(LayerPass(
                keys, values, slots, starts, ids[:, a:b], rows[:, a:b], False,
                parents[:, :b].contiguous(), a, head_rows=b - a,
            ))
            for a, b in itertools.pairwise(places)
        ]  # fmt: skip
        found.append([torch.cat([getattr(level, name) for level in levels], 1) for name in ("hidden", "logits")])
    assert found[0][1].isfinite().all()
    return all(torch.equal(whole, parts) for whole, parts in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_states_of_the_target_are_projected_in_the_pass(dtype, isa):
    """With the bits of the head's first linear layer, for several rows of several slots."""
    assert projects_with_the_bits_of_fc(dtype)


def projects_with_the_bits_of_fc(dtype: torch.dtype) -> bool:
    head, layer, _ = made(3, dtype)
    first = (to_int8 if held(dtype) is torch.uint8 else PackedLinear)(head.fc)
    states, ids, found = torch.randn(2, 3, first.in_features).to(dtype), torch.randint(V, (2, 3)), []
    for given, of_target in ((states, True), (first(states.float()), False)):
        keys, values = cache(2, dtype)
        level = layer(LayerPass(keys, values, [1, 0], [0, 0], ids, given, of_target, head_rows=3))
        found.append((level.hidden, level.logits, keys[0][:, :, :3], values[0][:, :, :3]))
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("version", [1, 3, "mtp"])
def test_heads_of_16_bits_become_int8_and_say_what_they_said(version, dtype, isa):
    head, layer, embeddings = made(version, dtype)
    assert dtypes(layer) == {held(dtype)}
    keys, values = cache(1, dtype)
    states, ids = torch.randn(1, 8, E).to(dtype), torch.randint(V, (1, 8))
    level = layer(LayerPass(keys, values, [0], [0], ids, states, True, head_rows=8))
    head = head.float().attach(embeddings.float(), embeddings.float())
    with torch.inference_mode():
        want = head.logits(head(ids, head.begin(states.float()), torch.arange(8)[None], causal))
    assert (level.logits - want).square().mean().sqrt() < 0.04 * want.std()


def dtypes(layer: NativeLayer) -> set[torch.dtype]:
    matrices = [one.packed for one in layer.pointers if isinstance(one, PackedMatrix)]
    return {torch.bfloat16 if isinstance(one, Bf12) else getattr(one, "dtype", torch.uint8) for one in matrices}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_portable_kernels_get_heads_of_16_bits_as_they_are(dtype, monkeypatch):
    monkeypatch.setattr(draft_layer, "load", lambda: replace(load(), isa="portable"))
    assert dtypes(made(3, dtype)[1]) == {dtype}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_before_residual": True},
        {"attention_bias": True},
        {"num_hidden_layers": 2, "qk_norm": True},
        {"output_gate": True, "partial_rotary_factor": 0.5, "qk_norm": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("version", [1, 3, "mtp"])
def test_paths_are_those_of_the_torch_modules(version, options, isa):
    assert paths_are_those_of_the_torch_modules(version, 20, 10, **options)


def paths_are_those_of_the_torch_modules(version, start, count, of_target=False, sizes=Sizes(), **options) -> bool:
    """Of a tree of `count` nodes behind a text of `start` tokens. of_target: see `LayerPass.states`."""
    rng = random.Random(0)
    head, layer, _ = made(version, torch.float32, sizes, **options)
    keys, values = cache(1, torch.float32, head.config.num_hidden_layers, sizes)
    rows, ids = torch.randn(1, start + count, sizes.width), torch.randint(sizes.vocabulary, (1, start + count))
    parents, same = random_parents(count, 1, rng), list[bool]()
    layer(LayerPass(keys, values, [0], [0], ids[:, :start], rows[:, :start], of_target, kv_only=True))
    tree = ids[:, start:], rows[:, start:]
    level = layer(LayerPass(keys, values, [0], [start], *tree, of_target, parents, head_rows=count))
    for node in range(count):
        path = [node]
        while parents[0, path[0]] >= 0:
            path.insert(0, int(parents[0, path[0]]))
        index = torch.tensor([*range(start), *(start + n for n in path)])
        with torch.inference_mode():
            given = head.begin(rows[:, index]) if of_target else rows[:, index]
            hidden = head(ids[:, index], given, torch.arange(len(index))[None], causal)[0, -1]
            logits = head.logits(hidden)
        same.append(torch.allclose(level.hidden[0, node], hidden, atol=1e-4, rtol=1e-4))
        same.append(torch.allclose(level.logits[0, node], logits, atol=1e-3, rtol=1e-4))
    return all(same)


@pytest.mark.parametrize("size", [1, 7, 100, 128, 1000, 3001])
def test_the_best_tokens_are_those_of_torch(size, isa):
    """Ties in their order; what is not finite comes last."""
    weight = torch.randn(size, E).round(decimals=1)
    if size > 9:
        weight[[1, 5]] = weight[[9, 9]]
        weight[3], weight[4] = torch.nan, torch.inf
    head = EagleHead(EagleConfig(E, (0,), size, size, 80, 2 * H, H, D, 3, E))
    pack_head(head.requires_grad_(False).attach(torch.randn(size, E), weight))
    layer, (keys, values) = NativeLayer(head, head.fc, False), cache(1, torch.float32)
    ids, states = torch.zeros(1, 6, dtype=torch.long), torch.randn(1, 6, E)
    level = layer(LayerPass(keys, values, [0], [0], ids, states, head_rows=6, top=8))
    logits, best = level.logits[0], level.best
    assert best is not None
    count = min(8, size)
    _, logps = TokenRanking(torch.arange(size), True).top(logits, [], 0, count)
    assert torch.allclose(best.logps[0], torch.tensor(logps), atol=1e-5)
    lowest = torch.finfo(torch.float32).min / 4
    order = logits.nan_to_num(lowest, lowest, lowest).sort(descending=True, stable=True).indices[:, :count]
    assert torch.equal(best.columns[0].long(), order)


def test_the_best_tokens_with_noise_are_those_of_the_scores(isa):
    """Each row of the batch has the noise of its own sequence, at all of its nodes."""
    assert ranks_with_noise()


def ranks_with_noise(sizes: Sizes = Sizes()) -> bool:
    _, layer, _ = made(3, torch.float32, sizes)
    keys, values = cache(2, torch.float32, sizes=sizes)
    ids, states = torch.randint(sizes.vocabulary, (2, 3)), torch.randn(2, 3, sizes.width)
    noise = 5 * torch.randn(2, sizes.vocabulary)
    found = layer(LayerPass(keys, values, [0, 1], [0, 0], ids, states, head_rows=3, top=8, noise=noise))
    plain = layer(LayerPass(keys, values, [0, 1], [0, 0], ids, states, head_rows=3))
    want = (plain.logits + noise[:, None]).log_softmax(-1).topk(8)
    assert found.best is not None
    same = torch.equal(found.logits, plain.logits) and torch.equal(found.best.columns.long(), want.indices)
    return same and torch.allclose(found.best.logps, want.values, atol=1e-5)


def test_rows_of_nothing_but_nan_are_a_bad_draft_but_a_draft():
    _, layer, _ = made(3, torch.float32)
    keys, values = cache(1, torch.float32)
    ids, states = torch.zeros(1, 2, dtype=torch.long), torch.full((1, 2, E), torch.nan)
    level = layer(LayerPass(keys, values, [0], [0], ids, states, head_rows=2, top=4))
    assert level.best is not None
    assert level.best.columns[0].tolist() == [[0, 1, 2, 3]] * 2
    assert level.best.logps.isfinite().all()
