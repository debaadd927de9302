"""What a run of `paceline train vlm` asks in vain, told before it writes anything."""

from collections.abc import Sequence as Seq
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, SiglipVisionModel

from paceline.train.estimate import check_memory, size_of
from paceline.train.extras import need

from .config import VlmConfig
from .evaluate import load_nlvr
from .shape import image_token, kept_layers
from .tasks import LINEARS


def check_run(config: VlmConfig, language_model: Path, device: torch.device, todo: Seq[str]) -> None:
    """Raise `ConfigError` for what one of the stages `todo` would refuse."""
    need("accelerate", "training")
    need("peft", "training a vision-language model")
    image_token(language_model)
    tower = size_of(lambda: SiglipVisionModel(config.tower.config()))
    check_memory(tower, "this tower", device, "smaller sizes in tower.*")
    ranks = {"talk": config.talk.rank, "distill": config.distill.rank}
    rank = max((ranks[stage] for stage in ranks if stage in todo), default=0)
    check_memory(rank * _lora_width(language_model), "these low-rank layers", device, "a smaller rank")
    if "distill" in todo:
        kept_layers(language_model, config.distill.layers)
    if "eval" in todo and config.eval.nlvr is not None:
        load_nlvr(Path(config.eval.nlvr), config.eval.nlvr_limit)


def _lora_width(language_model: Path) -> int:
    """Parameters of low-rank layers of rank 1 in the whole language model."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(language_model, trust_remote_code=False), trust_remote_code=False
        )
    linears = [one for name, one in model.named_modules() if name.rpartition(".")[2] in LINEARS]
    return sum(one.in_features + one.out_features for one in linears if isinstance(one, nn.Linear))
