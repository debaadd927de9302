"""A model that is packaged whole is pulled as a copy, and refused when a file is not the one that was packaged."""

import json

import pytest
from paceline_zoo.whole import read_model

from paceline.errors import ConfigError
from paceline.system.provenance import sha256_of
from paceline.zoo import pull, registry, verify


@pytest.fixture
def folder(tmp_path, monkeypatch):
    place = tmp_path / "tiny-whole"
    (place / "model").mkdir(parents=True)
    (place / "model" / "config.json").write_text("{}")
    (place / "model" / "model.safetensors").write_bytes(b"weights")
    files = {path.name: sha256_of(path) for path in (place / "model").iterdir()}
    write(place, files)
    monkeypatch.setattr(registry, "ZOO", {place.name: read_model(place)})
    return place


def write(place, files):
    about = {"paceline_model": 1, "description": "for tests", "licence": "Apache-2.0", "parameters": 4, "files": files}
    (place / "model.json").write_text(json.dumps(about))


def test_it_is_pulled_as_a_copy(folder, tmp_path):
    copy = pull("tiny-whole", tmp_path / "cache")
    assert (copy / "model.safetensors").read_bytes() == b"weights"
    assert set(verify(copy, hashes=True).files) >= {"config.json", "model.safetensors"}


def test_a_damaged_file_is_refused(folder, tmp_path):
    (folder / "model" / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(ConfigError, match=r"model/model.safetensors is not the one that was packaged"):
        pull("tiny-whole", tmp_path / "cache")


@pytest.mark.parametrize("files", [{"../config.json": "0"}, {"a/b": "0"}, 3])
def test_a_damaged_description_is_refused(folder, files):
    write(folder, files)
    with pytest.raises(ConfigError, match="'tiny-whole' is damaged"):
        read_model(folder)
