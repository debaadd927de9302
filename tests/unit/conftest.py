"""What the tests of the command line share."""

import pytest
import torch

from tests.tiny import tiny_model
from tests.unit.cli_helpers import save


@pytest.fixture(scope="module")
def one_thread():
    """Models this small only lose time to a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    # Long enough a context for an answer that someone can interrupt.
    return save(tmp_path_factory.mktemp("tiny"), tiny_model("llama", max_position_embeddings=50_000))
