"""A peer that runs in an interpreter of its own, and what each kind needs: its script, packages and model files."""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError

from .base import Peer, PeerAnswer, PeerFailed, PeerOptions
from .worker import WorkerProcess

_START_SECONDS = 900.0

WORKERS = Path(__file__).parent / "workers"


@dataclass(frozen=True)
class PeerKind:
    """A peer that runs in its own interpreter.

    script: the worker's file. packages: what `pip install` takes. is_model: whether a path is a model this peer reads.
    model: such a model, in words. conversion: how to make one of a Hugging Face model.
    process_each: modes cannot share a process, and are started one by one when they are first asked.
    """

    name: str
    script: Path
    packages: str
    is_model: Callable[[Path], bool]
    model: str
    conversion: str
    process_each: bool = False

    def model_files(self, model_path: str, options: PeerOptions) -> tuple[str, str | None]:
        """The files of target and draft. Raises `ConfigError` for one that this peer cannot read.

        A draft in the Hugging Face format is no error where the peer needs its own format: the mode is left out.
        """
        target = options.peer_model or model_path
        if not self.is_model(Path(target)):
            raise self._unreadable("model", target, "peer_model")
        draft = options.peer_draft_model or options.draft_model
        if draft is None or self.is_model(Path(draft)):
            return target, draft
        if options.peer_draft_model is None:
            return target, None
        raise self._unreadable("draft model", draft, "peer_draft_model")

    def _unreadable(self, what: str, got: str, option: str) -> ConfigError:
        return ConfigError(
            f"the peer {self.name} cannot read this {what}",
            got=got,
            expected=self.model,
            fix=f"{self.conversion}, and give the result as {option} "
            f"(`--{option.replace('_', '-')} {self.name}=PATH` of `python -m bench.peers`)",
        )


def _is_folder_of_transformers(path: Path) -> bool:
    return (path / "config.json").is_file()


def _is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _is_folder_of_openvino(path: Path) -> bool:
    return (path / "openvino_model.xml").is_file()


TRANSFORMERS = PeerKind(
    "transformers",
    WORKERS / "transformers_worker.py",
    "torch transformers",
    _is_folder_of_transformers,
    "a Hugging Face folder with a config.json",
    "save the model as a folder",
)
LLAMA_CPP = PeerKind(
    "llama.cpp",
    WORKERS / "llamacpp_worker.py",
    "xllamacpp",
    _is_gguf,
    "a GGUF file",
    "make one of the same weights, with `python -m bench.peers.to_gguf IN.gguf OUT.gguf`",
)
OPENVINO = PeerKind(
    "openvino",
    WORKERS / "openvino_worker.py",
    "openvino-genai",
    _is_folder_of_openvino,
    "a folder that `optimum-cli export openvino` wrote",
    "`pip install 'optimum-intel[openvino]'`, "
    "`optimum-cli export openvino --model FOLDER --task text-generation-with-past --weight-format fp16 OUT`",
)
VLLM = PeerKind(
    "vllm",
    WORKERS / "vllm_worker.py",
    "vllm",
    _is_folder_of_transformers,
    "a Hugging Face folder with a config.json",
    "save the model as a folder",
    process_each=True,
)


KINDS = {kind.name: kind for kind in (TRANSFORMERS, LLAMA_CPP, OPENVINO, VLLM)}


class IsolatedPeer(Peer):
    """One worker process for all modes of a peer, or one a mode where they cannot share.

    python: the interpreter that has the peer's packages.
    start_seconds: until a worker that is loading counts as hung.
    """

    def __init__(
        self,
        kind: PeerKind,
        python: str,
        model_path: str,
        options: PeerOptions,
        start_seconds: float = _START_SECONDS,
    ):
        self.kind, self.name, self.modes = kind, kind.name, ()
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
            "cache_dtype": self._options.cache_dtype,
        }
        self._about = {"executable": self._python, "model": target, "threads": str(self._options.threads)}
        if draft is not None:
            self._about["draft model"] = draft
        elif self._options.draft_model is not None:
            self._about["draft model"] = f"none: {self._options.draft_model} is not {self.kind.model}"
        ready = self._start_worker("plain")
        self.modes = tuple(ready["modes"])
        self._about |= ready["about"]

    def run(self, mode: str, token_ids: Sequence[int], max_tokens: int, temperature: float) -> PeerAnswer:
        """Answer one prompt; a mode with a process of its own loads at its first prompt."""
        if mode not in self.modes:
            raise ConfigError(
                f"the peer {self.name} has no such mode",
                got=repr(mode),
                expected=" or ".join(map(repr, self.modes)) or "a peer that was started",
                fix=self._about.get("draft model") if mode == "draft" else None,
            )
        request = {"mode": mode, "token_ids": list(token_ids), "max_tokens": max_tokens, "temperature": temperature}
        return PeerAnswer(**self._asked(mode, request, max_tokens))

    def logprobs(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Log-probabilities of all tokens after a prompt, by id, where the worker knows them. Raises `PeerFailed`."""
        packed = self._asked("plain", {"call": "logprobs", "token_ids": list(token_ids)}, 1)
        return np.frombuffer(base64.b64decode(packed), np.float32)

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        self.modes = ()

    def describe(self) -> dict[str, str]:
        return dict(self._about)

    # Helpers

    def _asked(self, mode: str, request: Mapping[str, Any], max_tokens: int) -> Any:
        key = mode if self.kind.process_each else "plain"
        if key not in self._workers:
            self._start_worker(key)
        reply = self._workers[key].ask(request, _patience(max_tokens))
        if "answer" not in reply:
            raise PeerFailed(
                f"the peer {self.name} could not answer in mode {mode}",
                got=reply.get("error") or f"no module named {reply.get('missing')}",
            )
        return reply["answer"]

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


def _patience(max_tokens: int) -> float:
    """Seconds after which an answer counts as hung."""
    return 120 + 5 * max_tokens
