"""The bits of a node's attention are those of plain decoding, also where the library's kernel would change them.

It takes query rows 32 at a time and treats a rest of one to three differently, and its sums depend on how many columns
it is given, masked or not. Which of these shows depends on the CPU; `touchy` shows both everywhere.
"""

import pytest
import torch
from torch import nn

from paceline.attention import masks
from paceline.attention.attend import Scores, attend
from paceline.attention.masks import PassLayout
from paceline.core.tree import TokenTree

CASES = [  # groups, width, committed length: short rests of rows, chains across blocks, several kernel blocks
    (1, 128, 4090),
    (1, 64, 2045),
    (1, 128, 1020),
    (3, 64, 250),
    (3, 64, 1021),
    (6, 128, 316),
    (6, 128, 1018),
    (8, 64, 640),
]
NODES = 11
HEADS = 2


def states(groups: int, width: int, start: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    columns = start + 2 * NODES + 64
    key, value = (torch.randn(1, HEADS, columns, width, generator=rng).bfloat16() for _ in range(2))
    return torch.randn(1, HEADS * groups, NODES, width, generator=rng).bfloat16(), key, value


def attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, given: int) -> torch.Tensor:
    """Attention of the first `given` nodes of `query`; what follows them only pads the pass. [given, Hq, d]."""
    nodes = query.shape[2]
    tree = TokenTree.chain([[0] * given]).padded(nodes)
    layout = PassLayout([start], nodes, tree, True, row_multiple=2, slots=[0], num_given=given)
    return attend(query, key, value, layout, Scores(query.shape[-1] ** -0.5))[0, :given]


def differing(seeds: range) -> list[tuple[int, int, int, int]]:
    """(groups, width, start, node) whose bits in a chain are not those of plain decoding."""
    found = []
    for groups, width, start in CASES:
        for seed in seeds:
            query, key, value = states(groups, width, start, seed)
            chain = attended(query, key, value, start, NODES)
            for node in range(NODES):
                alone = torch.cat([query[:, :, node : node + 1], query[:, :, :1]], 2)
                if not torch.equal(attended(alone, key, value, start + node, 1)[0], chain[node]):
                    found.append((groups, width, start, node))
    return found


KERNEL = nn.functional.scaled_dot_product_attention


def touchy(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options) -> torch.Tensor:
    """A kernel whose bits depend clearly on what those of some machine depend on a little."""
    out = KERNEL(query.double(), key.double(), value.double(), **options | {"attn_mask": options["attn_mask"].double()})
    out = out * (1 + key.shape[2] // 64 / 64)
    rest = out.shape[2] % 32
    if rest in (1, 2, 3):
        out[:, :, -rest:] *= 1.25
    return out.to(query.dtype)


@pytest.mark.parametrize("kernel", [KERNEL, touchy], ids=["own", "touchy"])
def test_a_chain_has_the_bits_of_plain_decoding(monkeypatch, kernel):
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", kernel)
    assert differing(range(2)) == []


@pytest.mark.parametrize("mutant", ["rests of one to three rows", "no cut at blocks"])
def test_mutants_change_bits(monkeypatch, mutant):
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", touchy)
    if mutant == "no cut at blocks":
        monkeypatch.setattr(PassLayout, "_edges", lambda self, row: [0, self.num_nodes])
    else:
        monkeypatch.setattr(masks, "_padded_rows", lambda rows: rows)
    assert differing(range(1))
