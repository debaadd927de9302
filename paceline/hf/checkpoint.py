"""The files of a model folder: checks before `transformers` opens them, and of what it has loaded."""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import Thread
from typing import Annotated, Any, cast

import torch
from huggingface_hub import HfApi, constants, is_offline_mode, snapshot_download, try_to_load_from_cache
from huggingface_hub.utils import validate_repo_id
from pydantic import Field
from safetensors import safe_open
from torch import nn
from transformers.initialization import no_init_weights
from transformers.utils import logging

from ..errors import ConfigError, DownloadError, PacelineError
from ..schema import Many, checked, cut, validate
from ..system.files import read_object
from ..system.turns import SHARED
from .pooling import POOLING_FILE
from .settings import check_settings, one_rope

CONFIG = "config.json"
_JSON = [f"{kind}_config.json" for kind in ("generation", "tokenizer", "processor", "preprocessor")]
_JSON += ["special_tokens_map.json", "added_tokens.json", "chat_template.json"]
_LAYERS = re.compile(r"(num|n)_(\w+_)?layers?|depth")
_NO_WEIGHTS = 10_000  # layers that are built where no weights say how many there are
_SHARD = re.compile(r"shard-\d+-model-.*")
_TEXTS = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
_LENGTH = 300  # of a library's message
_SECONDS = 2.0  # that the hub may take to say whether it has a model


@contextmanager
def refused(
    message: str, expected: str | None = None, fix: str | None = None, kind: type[PacelineError] = ConfigError
) -> Iterator[None]:
    """Whatever a library raises in the body becomes one error of `kind`: file readers raise errors of many kinds."""
    try:
        yield
    except PacelineError:
        raise
    except BaseException as error:
        # Libraries in Rust panic with a BaseException that is no Exception; KeyboardInterrupt passes through.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if "trust_remote_code" in str(error):
            raise ConfigError(
                message, got="code of its own, which would have to run", expected="a model that transformers knows",
                fix="pass --trust-remote-code, in Python trust_remote_code, if you trust who wrote that code",
            ) from error  # fmt: skip
        raise kind(message, got=f"{type(error).__name__}: {one_line(error)}", expected=expected, fix=fix) from error


@contextmanager
def quietly() -> Iterator[None]:
    """No progress bars of transformers and the hub in the body, unless HF_HUB_DISABLE_PROGRESS_BARS=0 asks for them."""
    were_on = logging.is_progress_bar_enabled() and constants.HF_HUB_DISABLE_PROGRESS_BARS is not False
    if were_on:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            logging.enable_progress_bar()


def one_line(error: BaseException) -> str:
    """The message of an exception in one line of bounded length, or else its type."""
    return cut(" ".join(str(error).split()), _LENGTH) or type(error).__name__


def local_folder(
    name_or_path: str,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    weights: bool = True,
) -> Path:
    """The folder of a model. For a hub id it is its snapshot in the hub's cache, which is fetched if it is missing.

    revision, token, cache_dir: of a hub id, as in transformers. weights: False fetches small files alone.

    The hub has two seconds to answer; without an answer the snapshot that was fetched last is taken.
    Raises `ConfigError` for what is neither, `DownloadError` for one that could not be fetched whole.
    """
    path, missing = Path(name_or_path), f"no model at {name_or_path!r}"
    expected = f"a folder with {CONFIG}, a GGUF file, a hub id, or a name that `paceline models` lists"
    try:
        is_folder, is_file = bool(name_or_path.strip()) and path.is_dir(), path.is_file()
        if not (is_folder or is_file):
            validate_repo_id(name_or_path)
    except (OSError, ValueError) as error:  # also for a name that no file can have
        raise ConfigError(missing, got="no such folder, and no hub id", expected=expected) from error
    if is_file:
        got, fix = "a file whose name does not end in .gguf", "name the folder that holds the model's files"
        raise ConfigError(f"{name_or_path!r} is not a model", got=got, expected=expected, fix=fix)
    if is_folder and revision is not None:
        raise ConfigError("a folder has no revision", got=f"revision={revision!r}", fix="leave it out")
    if is_folder:
        return path
    try:
        names = _files_in_hub(name_or_path, revision, token)
    except Exception as error:  # every transport raises its own kind
        cached = try_to_load_from_cache(name_or_path, CONFIG, cache_dir=cache_dir, revision=revision)
        if isinstance(cached, str):
            return Path(cached).parent
        cache = cache_dir or constants.HF_HUB_CACHE
        raise ConfigError(
            missing,
            got=f"no folder {str(path.absolute())!r}, nothing in the hub's cache {str(cache)!r}, and "
            f"from {constants.ENDPOINT}: {one_line(error)}",
            expected=expected,
            fix=f"check the name and the network; or run `hf download {name_or_path} --local-dir DIR` where there is a "
            "network, copy DIR here, and name it",
        ) from error
    with refused(f"{name_or_path!r} could not be fetched", fix="check the network and the disk", kind=DownloadError):
        return Path(
            snapshot_download(
                name_or_path, revision=revision, token=token, cache_dir=cache_dir, allow_patterns=wanted(names, weights)
            )
        )


def _files_in_hub(name: str, revision: str | None, token: str | bool | None) -> list[str]:
    """The files of a repository. Raises whatever a transport raises, and TimeoutError after two seconds.

    In a thread, since the timeouts of sockets leave out the look-up of a name, and begin anew with each address of it.
    """
    if is_offline_mode():
        raise ConnectionError("not asked, since HF_HUB_OFFLINE is set")
    answer: Future[list[str]] = Future()

    def ask() -> None:
        try:
            files = HfApi(token=token).model_info(name, revision=revision, timeout=_SECONDS).siblings
            answer.set_result([file.rfilename for file in files or ()])
        except Exception as error:
            answer.set_exception(error)

    Thread(target=ask, daemon=True).start()
    try:
        return answer.result(_SECONDS)
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"no answer in {_SECONDS:g} s") from error


def wanted(names: list[str], weights: bool = True) -> list[str]:
    """The files of a hub repository that are read: weights in safetensors, once, and every small text beside them."""
    held = [name for name in names if weights and name.endswith(SAFE) and not name.startswith("consolidated")]
    if WEIGHTS in held:
        held = [WEIGHTS]
    texts = [name for name in names if "/" not in name and name.endswith(_TEXTS)]
    return [name for name in names if name in (*held, *texts, POOLING_FILE)]


def check_folder(folder: Path) -> None:
    """Raise `ConfigError` for a folder with an adapter, or with broken JSON that `transformers` would pass over."""
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{str(folder)!r} holds an adapter, and no model", got="adapter_config.json", expected="a whole model",
            fix="load the model that it is for, with adapters={name: folder}; or merge it with peft: "
            "PeftModel.from_pretrained(base, folder).merge_and_unload().save_pretrained(new)",
        )  # fmt: skip
    if not (folder / CONFIG).is_file():
        raise ConfigError(
            f"no model at {str(folder)!r}", got=f"a folder without {CONFIG}",
            expected=f"a folder with {CONFIG}, a hub id, or a name that `paceline models` lists",
        )  # fmt: skip
    for name in (CONFIG, *_JSON):
        if (folder / name).is_file():
            content = read_object(folder / name, "fetch the model again")
            for settings in (content, content.get("text_config")) if name == CONFIG else ():
                with refused(f"{CONFIG} of {str(folder)!r} cannot be used", fix="fetch the model again"):
                    one_rope(f"{CONFIG} of {str(folder)!r}", settings or {})
    sharded = [path.name for path in folder.iterdir() if _SHARD.fullmatch(path.name)]
    if sharded:
        raise ConfigError(
            f"{str(folder)!r} is a distributed checkpoint", got=sharded[0], expected=WEIGHTS + " or an index beside it",
            fix="load it with transformers and save it again",
        )  # fmt: skip


def check_layers(folder: Path, num_tensors: int) -> None:
    """Raise `ConfigError` where config.json asks for more layers than there are weights: each would be built first."""
    config = read_object(folder / CONFIG, "fetch the model again")
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


def _integers(value: object) -> Iterator[tuple[str, int]]:
    """Every integer in nested objects with its key. Reading JSON has limited the depth."""
    if isinstance(value, Mapping):
        for key, inner in cast("Mapping[str, object]", value).items():
            if isinstance(inner, int):
                yield key, inner
            yield from _integers(inner)


SAFE = ".safetensors"
WEIGHTS = "model" + SAFE


@dataclass(frozen=True)
class Stored:
    """A tensor as a header describes it. `dtype` is a safetensors name, for example BF16. path: the file.

    name: in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    path: Path = Path()
    name: str = ""

    def read(self) -> Any:
        """The tensor over the mapped file."""
        with safe_open(self.path, framework="pt") as file:
            return file.get_tensor(self.name)


def weight_files(folder: Path, name: str = WEIGHTS) -> list[Path]:
    """The file `name` of a folder, or those that `name`.index.json lists; empty where there is neither.

    Raises `ConfigError` for an index that leads out of its folder, or to files of another format than `name`'s.
    """
    index = folder / f"{name}.index.json"
    if (folder / name).is_file():
        return [folder / name]
    if not index.is_file():
        return []
    listed = read_object(index, "fetch the model again").get("weight_map")
    parts = sorted(set(validate(dict[str, str], listed, f'"weight_map" of {str(index)!r}').values()))
    suffix = Path(name).suffix
    for part in parts:
        if part != Path(part).name or "\\" in part or Path(part).suffix != suffix:
            raise ConfigError(
                f"the index {str(index)!r} names a file that is not opened", got=repr(part),
                expected=f"files of kind {suffix} in the same folder",
                fix="fetch the model again, or convert its weights to safetensors where they are trusted",
            )  # fmt: skip
        if not (folder / part).is_file():
            raise ConfigError(f"{part} is missing in {str(folder)!r}", got="no such file", fix="fetch the model again")
    if not parts:
        raise ConfigError(f"the index {str(index)!r} names no files", fix="fetch the model again")
    return [folder / part for part in parts]


def read_headers(files: Sequence[Path]) -> Mapping[str, Stored]:
    """Every tensor of safetensors files by name; no numbers are read.

    Raises `ConfigError` for a damaged file, and for a name in two of them.
    """
    stored: dict[str, Stored] = {}
    for path in files:
        readable = refused(f"{str(path)!r} cannot be read", "a whole safetensors file", "fetch it again")
        with readable, safe_open(path, framework="pt") as file:
            for name in cast("list[str]", file.keys()):
                if name in stored:
                    message, got = "two files hold a tensor of the same name", f"{name!r} again in {str(path)!r}"
                    raise ConfigError(message, got=got, fix="fetch the model again")
                part = file.get_slice(name)
                stored[name] = Stored(part.get_dtype(), tuple(part.get_shape()), path, name)
    return stored


def read_tensors(stored: Mapping[str, Stored], names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Tensors over the mapped files. Each has a mapping of its own, so that memory is given back with the tensor."""
    for name in names:
        yield name, stored[name].read()


_SLACK = 1 << 24  # numbers that a model may hold beyond twice those of its files: buffers
_Size = Annotated[int, Field(ge=1, le=1 << 40)]


@checked
class _Relied:
    """What is relied on of a configuration of transformers, by the names that all of them answer to."""

    vocab_size: _Size
    hidden_size: _Size
    num_hidden_layers: _Size
    num_attention_heads: _Size | None  # recurrent models have none, and are refused by their state
    max_position_embeddings: _Size | None
    eos_token_id: int | Many[int] | None
    layer_types: Many[str] | None

    def __post_init__(self) -> None:
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ConfigError(
                '"layer_types" has a wrong length', got=len(self.layer_types), expected=self.num_hidden_layers
            )
        ends = self.eos_token_id
        wrong = [
            token for token in ([ends] if isinstance(ends, int) else ends or []) if not 0 <= token < self.vocab_size
        ]
        if wrong:
            raise ConfigError('"eos_token_id" names no token', got=wrong[0], expected=f"0 to {self.vocab_size - 1}")


def check_config(name: str, config: Any, generation: Any = None) -> None:
    """Raise `ConfigError` for a value of the wrong kind; generation: the configuration that names the last tokens."""
    text = config.get_text_config()
    settings = {key: getattr(text, key, None) for key in _Relied.__annotations__}
    settings["max_position_embeddings"] = settings["max_position_embeddings"] or None
    if generation is not None:
        settings["eos_token_id"] = generation.eos_token_id
    validate(_Relied, settings, f"the configuration of {name!r}")
    check_settings(f"the configuration of {name!r}", config.to_dict())


def on_meta(kind: Callable[..., Any], config: Any, **options: Any) -> Any:
    """A model of transformers without memory for its weights. kind: makes it from a config, which is copied."""
    with SHARED.taken(), torch.device("meta"), no_init_weights():
        return kind(copy.deepcopy(config), **options)


def check_model_size(name: str, build: Callable[[], Any], config: Any, stored: Mapping[str, Stored]) -> Any:
    """Build a model without memory for its weights, and return it.

    Raises `ConfigError` where config.json describes a far larger model than the weights are: what the files lack would
    be made up, memory of the sizes in config.json, filled with random numbers.
    """
    with refused(f"no model can be built from the configuration of {name!r}", fix="fetch the model again"):
        built = build()
        needed = sum(tensor.numel() for tensor in (*built.parameters(), *built.buffers()))
    packs = getattr(config, "quantization_config", None) is not None
    held = sum(prod(tensor.shape) for tensor in stored.values()) * (16 if packs else 1)
    if needed > 2 * held + _SLACK:
        raise ConfigError(
            f"the configuration of {name!r} describes a larger model than its weights are",
            got=f"{needed:,} numbers to hold", expected=f"about the {held:,} in its safetensors files",
            fix="fetch the model again, or name the right folder",
        )  # fmt: skip
    return built


def check_loaded_weights(
    name: str, model: nn.Module, loaded: Mapping[str, Any], stored: Mapping[str, Stored], beside: tuple[str, ...] = ()
) -> None:
    """Raise `ConfigError` for tensors that are missing, misshapen, left over or of a kind that loses what they hold.

    Transformers fills missing tensors with random numbers, drops left-over ones (the layers of a deeper model), and
    continues.

    loaded: the loading report, as of transformers, without the keys that it knows to be harmless. beside: what names
    begin with that are no part of the model.
    """
    unexpected = [str(key) for key in loaded["unexpected_keys"]]
    for fault, keys in (
        ("lacks", loaded["missing_keys"]),
        ("has misshapen", [f"{key} {list(held)} for {list(own)}" for key, held, own in loaded["mismatched_keys"]]),
        ("holds other", [key for key in unexpected if not key.startswith(beside)]),
        ("has weights of an unusable kind among its", _unusable(model, stored)),
    ):
        if keys:
            raise ConfigError(
                f"{name!r} {fault} weights",
                got=f"{len(keys)} of them, for example {sorted(map(str, keys))[0]}",
                expected="every tensor of the architecture in config.json, and no others",
                fix="fetch the model again, or name the right folder",
            )


def _unusable(model: nn.Module, stored: Mapping[str, Stored]) -> list[str]:
    """Complex weights, and integers where the model computes with floats: both would become real numbers silently."""
    packs = getattr(model, "hf_quantizer", None) is not None
    held = {key.rpartition(".")[2] for key, tensor in model.state_dict().items() if not tensor.is_floating_point()}
    dropped = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), r"(^|\.)position_ids$"]
    return [
        f"{key} ({tensor.dtype})"
        for key, tensor in stored.items()
        if tensor.dtype.startswith("C")
        or not (
            packs
            or tensor.dtype.startswith(("F", "BF"))
            or key.rpartition(".")[2] in held
            or any(re.search(p, key) for p in dropped)
        )
    ]
