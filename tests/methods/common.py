"""Tiny targets and heads of every method, as the tests of this folder save and read them."""

import json
from pathlib import Path

import torch
from transformers import PreTrainedModel

from paceline.hf.load import KV_CACHE
from paceline.methods.dflash.head import DFlashConfig, DFlashHead
from paceline.methods.dspark.head import DSparkConfig, DSparkHead
from paceline.methods.eagle.head import EagleConfig, EagleHead
from paceline.methods.heads.folder import save_head
from paceline.methods.heads.info import Head
from paceline.methods.parallel.head import BlockwiseConfig, BlockwiseHead, MedusaConfig, MedusaHead
from paceline.methods.self_int4.head import Int4Draft, Int4DraftConfig
from paceline.methods.space.adapter import SpaceAdapter, SpaceConfig
from paceline.target import LoadedModel
from tests.helpers import VOCAB, loaded
from tests.tiny import tiny_model

IDS = torch.arange(3, VOCAB, 2)  # [47]
_LAYER = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_VOCABULARY = {"draft_vocab_size": len(IDS), "vocab_size": VOCAB}


def new_head(method: str, seed: int = 0) -> Head:
    """A random head for `tests.helpers.loaded()`: hidden size 32, two layers."""
    torch.manual_seed(seed)
    last = {"hidden_size": 32, "states": (2,), **_VOCABULARY}
    eagle = {"hidden_size": 32, "target_hidden_size": 32, **_LAYER, **_VOCABULARY}
    if method == "eagle":
        head: Head = EagleHead(EagleConfig(version=1, states=(2,), **eagle), IDS)
    elif method == "eagle3":
        head = EagleHead(EagleConfig(version=3, states=(0, 1, 2), own_lm_head=True, **eagle), IDS)
    elif method == "peagle":
        masks = {"mask_token_id": 5, "num_speculative_tokens": 3}
        head = EagleHead(EagleConfig(version=3, states=(0, 1, 2), own_lm_head=True, **masks, **eagle), IDS)
    elif method in ("dflash", "jetspec"):
        last["states"] = 1, 2
        causal = method == "jetspec"
        head = DFlashHead(DFlashConfig(mask_token_id=5, block_size=4, causal=causal, **_LAYER, **last), IDS)
    elif method == "dspark":
        last["states"] = 1, 2
        head = DSparkHead(DSparkConfig(mask_token_id=5, block_size=4, markov_rank=8, **_LAYER, **last), IDS)
    elif method == "medusa":
        head = MedusaHead(MedusaConfig(num_heads=3, **last), IDS)
    elif method == "blockwise":
        head = BlockwiseHead(BlockwiseConfig(num_heads=3, intermediate_size=48, **last), IDS)
    elif method == "space":
        head = SpaceAdapter(SpaceConfig(32, 2, VOCAB, 3, False, 4, ("self_attn.q_proj",), ((32, 32),), 6))
    elif method == "self_int4":
        draft = Int4Draft(Int4DraftConfig(3, 32, 2, ("self_attn.q_proj",), ((32, 32),)))
        for layer in range(2):
            codes = torch.randint(4, 12, (32, 32), dtype=torch.int32)
            draft.put(layer, "self_attn.q_proj", codes, torch.randn(1, 32, 2, dtype=torch.bfloat16))
        return draft
    else:
        head = EagleHead(EagleConfig(version="mtp", states=(2,), **eagle), IDS)
    for parameter in head.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.2)
    return head.to(torch.bfloat16).float()  # what a file in bfloat16 can hold


def saved(folder: Path, method: str = "eagle3", target: LoadedModel | None = None, **record: object) -> Path:
    """A random head, written for the target."""
    return save_head(folder, new_head(method), target or loaded(), record)


def edit(path: Path, change) -> None:
    """Change a JSON file in place."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def even_tempered_target(seed: int = 0) -> PreTrainedModel:
    """A random model that often repeats its last token, as its embeddings are its output rows."""
    model = tiny_model("llama", seed=seed, tie_word_embeddings=True)
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "embed" not in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@torch.no_grad()
def said_over(
    target: PreTrainedModel, draft: PreTrainedModel, ids: list[int], depth: int = 3, count: int | None = None
) -> list[int]:
    """The last token of a text, and what transformers says after it by `draft` over the columns of the target.

    count: of the tokens that may be said, the first ones; default: all.
    """
    columns = target(input_ids=torch.tensor([ids[:-1]]), use_cache=True)[KV_CACHE]
    row = [ids[-1]]
    for _ in range(depth):
        logits = draft(input_ids=torch.tensor([row[-1:]]), use_cache=True, **{KV_CACHE: columns}).logits
        row.append(int(logits[0, -1, :count].argmax()))
    return row


def fresh_medusa() -> MedusaHead:
    """Says for every position what the target says for the next: right wherever the target repeats itself."""
    return MedusaHead(MedusaConfig(32, (2,), VOCAB, VOCAB, 3))
