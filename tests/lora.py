"""Random LoRA adapters in peft's format, and the slow oracle: merged weights in a model of transformers."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """What `target_modules="all-linear"` of peft is: all but the output layer."""
    head = model.get_output_embeddings()
    return {path: one for path, one in model.named_modules() if isinstance(one, nn.Linear) and one is not head}


def save(
    folder: Path, model: PreTrainedModel, rank: int = 4, names: tuple[str, ...] = (), seed: int = 0,
    strength: float = 0.5, ranks: Mapping[str, int] | None = None, **config: object,
) -> Path:  # fmt: skip
    """An adapter for the linear layers with these last names, or for all; it moves the logits clearly."""
    chosen = {path: one for path, one in linears(model).items() if not names or path.rsplit(".")[-1] in names}
    made, pairs = torch.Generator().manual_seed(seed), dict[str, tuple[Tensor, Tensor]]()
    for path, linear in chosen.items():
        own = (ranks or {}).get(path.rsplit(".")[-1], rank)
        a, b = ((own, linear.in_features), linear.in_features), ((linear.out_features, own), own / strength**2)
        pairs[path] = tuple(torch.randn(shape, generator=made) * size**-0.5 for shape, size in (a, b))  # type: ignore
    return write(folder, pairs, r=rank, rank_pattern=dict(ranks or {}), **{"lora_alpha": rank} | config)


def write(folder: Path, pairs: Mapping[str, tuple[Tensor, Tensor]], **config: object) -> Path:
    """An adapter with these factors, by the paths of linear layers."""
    modules = sorted({path.rsplit(".")[-1] for path in pairs})
    about = {"peft_type": "LORA", "target_modules": modules, "bias": "none", **config}
    tensors = {
        f"base_model.model.{path}.lora_{letter}.weight": factor
        for path, pair in pairs.items()
        for letter, factor in zip("AB", pair, strict=True)
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(about))
    save_file(tensors, folder / WEIGHTS)
    return folder


def merged(model: PreTrainedModel, folder: Path | None) -> PreTrainedModel:
    """A copy with W + scale B A in the place of each W, as peft's `merge_and_unload`; None: a plain copy."""
    made = copy.deepcopy(model)
    if folder is None:
        return made
    about, tensors = json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)
    for key, a in tensors.items():
        if ".lora_A." not in key:
            continue
        path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        alpha = about.get("alpha_pattern", {}).get(path.rsplit(".")[-1], about["lora_alpha"])
        scale = alpha / (len(a) ** 0.5 if about.get("use_rslora") else len(a))
        weight = made.get_submodule(path).weight
        with torch.no_grad():
            weight += (scale * tensors[key.replace("lora_A", "lora_B")].float() @ a.float()).to(weight.dtype)
    return made
