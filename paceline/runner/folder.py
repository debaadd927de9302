"""What is known of a model folder before `transformers` opens it, and what its libraries raise, told as our errors."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from ..errors import ConfigError, DownloadError, PacelineError
from ..hf.weight_files import SAFE, WEIGHTS
from ..system.files import read_json

CONFIG = "config.json"
_JSON = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "processor_config.json",
    "preprocessor_config.json",
    "chat_template.json",
)
_LAYERS = re.compile(r"(num|n)_(\w+_)?layers?|depth")
_NO_WEIGHTS = 10_000  # layers that are built where no weights say how many there are
_SHARD = re.compile(r"shard-\d+-model-.*")
_TEXTS = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
_LENGTH = 300  # of what a library says
_SECONDS = 5.0  # that the hub may take to say whether it has a model


@contextmanager
def refused(
    what: str, expected: str | None = None, fix: str | None = None, kind: type[PacelineError] = ConfigError
) -> Iterator[None]:
    """Whatever a library raises inside becomes one error of `kind`: readers of files raise whatever they stumble on."""
    try:
        yield
    except PacelineError:
        raise
    except BaseException as error:
        # What is written in Rust panics with an exception that is none, as KeyboardInterrupt is none.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if "trust_remote_code" in str(error):
            raise ConfigError(
                what, got="code of its own, which would have to run", expected="a model that transformers knows",
                fix="pass --trust-remote-code, in Python trust_remote_code, if you trust who wrote that code",
            ) from error  # fmt: skip
        raise kind(what, got=f"{type(error).__name__}: {one_line(error)}", expected=expected, fix=fix) from error


def one_line(error: BaseException) -> str:
    """What an exception says, in one line of bounded length, or its type."""
    text = " ".join(str(error).split())
    return (text if len(text) <= _LENGTH else text[: _LENGTH - 3] + "...") or type(error).__name__


def local_folder(name_or_path: str) -> Path:
    """The folder of a model; that of a hub id is its snapshot in the hub's cache, fetched where it is not there.

    The hub is asked once, for a few seconds; without an answer the snapshot that was fetched last is taken.
    Raises `ConfigError` for what is neither, `DownloadError` for one that could not be fetched whole.
    """
    from huggingface_hub import HfApi, is_offline_mode, snapshot_download, try_to_load_from_cache
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    missing = f"no model at {name_or_path!r}"
    expected = f"a folder with {CONFIG}, a hub id, or a name that `paceline models` lists"
    try:
        if name_or_path.strip() and Path(name_or_path).is_dir():
            return Path(name_or_path)
        validate_repo_id(name_or_path)
    except (HFValidationError, OSError, ValueError) as error:  # also for a name that no file can have
        raise ConfigError(missing, got="no such folder, and no hub id", expected=expected) from error
    try:
        if is_offline_mode():
            raise ConnectionError("not asked, since HF_HUB_OFFLINE is set")
        names = [one.rfilename for one in HfApi().model_info(name_or_path, timeout=_SECONDS).siblings or ()]
    except Exception as error:  # every transport raises its own kind
        cached = try_to_load_from_cache(name_or_path, CONFIG)
        if isinstance(cached, str):
            return Path(cached).parent
        raise ConfigError(
            missing, got=f"no such folder, nothing in the hub's cache, and from the hub: {one_line(error)}",
            expected=expected, fix="check the name and the network, or fetch the folder where there is one",
        ) from error  # fmt: skip
    with refused(f"{name_or_path!r} could not be fetched", fix="check the network and the disk", kind=DownloadError):
        return Path(snapshot_download(name_or_path, allow_patterns=wanted(names)))


def wanted(names: list[str]) -> list[str]:
    """The files of a hub repository that are read: weights in safetensors, once, and every small text beside them."""
    weights = [name for name in names if name.endswith(SAFE) and not name.startswith("consolidated")]
    if WEIGHTS in weights:
        weights = [WEIGHTS]
    return [name for name in names if "/" not in name and (name in weights or name.endswith(_TEXTS))]


def check_folder(folder: Path) -> None:
    """Raise `ConfigError` for a folder with an adapter, or with broken JSON that `transformers` would pass over."""
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{str(folder)!r} holds an adapter, which is not applied", got="adapter_config.json",
            expected="a whole model",
            fix="merge it with peft: PeftModel.from_pretrained(base, folder).merge_and_unload().save_pretrained(new)",
        )  # fmt: skip
    if not (folder / CONFIG).is_file():
        raise ConfigError(
            f"no model at {str(folder)!r}", got=f"a folder without {CONFIG}",
            expected=f"a folder with {CONFIG}, a hub id, or a name that `paceline models` lists",
        )  # fmt: skip
    for name in (CONFIG, *_JSON):
        if (folder / name).is_file():
            _object(folder / name)
    sharded = [path.name for path in folder.iterdir() if _SHARD.fullmatch(path.name)]
    if sharded:
        raise ConfigError(
            f"{str(folder)!r} is a distributed checkpoint", got=sharded[0], expected=WEIGHTS + " or an index beside it",
            fix="load it with transformers and save it again",
        )  # fmt: skip


def check_layers(folder: Path, num_tensors: int) -> None:
    """Raise `ConfigError` where config.json asks for more layers than there are weights: each would be built first."""
    config = _object(folder / CONFIG)
    if config.get("transformers_weights") is not None:
        raise ConfigError(
            f"{CONFIG} of {str(folder)!r} names other weights", got=config["transformers_weights"], expected=WEIGHTS,
            fix='rename that file, and remove "transformers_weights"',
        )  # fmt: skip
    most = num_tensors or _NO_WEIGHTS
    for key, value in _integers(config):
        if _LAYERS.fullmatch(key) and value > most:
            raise ConfigError(
                f"{CONFIG} of {str(folder)!r} asks for more layers than there are weights", got=f"{key} {value:,}",
                expected=f"at most {most:,}, the number of tensors", fix="fetch the model again",
            )  # fmt: skip


def _object(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{str(path)!r} is not a JSON object", got=type(value).__name__, fix="fetch the model again")
    return cast("dict[str, Any]", value)


def _integers(value: object) -> Iterator[tuple[str, int]]:
    """Every integer in nested objects with its key. Reading JSON has limited the depth."""
    if isinstance(value, Mapping):
        for key, inner in cast("Mapping[str, object]", value).items():
            if isinstance(inner, int):
                yield key, inner
            yield from _integers(inner)
