"""Training: the loss of the next token, and one that is least where all experts of a layer are used alike."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from examples.tiny_hybrid import loop

from .model import make_config, save

BALANCE_WEIGHT = 0.05


def losses(model: Qwen3MoeForCausalLM, ids: Tensor) -> list[Tensor]:
    """The cross-entropy of the next token, and the balance of the experts, the mean of all layers.

    transformers' own loss balances all layers together.
    """
    out = model(input_ids=ids[:, :-1], use_cache=False, output_router_logits=True)
    balances = [balance(scores, model.config.num_experts_per_tok) for scores in out.router_logits]
    return [F.cross_entropy(out.logits.flatten(0, 1), ids[:, 1:].flatten()), torch.stack(balances).mean()]


def balance(scores: Tensor, top_k: int) -> Tensor:
    """The load balancing loss of a router's scores [R, experts] (Switch Transformers, arXiv 2101.03961).

    Where all experts are used alike, it is `top_k`.
    """
    used = scores.topk(top_k).indices.flatten().bincount(minlength=scores.shape[-1]) / len(scores)
    return scores.shape[-1] * (used * scores.softmax(-1).mean(0)).sum()


def train(run: Path, steps: int, seed: int = 0) -> None:
    """Train the model, and write `model`, a folder as transformers reads it."""
    torch.manual_seed(seed)
    tokenizer = loop.prepare(run)
    model = Qwen3MoeForCausalLM(make_config(len(tokenizer)))
    loop.fit(run, steps, [model], partial(losses, model), [1.0, BALANCE_WEIGHT], seed)
    save(model, run / "model")
    tokenizer.save_pretrained(run / "model")


def summary(run: Path) -> dict[str, Any]:
    """What a card says of a finished run: steps, tokens and losses at the end."""
    found, (first, balance) = loop.summary(run)
    balances = {"weight of the balance": BALANCE_WEIGHT, "balance": balance}
    return {**found, "loss of the next token": first, **balances}
