"""Models of a hub: asked once, fetched into its cache, and read from there as any folder."""

import hashlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.hf.checkpoint import local_folder, wanted
from paceline.hf.load import load_tokenizer
from paceline.target import load_model
from tests.helpers import tokenizer
from tests.tiny import tiny_model

COMMIT = "0123456789" * 4


class _Hub(BaseHTTPRequestHandler):
    """One repository, of the folder that the server was given."""

    def _answer(self, with_body: bool) -> None:
        folder: Path = self.server.folder  # type: ignore[attr-defined]
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        files = sorted(folder.iterdir())
        if self.path.startswith("/api/models/some/model/tree/"):
            sizes = [(path.name, path.stat().st_size) for path in files]
            tree = [{"type": "file", "path": name, "size": size, "oid": name} for name, size in sizes]
            body = json.dumps(tree).encode()
        elif self.path.startswith("/api/models/some/model"):
            siblings = [{"rfilename": path.name} for path in files]
            body = json.dumps({"id": "some/model", "sha": COMMIT, "siblings": siblings}).encode()
        elif self.path.startswith("/some/model/resolve/"):
            body = (folder / self.path.rpartition("/")[2]).read_bytes()
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def do_GET(self) -> None:
        self._answer(True)

    def do_HEAD(self) -> None:
        self._answer(False)

    def log_message(self, *told: object) -> None:
        pass


def test_a_model_is_fetched_once_and_then_found_without_the_hub(tmp_path, monkeypatch, capfd):
    folder = tmp_path / "repository"
    tiny_model("llama").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.folder, server.asked = folder, []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    place = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", place)
    template = place + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    capfd.readouterr()
    loaded = load_model("some/model", device="cpu")
    assert "%|" not in capfd.readouterr().err, "a library draws no bars"
    assert (loaded.name, loaded.num_layers) == ("model", 2)
    assert any("model.safetensors" in path for path in server.asked)  # type: ignore[attr-defined]
    assert not any(".bin" in path for path in server.asked)  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()
    assert load_model("some/model", device="cpu").fingerprint == loaded.fingerprint


def test_weights_are_fetched_once_and_in_safetensors():
    texts = ["config.json", "tokenizer.json", "vocab.txt", "chat_template.jinja", "own.py"]
    others = ["pytorch_model.bin", "consolidated.safetensors", "README.md", "onnx/model.onnx", "sub/config.json"]
    parts = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert wanted([*texts, *others, *parts]) == [*texts, *parts]
    assert wanted([*texts, *others, *parts], weights=False) == [*texts, parts[-1]]
    assert wanted([*texts, *others, "model.safetensors", "model.fp16.safetensors"]) == [*texts, "model.safetensors"]


@pytest.mark.parametrize("name", ["/no/such", "./such", "a/b/c", "", " ", "\0", "-x-", "x" * 5000])
def test_what_is_neither_a_folder_nor_an_id(name):
    with pytest.raises(ConfigError, match="no such folder, and no hub id"):
        local_folder(name)


@pytest.mark.parametrize("offline", [True, False])
def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch, tmp_path, offline):
    asked = []

    def fails(self, name, **options):
        asked.append((name, options["timeout"]))
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", fails)
    monkeypatch.setattr("paceline.hf.checkpoint.is_offline_mode", lambda: offline)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE" if offline else "no route"):
        local_folder("nosuch/model-of-this-name")
    assert asked == ([] if offline else [("nosuch/model-of-this-name", 2.0)])


def _closed() -> socket.socket:
    """Refuses connections."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    return listener


def _silent() -> socket.socket:
    """Takes connections, and never answers."""
    listener = _closed()
    listener.listen()
    return listener


@pytest.mark.parametrize(("make", "why"), [(_closed, "refused"), (_silent, "timed out|no answer in 0.3 s")])
@pytest.mark.parametrize("load", [local_folder, load_tokenizer])
def test_a_hub_that_cannot_be_reached_is_not_asked_again(make, why, load, tmp_path, monkeypatch):
    asked = make()
    place = f"http://127.0.0.1:{asked.getsockname()[1]}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", place)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("paceline.hf.checkpoint._SECONDS", 0.3)
    monkeypatch.chdir(tmp_path)
    connections, connect = list[tuple[str, int]](), socket.create_connection

    def counted(address, *rest, **options):
        connections.append(address)
        return connect(address, *rest, **options)

    monkeypatch.setattr(socket, "create_connection", counted)
    with pytest.raises(
        ConfigError, match=f"(?s)no folder '{tmp_path}/org/name'.*cache '{tmp_path}/cache'.*{why}"
    ) as caught:
        load("org/name")
    assert connections == [asked.getsockname()]
    assert caught.match("hf download org/name")
    asked.close()
