"""Files that are written whole or not at all."""

import errno
import os
import shutil

import pytest

from paceline.system.files import new_folder, replacing

FULL = os.strerror(errno.ENOSPC)


@pytest.mark.parametrize("write", [replacing, new_folder])
@pytest.mark.parametrize(
    ("error", "free"),
    [
        (OSError(errno.ENOSPC, FULL), 1 << 20),  # of Python, without a file
        (ValueError(f"Error while serializing: I/O error: {FULL} (os error 28)"), 1 << 20),  # of safetensors
        (RuntimeError("unexpected pos 30988160 vs 30988048"), 0),  # of torch
    ],
)
def test_a_full_disk_is_named_with_the_file(tmp_path, monkeypatch, write, error, free):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 30, 1 << 30, free))
    with pytest.raises(OSError, match=rf"{FULL}: .*made") as told, write(tmp_path / "made"):
        raise error
    assert told.value.__cause__ is error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("write", [replacing, new_folder])
def test_another_error_is_not_taken_for_a_full_disk(tmp_path, write):
    with pytest.raises(RuntimeError, match="unexpected pos"), write(tmp_path / "made"):
        raise RuntimeError("unexpected pos")
