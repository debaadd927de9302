"""Other inference systems on the same prompts: started apart, asked in turn, timed alike."""

import sys

from ...errors import ConfigError
from .base import Peer, PeerAnswer, PeerFailed, PeerOptions
from .isolated import IsolatedPeer, LlamaCppPeer, OpenVinoPeer, TransformersPeer, VllmPeer
from .served import LlamaServer, VllmServer

_WORKERS: dict[str, type[IsolatedPeer]] = {
    peer.name: peer for peer in (TransformersPeer, LlamaCppPeer, OpenVinoPeer, VllmPeer)
}
_SERVERS: dict[str, type[LlamaServer] | type[VllmServer]] = {peer.name: peer for peer in (LlamaServer, VllmServer)}

PEERS: tuple[str, ...] = tuple(_WORKERS)
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
    if name not in _WORKERS:
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
        return _SERVERS[name](where, options)
    return _WORKERS[name](where or sys.executable, model_path, options)


__all__ = ["PEERS", "Peer", "PeerAnswer", "PeerFailed", "PeerOptions", "open_peer"]
