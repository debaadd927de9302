"""What training needs of a target, in a file: so the trainer loads no second model."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..methods.heads.info import HeadTarget
from ..system.files import replacing
from ..target import LoadedModel

FILE = "target.safetensors"
_SIZES = (
    "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters",
)  # fmt: skip
"""Of the configuration, the fields that shape a new head."""


@dataclass(frozen=True, kw_only=True)
class LearnTarget:
    """A target without its layers: all that recipes of heads read of a `LoadedModel`, on the CPU."""

    name: str
    fingerprint: str
    sketch: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    eos_ids: frozenset[int]
    embeddings: Tensor
    rows: Tensor
    model: Any
    origin: ClassVar[str] = ""
    tokenizer: ClassVar[None] = None
    device: ClassVar[torch.device] = torch.device("cpu")
    dtype: ClassVar[torch.dtype] = torch.float32

    def output_rows(self) -> Tensor:
        """As of `LoadedModel`."""
        return self.rows


def save_target(folder: Path, target: LoadedModel) -> None:
    """Write it."""
    rows, config = target.output_rows(), target.model.config.get_text_config()
    tensors, norm = {"embeddings": target.embeddings}, getattr(target.model.base_model, "norm", None)
    if rows is not target.embeddings:
        tensors["rows"] = rows
    if isinstance(norm, nn.Module) and isinstance(getattr(norm, "weight", None), Tensor):
        tensors["norm"] = cast("Tensor", norm.weight)
    sizes = {name: value for name in _SIZES if (value := getattr(config, name, None)) is not None}
    about = {"target": asdict(HeadTarget.of(target)), "eos_ids": sorted(target.eos_ids), "sizes": sizes}
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(folder / FILE) as part:
        save_file(plain, part, metadata={"about": json.dumps(about)})


def load_target(folder: Path) -> LearnTarget:
    """Read it."""
    with safe_open(folder / FILE, "pt") as file:
        about: Mapping[str, Any] = json.loads(file.metadata()["about"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    config = SimpleNamespace(**about["sizes"])
    norm = None
    if "norm" in tensors:
        norm = nn.RMSNorm(len(tensors["norm"]))
        norm.weight = nn.Parameter(tensors["norm"].float(), requires_grad=False)
    model = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: config), base_model=SimpleNamespace(norm=norm)
    )
    embeddings = tensors["embeddings"]
    return LearnTarget(
        **about["target"], eos_ids=frozenset(about["eos_ids"]), embeddings=embeddings,
        rows=tensors.get("rows", embeddings), model=model,
    )  # fmt: skip
