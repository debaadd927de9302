"""Vision-language models kept as what was trained over a base model; `build` makes a plain LLaVA folder of both.

    NAME/vlm.json               what it is made of, with the hash of every part
    NAME/lora.safetensors       its low-rank layers over the base model
    NAME/vision.safetensors     its vision tower and projector; another model may share them
    NAME/model/*                config.json, processor and chat template, as they go into the built folder

base folder (bf16)     W ──────────────(+)── round ── language_model.model.layers.i.*.weight
lora.safetensors       A, B ── s B A ───┘
vision.safetensors     vision_tower.*, multi_modal_projector.*
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from paceline.errors import ConfigError
from paceline.schema import Many, checked, validate
from paceline.system.files import Progress, silent
from paceline.system.provenance import sha256_of
from paceline.zoo.entry import ZooEntry

if TYPE_CHECKING:
    from torch import Tensor

ABOUT = "vlm.json"
FORMAT = 1
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


@checked
class Part:
    """A file, relative to the model's folder, and its hash."""

    file: str
    sha256: str


@checked
class Adapter:
    """A file of low-rank layers: `scale` B A is added to a weight. layers: which of them each of the model's takes."""

    file: str
    sha256: str
    scale: float
    layers: Many[int]


@checked
class PackagedVlm(ZooEntry):
    """One model, as vlm.json describes it, with its name, its folder and the hash of vlm.json.

    base: a model of the zoo. base_fingerprint: of the checkpoint it was trained on, see `hf.fingerprint`; it is
    merged with no other. layers: the decoder layers of the base that are kept, in order. adapters: added one after the
    other. model: file names and hashes of the folder `model`. dtype: of the pulled folder's weights. parameters: of the
    whole model.
    """

    name: str
    folder: Path
    sha256: str
    paceline_vlm: Literal[1]
    description: str
    licence: str
    base: str
    base_fingerprint: str
    layers: Many[int]
    vision: Part
    adapters: Many[Adapter]
    dtype: Literal["float32", "bfloat16", "float16"]
    parameters: int
    model: Mapping[str, str]
    download_bytes: Literal[0] = 0
    takes_images: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse a file elsewhere: parts lie in this folder or in that of another model, the rest in model/."""
        root = self.folder.parent.resolve()
        for part in (self.vision, *self.adapters):
            if not (self.folder / part.file).resolve().is_relative_to(root) or not part.file.endswith(".safetensors"):
                raise ConfigError(f"{part.file!r} is no safetensors file of a packaged model")
        for name in self.model:
            if name != Path(name).name:
                raise ConfigError(f"{name!r} is no file of this folder")

    @property
    def source(self) -> str:
        """The place the weights come from, in words."""
        return f"{self.base} and what was trained for it in this package"

    @property
    def needed_bytes(self) -> int:
        """Free disk space that a pull needs, without the base model: weights, and 4 MB of tokenizer."""
        return self.parameters * (4 if self.dtype == "float32" else 2) + 4_000_000

    def build(self, base: Path | None, folder: Path, progress: Progress = silent) -> None:
        """Merge it with the pulled base into the empty `folder`. Raises as `merge_vlm` does."""
        assert base is not None
        merge_vlm(self, base, folder, progress)


def read_vlm(folder: Path) -> PackagedVlm:
    """The packaged model in a folder; its weights are not opened. Raises `ConfigError` for a damaged one."""
    try:
        text = (folder / ABOUT).read_bytes()
    except OSError as error:
        raise _damaged(folder, error) from error
    return parse_vlm(folder, text)


def parse_vlm(folder: Path, text: bytes) -> PackagedVlm:
    """The packaged model that the folder is, or will be once `text` is its vlm.json. Raises `ConfigError`."""
    place = {"name": folder.name, "folder": str(folder), "sha256": hashlib.sha256(text).hexdigest()}
    try:
        return validate(PackagedVlm, {**json.loads(text), **place}, str(folder / ABOUT))
    except (ConfigError, ValueError, TypeError) as error:
        raise _damaged(folder, error) from error


def _damaged(folder: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"the packaged model {folder.name!r} is damaged", got=str(error), expected=f"a whole {ABOUT}",
        fix="install the models again, or package it again",
    )  # fmt: skip


def merge_vlm(
    model: PackagedVlm, base: Path, folder: Path, progress: Progress = silent, dtype: str | None = None
) -> None:
    """Write the merged model into the existing `folder`. dtype: of its weights, None: the packaged one.

    base: the folder of the base model, as transformers has it, with its tokenizer. Sums are float32, rounded once.
    Raises `ConfigError` for parts that are damaged, or for another base, `OSError` when the disk refuses.
    """
    import torch
    from safetensors.torch import save_file

    dtype = dtype or model.dtype
    texts = [Part(f"model/{name}", sha256) for name, sha256 in model.model.items()]
    for part in (model.vision, *model.adapters, *texts):
        path = model.folder / part.file
        got = sha256_of(path) if path.is_file() else "no such file"
        if got != part.sha256:
            raise ConfigError(
                f"{model.name}: {part.file} is not the one that was packaged", got=got, expected=part.sha256,
                fix="install the models again",
            )  # fmt: skip
    weights = {f"language_model.{name}": value for name, value in language_weights(model, base, progress).items()}
    weights |= _open(model.folder / model.vision.file)
    for name in model.model:
        _copy_json(model.folder / "model" / name, folder, config={"dtype": dtype} if name == "config.json" else None)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        _copy_json(base / name, folder)
    ready = {name: value.to(getattr(torch, dtype)).contiguous() for name, value in weights.items()}
    save_file(ready, folder / "model.safetensors", metadata={"format": "pt"})


def _copy_json(source: Path, folder: Path, config: dict[str, str] | None = None) -> None:
    """Copy one text file; `config` is put into a model's config and those of its halves.

    The tokenizer's own chat template is left out: it would hide the one for images.
    """
    text = source.read_text(encoding="utf-8")
    if config is not None or source.name == "tokenizer_config.json":
        content = json.loads(text)
        content.pop("chat_template", None)
        for part in (content, content.get("text_config"), content.get("vision_config")):
            if part is not None:
                part.update(config or {})
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    (folder / source.name).write_text(text, encoding="utf-8")


def language_weights(model: PackagedVlm, base: Path, progress: Progress = silent) -> "dict[str, Tensor]":
    """Weights of the layers that are kept, by the names of the language model; float32 where low-rank layers were
    added.
    """
    adapters = [(adapter, _open(model.folder / adapter.file)) for adapter in model.adapters]
    used: set[tuple[int, str]] = set()
    new_index = {layer: i for i, layer in enumerate(model.layers)}
    weights: dict[str, Tensor] = {}
    plain = _base_weights(base)
    if (found := _fingerprint(base, plain)) != model.base_fingerprint:
        raise ConfigError(
            f"{model.name} was trained on another base model", got=f"{str(base)!r}, fingerprint {found[:12]}",
            expected=f"{model.base}, fingerprint {model.base_fingerprint[:12]}",
            fix=f"merge it with {model.base} itself, no fine-tune of it",
        )  # fmt: skip
    for done, (name, weight) in enumerate(plain.items(), start=1):
        if (found := _LAYER.fullmatch(name)) is None:
            weights[name] = weight
            continue
        i, rest = new_index.get(int(found[1])), found[2]
        if i is None:
            continue
        for which, (adapter, factors) in enumerate(adapters):
            key = f"layers.{adapter.layers[i]}.{rest.removesuffix('.weight')}"
            if f"{key}.lora_A" in factors:
                a, b = factors[f"{key}.lora_A"].float(), factors[f"{key}.lora_B"].float()
                if (b.shape[0], a.shape[1]) != tuple(weight.shape):
                    raise _unfit(model, f"{name} is {tuple(weight.shape)}", f"{(b.shape[0], a.shape[1])}")
                weight = weight.float() + adapter.scale * (b @ a)
                used |= {(which, f"{key}.lora_A"), (which, f"{key}.lora_B")}
        weights[f"model.layers.{i}.{rest}"] = weight
        progress("convert", done, len(plain))
    for which, (adapter, factors) in enumerate(adapters):
        kept = tuple(f"layers.{layer}." for layer in adapter.layers)
        left = [key for key in factors if (which, key) not in used and key.startswith(kept)]
        if left:
            raise _unfit(model, f"nothing to add {left[0]} to", "the base that it was trained on")
    missing = [str(i) for i in range(len(model.layers)) if f"model.layers.{i}.input_layernorm.weight" not in weights]
    if missing:
        raise _unfit(model, "no layer " + ", ".join(missing), f"the layers {model.layers}")
    return weights


def base_fingerprint(base: Path) -> str:
    """What a packaged model records of the folder of its base. Raises `ConfigError` where there are no weights."""
    return _fingerprint(base, _base_weights(base))


def _fingerprint(base: Path, weights: "dict[str, Tensor]") -> str:
    """`hash_checkpoint` of a causal language model that is not loaded."""
    from transformers import AutoConfig

    from paceline.hf.fingerprint import hash_checkpoint

    try:
        config: Any = AutoConfig.from_pretrained(base, trust_remote_code=False)
    except (OSError, ValueError) as error:
        got = str(error).splitlines()[0]
        raise ConfigError(f"{str(base)!r} is no base model", got=got, expected="a usable config.json") from error
    if config.tie_word_embeddings:
        weights = {"lm_head.weight": weights["model.embed_tokens.weight"], **weights}  # files hold one of the two
    return hash_checkpoint(config, weights)


def _base_weights(base: Path) -> "dict[str, Tensor]":
    files = sorted(base.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"the base model in {str(base)!r} has no weights", expected="*.safetensors")
    return {name: value for file in files for name, value in _open(file).items()}


def _open(path: Path) -> "dict[str, Tensor]":
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ConfigError(f"{path} cannot be read", got=str(error), expected="a safetensors file") from error


def _unfit(model: PackagedVlm, got: str, expected: str) -> ConfigError:
    return ConfigError(f"{model.name} does not fit its base {model.base}", got=got, expected=expected)
