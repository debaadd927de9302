"""Files that are written whole or not at all."""

import errno
import shutil

import pytest

from paceline.system.files import new_folder, replacing


@pytest.mark.parametrize("write", [replacing, new_folder])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), RuntimeError("unexpected pos 30988160")])
def test_a_full_disk_is_named_with_the_file(tmp_path, monkeypatch, write, error):
    """Safetensors and torch have errors of their own for it."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))
    with pytest.raises(OSError, match=r"No space left on device: .*made") as told, write(tmp_path / "made"):
        raise error
    assert told.value.__cause__ is error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("write", [replacing, new_folder])
def test_another_error_is_not_taken_for_a_full_disk(tmp_path, write):
    with pytest.raises(RuntimeError, match="unexpected pos"), write(tmp_path / "made"):
        raise RuntimeError("unexpected pos")
