"""Training: the model on the next token, and the MTP module on what the model itself predicts further on."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3_5ForCausalLM

from . import loop
from .model import Chains, Mtp, make_config, save

DEPTH, MTP_WEIGHT = 3, 0.3


def losses(model: Qwen3_5ForCausalLM, mtp: Mtp, ids: Tensor, stride: int = 1) -> list[Tensor]:
    """The cross-entropy of the next token, then that of each drafting step.

    The steps are trained towards the model's distribution, on every `stride`-th position of half the rows.
    """
    inputs = ids[:, :-1]
    states = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    logits = model.lm_head(states)
    found = [F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())]
    rows, length = slice(0, max(1, len(ids) // 2)), inputs.shape[1] - DEPTH
    embeds, aims = model.model.embed_tokens(inputs[rows]), logits[rows].detach()
    chains = Chains(model, mtp, states[rows, :length])
    for step in range(1, DEPTH + 1):
        later, picked = slice(step, step + length), slice(step % stride, None, stride)
        guess = model.lm_head(chains.step(embeds[:, later])[:, picked])
        found.append(F.cross_entropy(guess.flatten(0, 1), aims[:, later][:, picked].flatten(0, 1).softmax(-1)))
    return found


def train(run: Path, steps: int, seed: int = 0) -> None:
    """Train both parts, and write `model`, a folder as transformers reads it."""
    torch.manual_seed(seed)
    tokenizer = loop.prepare(run)
    model = Qwen3_5ForCausalLM(make_config(len(tokenizer)))
    mtp = Mtp(model.config)
    weights = [1.0, *[MTP_WEIGHT / DEPTH] * DEPTH]
    loop.fit(run, steps, [model, mtp], partial(losses, model, mtp, stride=2), weights, seed)
    save(model, mtp, run / "model")
    tokenizer.save_pretrained(run / "model")


def summary(run: Path) -> dict[str, Any]:
    """What a card says of a finished run: steps, tokens and losses at the end."""
    found, (first, *later) = loop.summary(run)
    losses = {"loss of the next token": first, "losses of the MTP steps": later}
    return {**found, "weight of the MTP loss": MTP_WEIGHT, **losses}
