"""The tests of bits must be able to fail: each fault below is planted into the kernels, and seen."""

import pytest
import torch

from paceline.core.tree import TokenTree
from paceline.kernels.gpu import attention, corrections, passes, products, rows
from paceline.target import ModelRunner, wrap_model
from tests.kernels.gpu.faults import with_fault
from tests.kernels.test_passes import rows as one_by_one
from tests.tiny import tiny_model

FAULTS = {  # module, what takes whose place, and where the faulty function goes
    "nodes in the order of the tree": (attention, "start + node_of)", "column)", (passes, "attend")),
    "the first child for its siblings": (
        attention, "start + node_of)", "start + tl.minimum(node_of, 1))", (passes, "attend"),
    ),
    "the last chunk of later rows": (
        attention, "last // SPAN + 1)", "last // SPAN + (1 if row < 1 else 0))", (passes, "attend"),
    ),
    "the column for the position": (
        rows, "tl.load(places + row * 4 + 2)", "tl.load(places + row * 4 + 1)", (passes, "rotate"),
    ),
    "parts by the number of rows": (
        products, "parts, at = parts_of(matrices, x.dtype), 0",
        "parts, at = parts_of(matrices, x.dtype) if rows > 2 else 1, 0", (corrections, "products"),
    ),
    "a step by the number of rows": (
        products, "step = max(step_of(up, x.dtype), step_of(gates, x.dtype))", "step = 32 if rows > 2 else 16",
        (corrections, "products"),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Chunks and parts that tiny models have several of."""
    monkeypatch.setattr(attention, "CHUNK", 32)
    monkeypatch.setattr(products, "_ENOUGH", 32)
    monkeypatch.setattr(products, "_FEWEST_STEPS", 2)


def keeps_bits() -> bool:
    """Whether a path of a tree across the border of a chunk has the bits of single rows."""
    sizes = {"hidden_size": 128, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = wrap_model(tiny_model("llama", num_hidden_layers=1, **sizes))
    runner = ModelRunner(model, 2, 64)
    for _ in range(2):
        runner.extend_cache(runner.cache.allocate(), [7 * i % 90 + 3 for i in range(30)])
    path, tree = [0, 2, 3], TokenTree.from_lists([[10, 11, 12, 13]], [[-1, 0, 0, 2]])
    got = runner.forward([0], tree)[0]
    return torch.equal(got[path], one_by_one(runner, 1, [10 + node for node in path]))


def test_bits_are_kept():
    assert keeps_bits()


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault, monkeypatch, tmp_path):
    module, old, new, (place, name) = FAULTS[fault]
    faulty = with_fault(module, old, new, tmp_path)
    for constant in ("CHUNK", "_ENOUGH", "_FEWEST_STEPS"):
        if hasattr(module, constant):
            setattr(faulty, constant, getattr(module, constant))
    monkeypatch.setattr(place, name, getattr(faulty, name, faulty))
    try:
        seen = not keeps_bits()
    except Exception as error:  # the comparison with transformers when a model is loaded notices some
        seen = "same logits" in str(error)
    assert seen
