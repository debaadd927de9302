"""LoRA adapters as peft saves them.

adapter_config.json          the rank, the scale and the linear layers that it is for
adapter_model.safetensors    base_model.model.PATH.lora_A.weight [rank, in] and .lora_B.weight [out, rank]

A layer of the model at PATH makes base(x) + scale * B (A x). The scale is alpha / rank, or alpha / sqrt(rank) with
rsLoRA.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from ..errors import ConfigError
from ..schema import Number, checked, cut, validate
from ..system.files import read_object
from .checkpoint import read_headers, refused
from .corrections import MAX_RANK

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_KEY = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_(?P<factor>[AB])\.weight")
_DTYPES = ("BF16", "F16", "F32")
MERGE = "merge it: PeftModel.from_pretrained(base, folder).merge_and_unload().save_pretrained(new)"
_KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal")  # ways to begin that leave the model's weights alone
_IDLE = {  # keys that do not change what a finished adapter computes
    *("base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version", "auto_mapping"),
    *(
        "ensure_weight_tying",
        "lora_dropout",
        "fan_in_fan_out",
        "layers_pattern",
        "eva_config",
        "megatron_core",
        "loftq_config",
        "runtime_config",
    ),
    *("qalora_group_size", "corda_config", "lora_ga_config"),
}
_REFUSED = {
    "use_dora": "DoRA",
    "bias": "biases",
    "lora_bias": "biases",
    "modules_to_save": "whole layers beside the low-rank ones",
    "trainable_token_indices": "embeddings of tokens",
    "target_parameters": "parameters that are no linear layers, such as stacked experts",
    "layer_replication": "layers that are used twice",
    "alora_invocation_tokens": "an activated LoRA",
    "use_qalora": "QALoRA",
    "megatron_config": "layers of Megatron",
}
_Rank = Annotated[int, Field(ge=1, le=1 << 16)]


@checked
class _Config:
    """What is read of adapter_config.json."""

    r: _Rank
    lora_alpha: Number
    target_modules: str | list[str]
    use_rslora: bool = False
    rank_pattern: dict[str, _Rank] | None = None
    alpha_pattern: dict[str, Number] | None = None
    layers_to_transform: int | list[int] | None = None
    exclude_modules: str | list[str] | None = None
    init_lora_weights: bool | str = True


@dataclass(frozen=True, eq=False)
class PeftAdapter:
    """A LoRA adapter.

    pairs: A [rank, in] and the scale times B [out, rank], float32, by the path of the layer in peft's model.
    fingerprint: of all that it computes. base: the model that it says it is for.
    """

    pairs: Mapping[str, tuple[Tensor, Tensor]]
    fingerprint: str
    base: str
    config: "_Config"

    @property
    def rank(self) -> int:
        """The largest rank of a layer."""
        return max(len(a) for a, _ in self.pairs.values())

    def is_for(self, path: str) -> bool | None:
        """Whether its config names the linear layer of a model at this path; None where that is a pattern."""
        targets, outside = self.config.target_modules, self.config.exclude_modules or []
        if isinstance(targets, str) or isinstance(outside, str):
            return None
        only = self.config.layers_to_transform
        layers = None if only is None else {str(one) for one in ([only] if isinstance(only, int) else only)}
        is_layer = layers is None or bool(layers & {*path.split(".")})
        return is_layer and _is_named(path, targets) and not _is_named(path, outside)


def _is_named(path: str, names: Sequence[str]) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in names)


def read_adapter(folder: Path) -> PeftAdapter:
    """Read a folder. Raises `ConfigError` for what is no LoRA adapter, and for kinds that passes cannot compute."""
    if not (folder / CONFIG).is_file():
        raise ConfigError(
            f"no adapter at {str(folder)!r}",
            got=f"a folder without {CONFIG}" if folder.is_dir() else "no such folder",
            expected=f"a folder of peft with {CONFIG} and {WEIGHTS}",
        )  # fmt: skip
    content = read_object(folder / CONFIG, "save the adapter again")
    config = _checked_config(content, f"the adapter {str(folder)!r}")
    if not (folder / WEIGHTS).is_file():
        others = sorted(path.name for path in folder.glob("adapter_model*"))
        raise ConfigError(
            f"no weights in {str(folder)!r}", got=", ".join(others) or "no file of them", expected=WEIGHTS,
            fix="save the adapter again with safe_serialization=True; other formats can run code when they are read",
        )  # fmt: skip
    tensors = _read(folder / WEIGHTS)
    pairs = {path: _pair(path, tensors, config) for path in dict.fromkeys(path for path, _ in tensors)}
    digest = hashlib.sha256()
    for path, (a, b) in sorted(pairs.items()):
        digest.update(f"{path} {tuple(a.shape)} {tuple(b.shape)}\n".encode())
        digest.update(a.contiguous().numpy().tobytes())
        digest.update(b.contiguous().numpy().tobytes())
    return PeftAdapter(pairs, digest.hexdigest(), str(content.get("base_model_name_or_path") or ""), config)


def _checked_config(content: Mapping[str, Any], what: str) -> _Config:
    """The config of a LoRA adapter that passes can compute."""
    if (kind := content.get("peft_type")) != "LORA":
        raise ConfigError(f"{what} is no LoRA adapter", got=f'"peft_type" {kind!r}', expected="LORA", fix=MERGE)
    for name, label in _REFUSED.items():
        if (value := content.get(name)) and value != "none":
            raise ConfigError(
                f"{what} has {label}, which cannot be computed for each request", got=f'"{name}"', fix=MERGE
            )
    known = {*_Config.__dataclass_fields__, *_IDLE, *_REFUSED, "peft_type"}
    if others := [name for name, value in content.items() if name not in known and value]:
        message = f"{what} has options that are not known here"
        raise ConfigError(message, got=", ".join(f'"{name}"' for name in others), fix=MERGE)
    given = {name: content[name] for name in _Config.__dataclass_fields__ if name in content}
    config: _Config = validate(_Config, given, what)
    if config.init_lora_weights not in _KEEPS_BASE:
        message = f"{what} was begun in a way that changes the model's own weights"
        got = f'"init_lora_weights" {config.init_lora_weights!r}'
        raise ConfigError(
            message, got=got, fix="convert it when it is saved (path_initial_model_for_weight_conversion)"
        )
    return config


def _read(file: Path) -> dict[tuple[str, str], Tensor]:
    """The factors A and B of each path, float32, finite and of two dimensions."""
    stored, tensors = read_headers([file]), dict[tuple[str, str], Tensor]()
    for name, header in stored.items():
        match = _KEY.fullmatch(name)
        if match is None:
            message = f"{str(file)!r} holds a tensor that is none of a LoRA layer"
            raise ConfigError(
                message, got=cut(name), expected="base_model.model.PATH.lora_A.weight and lora_B", fix=MERGE
            )
        if header.dtype not in _DTYPES or len(header.shape) != 2 or 0 in header.shape:
            message, got = f"{cut(name)} of {str(file)!r} is no matrix", f"{header.dtype} {[*header.shape]}"
            raise ConfigError(message, got=got, expected=f"two dimensions in {', '.join(_DTYPES)}")
        if (rank := header.shape[0 if match["factor"] == "A" else 1]) > MAX_RANK:
            raise ConfigError(
                f"the rank of {cut(name)} is too large", got=rank, expected=f"at most {MAX_RANK}", fix=MERGE
            )
    for name, header in stored.items():
        with refused(f"{str(file)!r} cannot be read", "a whole safetensors file", "save the adapter again"):
            weight = header.read().to(torch.float32)
        if not bool(weight.isfinite().all()):
            raise ConfigError(f"{cut(name)} of {str(file)!r} holds NaN or infinity", fix="train the adapter again")
        match = _KEY.fullmatch(name)
        assert match is not None
        tensors[match["path"], match["factor"]] = weight
    if not tensors:
        raise ConfigError(f"{str(file)!r} holds no tensors", expected="those of a LoRA adapter")
    return tensors


def _pair(path: str, tensors: Mapping[tuple[str, str], Tensor], config: _Config) -> tuple[Tensor, Tensor]:
    """The factors of a layer, B with the scale."""
    a, b = tensors.get((path, "A")), tensors.get((path, "B"))
    if a is None or b is None:
        missing = f"lora_{'A' if a is None else 'B'}"
        raise ConfigError(f"an adapter lacks {missing} of {cut(path)}", expected="both factors of each layer")
    rank = _by_pattern(path, config.rank_pattern, config.r)
    if len(a) != rank or b.shape[1] != rank:
        message = f"the factors of {cut(path)} have another rank than {CONFIG} says"
        raise ConfigError(message, got=f"{[*a.shape]} and {[*b.shape]}", expected=f"rank {rank}")
    scale = _by_pattern(path, config.alpha_pattern, config.lora_alpha) / (rank**0.5 if config.use_rslora else rank)
    return a, b * scale


def _by_pattern(path: str, patterns: Mapping[str, Any] | None, default: Any) -> Any:
    """The value of the first pattern that is the end of a path, as peft reads it; otherwise the default."""
    for pattern, value in (patterns or {}).items():
        with refused(f"{CONFIG} has a pattern that cannot be read", "a name, or a regular expression"):
            if re.match(rf"(.*\.)?({pattern})$", path):
                return value
    return default
