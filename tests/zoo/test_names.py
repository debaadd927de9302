"""The names the zoo knows: which one is meant, what is installed, and in which folder."""

import subprocess
import sys

import pytest

from paceline.errors import ConfigError
from paceline.zoo import ZOO, installed, models_dir, pull, registry, resolve
from tests.zoo.helpers import ROOT


def test_an_unknown_name_is_told_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match=r"did you mean 'smollm2-135m'"):
        pull("SmolLM-135M", tmp_path)
    with pytest.raises(ConfigError, match="paceline models"):
        pull("zzz", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_resolve_pulls_zoo_names_and_leaves_the_rest(world, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "ZOO", {"tiny": world.model, **ZOO})
    folder = resolve("tiny", world.cache)
    assert folder == str(world.cache / "models" / "tiny")
    for other in ("gpt2", "org/tiny", folder, "./nowhere", str(tmp_path)):
        assert resolve(other, world.cache) == other
    assert resolve(tmp_path, world.cache) == str(tmp_path)
    with pytest.raises(ConfigError, match="did you mean"):
        resolve("smolm2-135m", world.cache)
    monkeypatch.chdir(world.cache / "models")
    assert resolve("tiny", world.cache) == "tiny"  # a local folder wins
    assert world.downloads == ["tiny"]


def test_installed_lists_the_absent_too(world, monkeypatch):
    monkeypatch.setattr(registry, "ZOO", {"tiny": world.model, **ZOO})
    world.pull()
    tiny, smollm, *_ = installed(world.cache)
    assert (tiny.pulled, tiny.problem, tiny.licence) == (True, None, "Apache-2.0")
    assert tiny.size_bytes == sum(path.stat().st_size for path in tiny.folder.iterdir())
    assert (smollm.pulled, smollm.problem, smollm.size_bytes) == (False, None, 0)


def test_the_environment_chooses_the_folder_only(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "env"))
    assert models_dir() == tmp_path / "env" / "models"
    assert models_dir(tmp_path / "argument") == tmp_path / "argument" / "models"
    monkeypatch.delenv("PACELINE_CACHE")
    assert "paceline" in str(models_dir())


def test_importing_the_zoo_loads_nothing_heavy():
    # The zoo's own modules, whatever the package above them imports.
    code = (
        "import sys, types, pathlib\n"
        "top = types.ModuleType('paceline'); top.__path__ = [str(pathlib.Path('paceline').absolute())]\n"
        "sys.modules['paceline'] = top\n"
        "import paceline.zoo\n"
        "print([name for name in ('torch', 'transformers', 'gguf', 'numpy') if name in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert answer.stdout.strip() == "[]"
