"""The same requests on static passes and on the others, compared."""

import torch

from paceline.core.tree import TokenTree
from paceline.target import ModelRunner
from tests.helpers import loaded, prompt

TOLERANCE = {torch.float64: 1e-8}  # the native library takes the other types on CPU
NAMES = ["llama", "qwen2", "qwen3", "qwen2-sliding", "mistral"]
LONG = {"max_position_embeddings": 2048}


class Pair:
    """The same requests on two runners of one model: static passes on one, the others on the other."""

    def __init__(self, name="llama", dtype=torch.float64, slots=4, **overrides):
        model = loaded(name, dtype, **overrides)
        self.static, self.plain = (ModelRunner(model, slots, static=kind) for kind in (True, False))
        assert self.static.static is not None
        assert self.plain.static is None
        self.tolerance = TOLERANCE[dtype]

    def admit(self, *lengths: int) -> list[int]:
        slots = []
        for length in lengths:
            ids = prompt(length, seed=length)
            taken = [runner.admit(ids) for runner in (self.static, self.plain)]
            for runner in (self.static, self.plain):
                runner.extend_cache(taken[0], ids)
            slots.append(taken[0])
        return slots

    def release(self, slot: int) -> None:
        for runner in (self.static, self.plain):
            runner.cache.release(slot)

    def check(self, slots: list[int], tree: TokenTree) -> torch.Tensor:
        runs = self.static.static.num_runs
        got, expected = (runner.forward(slots, tree) for runner in (self.static, self.plain))
        assert self.static.static.num_runs == runs + 1, "the pass was not static"
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected, atol=self.tolerance, rtol=self.tolerance)
        assert torch.equal(got.argmax(-1), expected.argmax(-1))
        return got

    def commit(self, slots: list[int], paths: list[list[int]]) -> None:
        for runner in (self.static, self.plain):
            runner.commit(slots, paths)


def tree_of(rows: int = 1, nodes: int = 7, seed: int = 0) -> TokenTree:
    """Random trees, another in each row; node 2 hangs under the root, so that they branch."""
    rng = torch.Generator().manual_seed(seed)
    parents = [
        [-1, 0, 0, *(int(torch.randint(i, (1,), generator=rng)) for i in range(3, nodes))][:nodes] for _ in range(rows)
    ]
    return TokenTree.from_lists([prompt(nodes, seed * 100 + row) for row in range(rows)], parents)


def walk(pair: Pair) -> None:
    """Chains and trees, ragged batches, gaps between slots, crooked commits: what decoding does to a cache."""
    a, b, c = pair.admit(20, 5, 61)
    for nodes in (1, 3, 8):
        pair.check([b], TokenTree.chain([prompt(nodes)]))
    pair.check([a, b, c], tree_of(3))
    pair.commit([a, b, c], [[2], [], [1]])
    pair.check([a, c], tree_of(2, 5, seed=1))  # b pads: nothing of it may change
    pair.commit([a, c], [[], [2]])
    pair.check([b], tree_of(1, 9, seed=2))
    pair.check([c, b], TokenTree.from_lists([prompt(6, 1), prompt(3, 2)], [[-1, 0, 1, 1, 0, 4], [-1, 0, 0]]))
    pair.commit([c, b], [[4, 5], [2]])  # from columns 4 and 5 behind the root to 1 and 2
    pair.check([a, b, c], TokenTree.chain([prompt(4, row) for row in range(3)]))


def grow(pair: Pair) -> None:
    """A short sequence before and after a long one has made the tensors of both new: the same bucket twice."""
    a, b = pair.admit(230, 20)
    keys = pair.static.cache.keys[0]
    pair.check([b], tree_of(1, 8))
    for step in range(6):
        pair.check([a], TokenTree.chain([prompt(8, step)]))
        pair.commit([a], [list(range(1, 8))])
    assert pair.static.cache.keys[0] is not keys
    pair.check([b], tree_of(1, 8, seed=7))
    pair.commit([b], [[2]])
    pair.check([b, a], tree_of(2, 6))
