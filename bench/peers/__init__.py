"""Other inference systems on the same prompts as `paceline bench`: started apart, asked in turn, timed alike.

    python -m bench.peers MODEL --peer transformers --peer llama.cpp=PYTHON --peer-model llama.cpp=FILE.gguf [OPTIONS]

OPTIONS are those of `paceline bench`; the result folder holds the peers' answers and ratios too, and `paceline show`
shows them. Every system gets the same token ids, threads and sampling options, takes its turn at every prompt, sleeps
while others are timed, and is counted alike: tokens after the first, over the seconds that they took.
"""

import sys

from paceline.errors import ConfigError

from .base import Peer, PeerAnswer, PeerFailed, PeerOptions
from .isolated import KINDS, IsolatedPeer
from .served import LlamaServer, ServedPeer, VllmServer

_SERVERS: dict[str, type[ServedPeer]] = {peer.name: peer for peer in (LlamaServer, VllmServer)}

PEERS: tuple[str, ...] = tuple(KINDS)
"""The names that a spec may begin with."""


def open_peer(spec: str, model_path: str, options: PeerOptions) -> Peer:
    """The peer of a spec, not yet started.

    spec: NAME, NAME=PYTHON or NAME=URL: an interpreter that has the peer (this one by default), or, for llama.cpp and
        vllm, the http address of a running server.
    model_path: the Hugging Face folder; `options.peer_model` goes before it.

    Raises `ConfigError` for a spec that names no peer.
    """
    name, _, where = spec.partition("=")
    name, where = name.strip(), where.strip()
    if name not in KINDS:
        raise ConfigError(
            "there is no such peer", got=repr(spec), expected=" or ".join(PEERS),
            fix="write NAME, NAME=/path/to/python or NAME=http://HOST:PORT",
        )  # fmt: skip
    if where.startswith(("http://", "https://")):
        if name not in _SERVERS:
            raise ConfigError(
                f"the peer {name} is not asked over HTTP", got=repr(spec), expected=f"{name}=/path/to/python",
                fix=f"an address works for {' and '.join(_SERVERS)}",
            )  # fmt: skip
        return _SERVERS[name](where)
    return IsolatedPeer(KINDS[name], where or sys.executable, model_path, options)


__all__ = ["PEERS", "Peer", "PeerAnswer", "PeerFailed", "PeerOptions", "open_peer"]
