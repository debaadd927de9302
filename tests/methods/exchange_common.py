"""Tiny random heads, and foreign folders written by hand: not by the exporter, which the readers are there to check."""

import json
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as Tokens
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from paceline.methods.dflash.head import DFlashConfig, DFlashHead
from paceline.methods.eagle.head import EagleConfig, EagleHead
from paceline.methods.heads.folder import save_head
from paceline.methods.parallel.head import MedusaConfig, MedusaHead
from paceline.target import LoadedModel, wrap_model
from tests.tiny import tiny_model

VOCAB, DRAFT, WIDTH, LAYERS = 97, 40, 32, 8
STATES = (1, 3, 6)  # not the default (2, 4, 5): a reader that ignores the config must fail


@cache
def target() -> LoadedModel:
    return wrap_model(tiny_model("llama", num_hidden_layers=LAYERS), few_tokens(), name="tiny")


def few_tokens() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of `VOCAB` tokens, of which one is merged."""
    names = [*sorted(ByteLevel.alphabet())[: VOCAB - 1], "!!"]
    tokens = Tokens(BPE({name: place for place, name in enumerate(names)}, [("!", "!")]))
    tokens.pre_tokenizer = ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokens)


def draft_ids(size: int = DRAFT) -> Tensor:
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:size].sort().values


def randomised(module: nn.Module) -> nn.Module:
    """Weights a bfloat16 file holds without rounding, large enough that every one of them shows in the logits."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.3)
        parameter.data = parameter.data.bfloat16().float()
    return module.eval()


def eagle(version: int = 3, size: int = DRAFT, **options) -> EagleHead:
    states = options.pop("states", (LAYERS,) if version == 1 else STATES)
    config = EagleConfig(WIDTH, states, size, VOCAB, 48, 4, 2, 8, version, WIDTH, **options)
    return randomised(EagleHead(config, draft_ids(size)))


def dflash(size: int = DRAFT, **options) -> DFlashHead:
    options = {"qk_norm": True, "num_hidden_layers": 2, "states": (2, 4, 6), **options}
    config = DFlashConfig(WIDTH, options.pop("states"), size, VOCAB, 48, 4, 2, 8, 11, 6, **options)
    return randomised(DFlashHead(config, draft_ids(size)))


def medusa(size: int = DRAFT, **options) -> MedusaHead:
    return randomised(MedusaHead(MedusaConfig(WIDTH, (LAYERS,), size, VOCAB, 3, **options), draft_ids(size)))


def saved(folder: Path, head: nn.Module) -> Path:
    return save_head(folder, head, target(), {})


def plain_config(**changes) -> dict:
    """Of an EAGLE head as its repository and the engines have it."""
    base = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
    }
    return {key: value for key, value in {**base, **changes}.items() if value is not None}


def published(head: EagleHead, layer: str = "midlayer.") -> dict[str, Tensor]:
    """The tensors of an EAGLE-3 head as the engines name them, d2t as offsets."""
    tensors = {name.replace("layers.0.", layer): t for name, t in head.state_dict().items() if name != "draft_ids"}
    ids = head.draft_ids
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[ids] = True
    return {**tensors, "d2t": ids - torch.arange(len(ids)), "t2d": mask}


def folder_of(path: Path, config: dict, tensors: dict[str, Tensor], name: str = "model.safetensors") -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    if name.endswith(".safetensors"):
        save_file({key: value.contiguous() for key, value in tensors.items()}, path / name)
    else:
        torch.save(tensors, path / name)
    return path


def agree(ours: nn.Module, theirs: nn.Module) -> bool:
    """Same logits, bit for bit up to the order of sums."""
    from paceline.methods.heads.exchange import largest_difference
    from paceline.methods.heads.published import TargetFacts

    return largest_difference(ours, theirs, TargetFacts("tiny", LAYERS, WIDTH, VOCAB)) < 1e-5
