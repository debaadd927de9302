"""Code that comes with a checkpoint runs only where the user asked for it; nobody is asked on standard input."""

import ast
import json
import shutil
from pathlib import Path

import pytest

from paceline import LLM
from paceline.errors import ConfigError
from paceline.target import load_model
from tests.helpers import tokenizer
from tests.tiny import tiny_model
from tests.vision.families import make

PACKAGE = Path(__file__).parents[2] / "paceline"
CODE = """
from pathlib import Path
(Path(__file__).parent / "ran").write_text("")
Path({marker!r}).write_text("")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, CLIPImageProcessor, Qwen2VLProcessor
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast): pass
class OwnImages(CLIPImageProcessor): pass
class OwnProcessor(Qwen2VLProcessor): pass
"""
MAP = {
    "AutoConfig": "own.OwnConfig",
    "AutoModelForCausalLM": "own.OwnModel",
    "AutoModelForImageTextToText": "own.OwnModel",
    "AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"],
    "AutoImageProcessor": "own.OwnImages",
    "AutoProcessor": "own.OwnProcessor",
}
FILES = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A text model and one with images."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("text", "pictures")}
    tiny_model("llama").save_pretrained(made["text"])
    tokenizer().save_pretrained(made["text"])
    model, processor = make("qwen2_vl")
    for part in (model, processor, processor.image_processor):  # the last in a file of its own, as it used to be
        part.save_pretrained(made["pictures"])
    file = made["pictures"] / "processor_config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "image_processor"}))
    return made


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """Written by the code of the checkpoint; whoever asks gets the answer yes."""
    monkeypatch.setattr("builtins.input", lambda *told: "y")
    return tmp_path / "marker"


def with_code(folder, to, marker, files, **changes):
    to = Path(shutil.copytree(folder, to))
    (to / "own.py").write_text(CODE.format(marker=str(marker)))
    for name in files:
        value = json.loads((to / name).read_text()) if (to / name).is_file() else {}
        (to / name).write_text(json.dumps(value | {"auto_map": MAP} | changes))
    return str(to)


@pytest.mark.diagonal
@pytest.mark.parametrize("kind", ["text", "pictures"])
@pytest.mark.parametrize(
    "files", [FILES, *((name,) for name in FILES)], ids=lambda files: "all" if files[1:] else files[0]
)
def test_the_native_classes_are_taken(folders, tmp_path, marker, kind, files):
    files = [name for name in files if kind == "pictures" or "processor" not in name]
    name = with_code(folders[kind], tmp_path / "model", marker, files)
    loaded = load_model(name, device="cpu")
    assert "own" not in type(loaded.model).__module__
    assert not marker.exists()


UNKNOWN = {
    "config.json": {"model_type": "own"},
    "tokenizer_config.json": {"tokenizer_class": "OwnTokenizer"},
    "preprocessor_config.json": {"image_processor_type": "OwnImages"},
}


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("text", "config.json"),
        ("text", "tokenizer_config.json"),
        ("pictures", "config.json"),
        ("pictures", "preprocessor_config.json"),
    ],
)
def test_where_there_are_none_the_fix_is_told_and_nothing_runs(folders, tmp_path, marker, kind, file):
    name = with_code(folders[kind], tmp_path / "model", marker, [file], **UNKNOWN[file])
    with pytest.raises(ConfigError, match="--trust-remote-code"):
        LLM(name, device="cpu")
    assert not marker.exists()


def test_it_runs_where_the_user_asked(folders, tmp_path, marker):
    name = with_code(folders["text"], tmp_path / "model", marker, ["config.json"], model_type="own")
    with pytest.raises(ConfigError, match="--trust-remote-code"):
        load_model(name, device="cpu")
    assert not marker.exists()
    load_model(name, device="cpu", trust_remote_code=True)
    assert marker.exists()


def test_every_auto_class_is_told_whom_to_trust():
    """None, the default of transformers, asks on standard input."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called.endswith((".from_pretrained", ".from_config")) and "auto" in called.lower():
                told = ast.unparse(node)
                assert "trust_remote_code=" in told or "**own" in told, (path, node.lineno)
