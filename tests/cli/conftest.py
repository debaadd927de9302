"""What the tests of the command line share."""

import signal

import pytest

from tests.cli.helpers import save
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    # Long enough a context for an answer that someone can interrupt.
    return save(tmp_path_factory.mktemp("tiny"), tiny_model("llama", max_position_embeddings=50_000))


@pytest.fixture
def is_heard():
    """Commands that a shell started in the background ignore Ctrl-C, and so do those that they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
