"""What stands at the end of a draft to be read is judged by nobody; what somebody could accept stays."""

import pytest
import torch

from paceline.core.draft import Draft, Law
from paceline.core.tree import TokenTree
from tests.methods.space.common import hung_chain


def test_masks_go_and_candidates_stay():
    tree = hung_chain([[5, 6, 7], [8, 9, 1]], [2, 1])
    q = torch.arange(2 * tree.num_nodes * 3.0).view(2, tree.num_nodes, 3)
    draft = Draft(tree, Law.IID, q, confidence=q[..., 0])
    cut = draft.trimmed()
    assert cut.tree.token_ids.tolist() == [[5, 6, 7], [8, 9, 1]]
    assert not cut.tree.is_probe.any()
    assert torch.equal(cut.q, q[:, :3])
    assert torch.equal(cut.confidence, q[:, :3, 0])


@pytest.mark.parametrize("lengths", [(3, 1), (1, 3), (2, 2)])
def test_a_row_that_is_shorter_keeps_its_padding_while_another_has_candidates(lengths):
    tree = TokenTree.chain([list(range(n)) for n in lengths])
    draft = Draft(tree)
    assert draft.trimmed() is draft


def test_a_draft_of_masks_alone_leaves_the_root():
    assert hung_chain([[5], [6]], [3, 2]).trimmed().token_ids.tolist() == [[5], [6]]


def test_what_pads_a_tree_is_not_part_of_its_size():
    tree = TokenTree.from_lists([[1, 2, 3], [4]], [[-1, 0, 1], [-1]], probes=[[False, False, True], [False]])
    same = tree.padded(5), tree.of_rows([1, 0]), tree.trimmed(), tree.of_rows([1]).behind([7, 8])
    assert [[len(row) for row in one.rows] for one in (tree, *same)] == [[3, 1], [3, 1], [1, 3], [2, 1], [3]]
