"""What each peer that runs as a worker needs: its script, its packages and its model files."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigError
from .base import PeerOptions

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
            f"(`--{option.replace('_', '-')} {self.name}=PATH` of `paceline bench`)",
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
    "make one of the same weights, with `python -m paceline.eval.peers.to_gguf IN.gguf OUT.gguf`",
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
