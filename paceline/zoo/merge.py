"""Make a plain LLaVA folder of a packaged vision-language model and its base: what `pull` does for it.

base folder (bf16)     W ──────────────(+)── round ── language_model.model.layers.i.*.weight
lora.safetensors       A, B ── s B A ───┘
eyes.safetensors       vision_tower.*, multi_modal_projector.*
"""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..system.provenance import sha256_of
from .download import Progress, silent
from .gguf import save_weights
from .packaged import PackagedVlm, Part

if TYPE_CHECKING:
    from torch import Tensor

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def merge_vlm(
    model: PackagedVlm, base: Path, folder: Path, progress: Progress = silent, dtype: str | None = None
) -> None:
    """Write the merged model into the existing `folder`. dtype: of its weights, None: the packaged one.

    base: the folder of the base model, as transformers has it, with its tokenizer. Sums are float32, rounded once.
    Raises `ConfigError` for parts that are damaged, or for another base, `OSError` when the disk refuses.
    """
    import torch

    dtype = dtype or model.dtype
    for part in (model.eyes, *model.adapters, *(Part(f"model/{name}", sha256) for name, sha256 in model.model.items())):
        path = model.folder / part.file
        got = sha256_of(path) if path.is_file() else "no such file"
        if got != part.sha256:
            raise ConfigError(
                f"{model.name}: {part.file} is not the one that was packaged", got=got, expected=part.sha256,
                fix="install the models again",
            )  # fmt: skip
    weights = {f"language_model.{name}": value for name, value in language_weights(model, base, progress).items()}
    weights |= _open(model.folder / model.eyes.file)
    for name in model.model:
        _copy_json(model.folder / "model" / name, folder, config={"dtype": dtype} if name == "config.json" else None)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        _copy_json(base / name, folder)
    ready = {name: value.to(getattr(torch, dtype)).contiguous() for name, value in weights.items()}
    save_weights(ready, folder / "model.safetensors")


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

    from ..hf.fingerprint import hash_checkpoint

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
