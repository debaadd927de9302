"""Specs, model files and worker scripts."""

import ast
import sys
from pathlib import Path

import pytest

from bench.peers import PEERS, PeerOptions, open_peer
from bench.peers.isolated import KINDS, LLAMA_CPP, OPENVINO, TRANSFORMERS, VLLM, WORKERS, IsolatedPeer
from bench.peers.served import LlamaServer, VllmServer
from paceline.errors import ConfigError


@pytest.fixture
def files(tmp_path):
    """One model of every format, and the options to reach it."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "ov").mkdir()
    (tmp_path / "ov" / "openvino_model.xml").write_text("<net/>")
    (tmp_path / "model.gguf").write_bytes(b"GGUF\3\0\0\0")
    return {"hf": str(tmp_path / "hf"), "ov": str(tmp_path / "ov"), "gguf": str(tmp_path / "model.gguf")}


def test_specs():
    assert set(PEERS) == {kind.name for kind in KINDS.values()}
    peer = open_peer("transformers", "model", PeerOptions())
    assert isinstance(peer, IsolatedPeer)
    assert (peer.kind, peer._python) == (TRANSFORMERS, sys.executable)
    peer = open_peer("llama.cpp=/somewhere/bin/python", "model", PeerOptions())
    assert (peer.name, peer._python) == ("llama.cpp", "/somewhere/bin/python")
    assert isinstance(open_peer("llama.cpp=http://localhost:1", "model", PeerOptions()), LlamaServer)
    assert isinstance(open_peer("vllm=http://localhost:1/v1", "model", PeerOptions()), VllmServer)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("ollama", ["no such peer", "'ollama'", "transformers or llama.cpp"]),
        ("", ["no such peer"]),
        ("openvino=http://localhost:1", ["not asked over HTTP", "openvino=/path/to/python"]),
    ],
)
def test_bad_specs(spec, words):
    with pytest.raises(ConfigError) as caught:
        open_peer(spec, "model", PeerOptions())
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("kind", "own", "foreign"),
    [(TRANSFORMERS, "hf", "gguf"), (LLAMA_CPP, "gguf", "hf"), (OPENVINO, "ov", "hf"), (VLLM, "hf", "ov")],
    ids=lambda value: getattr(value, "name", value),
)
def test_model_files(files, kind, own, foreign):
    own, foreign = files[own], files[foreign]
    assert kind.model_files(own, PeerOptions()) == (own, None)
    assert kind.model_files(foreign, PeerOptions(peer_model=own)) == (own, None), "the peer's own file goes first"
    assert kind.model_files(own, PeerOptions(draft_model=foreign)) == (own, None), "no draft it could read"
    assert kind.model_files(own, PeerOptions(draft_model=foreign, peer_draft_model=own)) == (own, own)
    with pytest.raises(ConfigError) as caught:
        kind.model_files(foreign, PeerOptions())
    assert all(word in str(caught.value) for word in (kind.name, foreign, kind.model, "as peer_model"))
    with pytest.raises(ConfigError, match="as peer_draft_model"):
        kind.model_files(own, PeerOptions(peer_draft_model=foreign))


def test_a_wrong_file_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "weights.gguf").write_bytes(b"not a GGUF file")
    peer = open_peer("llama.cpp=/no/such/python", str(tmp_path / "weights.gguf"), PeerOptions())
    with pytest.raises(ConfigError, match=r"to_gguf IN\.gguf OUT\.gguf"):
        peer.start()
    peer.close()


def test_a_draft_that_cannot_be_read_is_named(files, monkeypatch):
    peer = IsolatedPeer(LLAMA_CPP, "/no/such/python", files["gguf"], PeerOptions(draft_model=files["hf"]))
    with pytest.raises(ConfigError):
        peer.start()
    assert peer.describe()["draft model"] == f"none: {files['hf']} is not a GGUF file"


def imports_at_start(source: str) -> set[str]:
    """Top-level packages that a script imports, at its head or inside."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." if node.level else (node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize("script", sorted(WORKERS.glob("*.py")), ids=lambda path: path.stem)
def test_workers_import_the_standard_library_only(script: Path):
    """A peer's interpreter has no paceline, and a package that is missing must be reported, not be a syntax error."""
    assert imports_at_start(script.read_text()) <= sys.stdlib_module_names


@pytest.mark.parametrize("source", ["from ..base import Peer", "import torch", "def f():\n    import paceline.errors"])
def test_a_foreign_import_is_noticed(source):
    assert not imports_at_start(source) <= sys.stdlib_module_names


def test_every_kind_has_its_script():
    assert all(kind.script.is_file() for kind in KINDS.values())
