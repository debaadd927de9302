"""The files of a pulled model: damage is found and mended, and nobody else's files are touched."""

import json

import pytest

from paceline.errors import ConfigError, DownloadError
from paceline.zoo import installed, verify
from paceline.zoo.cache import MANIFEST


def test_damage_is_found_and_mended(world):
    folder = world.pull()
    weights = folder / "model.safetensors"
    good = weights.read_bytes()

    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    verify(folder)  # sizes alone cannot tell
    with pytest.raises(DownloadError, match=r"model\.safetensors: sha256"):
        verify(folder, hashes=True)

    weights.write_bytes(good[:-1])
    with pytest.raises(DownloadError, match=r"model\.safetensors: .* bytes"):
        verify(folder)
    (row,) = installed(world.cache)
    assert not row.pulled
    assert "model.safetensors" in (row.problem or "")

    assert weights.read_bytes() != good
    world.pull()
    assert weights.read_bytes() == good
    assert world.left == ["tiny"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": {"a": 1}}', None])
def test_a_spoilt_manifest_is_a_clear_error(world, text):
    folder = world.pull()
    (folder / MANIFEST).unlink() if text is None else (folder / MANIFEST).write_text(text)
    with pytest.raises(DownloadError, match=MANIFEST):
        verify(folder)


def test_another_version_of_the_weights_is_pulled_anew(world):
    folder = world.pull()
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"source_sha256": "0" * 64}))
    world.pull()
    assert world.downloads == ["tiny", "tiny"]
    assert verify(folder).source_sha256 == world.model.sha256


def test_a_folder_that_is_not_ours_is_never_replaced(world):
    own = world.cache / "models" / "tiny" / "thesis.txt"
    own.parent.mkdir(parents=True)
    own.write_text("years of work")
    with pytest.raises(ConfigError, match="Paceline did not write"):
        world.pull(force=True)
    assert own.read_text() == "years of work"
