"""A peer that runs in an interpreter of its own."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, ClassVar

from ...errors import ConfigError
from .base import Peer, PeerAnswer, PeerFailed, PeerOptions
from .kinds import LLAMA_CPP, OPENVINO, TRANSFORMERS, VLLM, PeerKind
from .worker import WorkerProcess

_START_SECONDS = 900.0


class IsolatedPeer(Peer):
    """One worker process for all modes of a peer, or one a mode where they cannot share; abstract but for its kind.

    python: the interpreter that has the peer's packages.
    start_seconds: until a worker that is loading counts as hung.
    """

    kind: ClassVar[PeerKind]

    def __init__(
        self, python: str, model_path: str, options: PeerOptions, start_seconds: float = _START_SECONDS
    ):  # fmt: skip
        self.modes = ()
        self._python, self._model_path, self._options = python, model_path, options
        self._start_seconds = start_seconds
        self._workers: dict[str, WorkerProcess] = {}
        self._about: dict[str, str] = {}

    def start(self) -> None:
        """Start the worker: of all modes, or of plain decoding where each mode has its own."""
        target, draft = self.kind.model_files(self._model_path, self._options)
        self._settings: dict[str, Any] = {
            "model": target,
            "draft_model": draft,
            "num_speculative_tokens": self._options.num_speculative_tokens,
            "threads": self._options.threads,
            "dtype": self._options.dtype,
        }
        self._about = {"executable": self._python, "model": target, "threads": str(self._options.threads)}
        if draft is not None:
            self._about["draft model"] = draft
        elif self._options.draft_model is not None:
            self._about["draft model"] = f"none: {self._options.draft_model} is not {self.kind.model}"
        ready = self._start_worker("plain")
        self.modes = tuple(ready["modes"])
        self._about |= ready["about"]

    def run(
        self,
        mode: str,
        messages: Seq[Mapping[str, str]],
        token_ids: Seq[int],
        max_tokens: int,
        temperature: float,
    ) -> PeerAnswer:
        """Answer one prompt; a mode with a process of its own loads at its first prompt."""
        if mode not in self.modes:
            raise ConfigError(
                f"the peer {self.name} has no such mode",
                got=repr(mode),
                expected=" or ".join(map(repr, self.modes)) or "a peer that was started",
                fix=self._about.get("draft model") if mode == "draft" else None,
            )
        key = mode if self.kind.process_each else "plain"
        if key not in self._workers:
            self._start_worker(key)
        request = {
            "mode": mode,
            "messages": [dict(message) for message in messages],
            "token_ids": list(token_ids),
            "max_tokens": max_tokens,
            "temperature": temperature,
        }
        reply = self._workers[key].ask(request, _patience(max_tokens))
        if "answer" not in reply:
            raise PeerFailed(
                f"the peer {self.name} could not answer in mode {mode}",
                got=reply.get("error") or f"no module named {reply.get('missing')}",
            )
        return PeerAnswer(**reply["answer"])

    def close(self) -> None:
        """Kill the workers."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        self.modes = ()

    def describe(self) -> dict[str, str]:
        """Executable, versions, model files and settings."""
        return dict(self._about)

    # Helpers

    def _start_worker(self, mode: str) -> dict[str, Any]:
        """The content of its "ready". Raises `ConfigError`."""
        wanted = f"an interpreter with {self.kind.packages}"
        settings = {**self._settings, "mode": mode}
        try:
            worker = WorkerProcess(self.name, self._python, self.kind.script, settings)
        except OSError as error:
            raise ConfigError(
                f"the Python executable of the peer {self.name} cannot be run",
                got=f"{self._python}: {error.strerror}",
                expected=wanted,
                fix=f"give it as {self.name}=/path/to/environment/bin/python",
            ) from error
        try:
            reply = worker.start(self._start_seconds)
        except PeerFailed as error:
            raise ConfigError(
                f"the peer {self.name} did not start with {self._python}", got=error.got, expected=wanted, fix=error.fix
            ) from error
        if "ready" in reply:
            self._workers[mode] = worker
            return reply["ready"]
        words = worker.last_words()
        worker.close()
        if "missing" in reply:
            raise ConfigError(
                f"the peer {self.name} is not installed",
                got=f"{self._python} has no module {reply['missing']}",
                expected=wanted,
                fix=f"{self._python} -m pip install {self.kind.packages}",
            )
        raise ConfigError(
            f"the peer {self.name} could not load its models",
            got=f"{reply['error']}; its last lines:\n{words}",
            expected=f"{self.kind.model} that this version of {self.name} reads",
            fix=f"check {self._settings['model']}, or {self.kind.conversion}",
        )


class TransformersPeer(IsolatedPeer):
    """transformers' own generate."""

    name: ClassVar[str] = "transformers"
    kind = TRANSFORMERS


class LlamaCppPeer(IsolatedPeer):
    """llama.cpp in its Python package."""

    name: ClassVar[str] = "llama.cpp"
    kind = LLAMA_CPP


class OpenVinoPeer(IsolatedPeer):
    """OpenVINO GenAI."""

    name: ClassVar[str] = "openvino"
    kind = OPENVINO


class VllmPeer(IsolatedPeer):
    """vLLM's offline engine."""

    name: ClassVar[str] = "vllm"
    kind = VLLM


def _patience(max_tokens: int) -> float:
    """Seconds after which an answer counts as hung."""
    return 120 + 5 * max_tokens
