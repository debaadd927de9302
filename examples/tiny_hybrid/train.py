"""Training: the model on the next token, and the MTP module on what the model itself predicts further on."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM

from paceline.train.muon import Muon

from .corpus import tokens, train_tokenizer
from .model import Chains, Mtp, make_config, save

DEPTH, MTP_WEIGHT, LR, BATCH, LENGTH = 3, 0.3, 4e-3, 4, 512
_CHECKPOINT, _LOG = "checkpoint.pt", "log.jsonl"
_SAVE_SECONDS = 180


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
    """Train for `steps`, over whose last third the rate falls to nothing; goes on from the last checkpoint, if any.

    Matrices are trained by Muon, embeddings and vectors by AdamW. Writes `model`, a folder as transformers reads it.
    """
    torch.manual_seed(seed)
    data, tokenizer = _data(run)
    model = Qwen3_5ForCausalLM(make_config(len(tokenizer)))
    mtp = Mtp(model.config)
    named = [*model.named_parameters(), *mtp.named_parameters()]
    matrices = [weight for name, weight in named if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in named if weight.ndim != 2 or "embed" in name]
    optimizers = [Muon(matrices, weight_decay=0.1), torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)]
    parts, step = [model, mtp, *optimizers], 0
    if (run / _CHECKPOINT).exists():
        step, *states = torch.load(run / _CHECKPOINT, weights_only=True)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
    windows = np.random.default_rng(seed).permutation(len(data) // LENGTH - 1)
    saved = time.monotonic()
    while step < steps:
        began = time.monotonic()
        starts = [LENGTH * int(windows[i % len(windows)]) for i in range(step * BATCH, (step + 1) * BATCH)]
        ids = torch.from_numpy(np.stack([data[start : start + LENGTH + 1] for start in starts]).astype(np.int64))
        first, *later = losses(model, mtp, ids, stride=2)
        (first + MTP_WEIGHT * torch.stack(later).mean()).backward()
        torch.nn.utils.clip_grad_norm_([weight for _, weight in named], 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = LR * min(1.0, (step + 1) / 100, 0.02 + 3 * (steps - step) / steps)
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        row = {"step": step, "losses": [round(loss.item(), 4) for loss in (first, *later)]}
        with (run / _LOG).open("a") as file:
            file.write(json.dumps({**row, "seconds": round(time.monotonic() - began, 1)}) + "\n")
        if step == steps or time.monotonic() - saved > _SAVE_SECONDS:
            saved = time.monotonic()
            torch.save([step, *(part.state_dict() for part in parts)], run / f"{_CHECKPOINT}.new")
            (run / f"{_CHECKPOINT}.new").replace(run / _CHECKPOINT)
    save(model, mtp, run / "model")
    tokenizer.save_pretrained(run / "model")


def summary(run: Path) -> dict[str, Any]:
    """What a card says of a finished run: steps, tokens and losses at the end."""
    rows = {row["step"]: row for row in map(json.loads, (run / _LOG).read_text().splitlines())}
    last = np.mean([rows[step]["losses"] for step in sorted(rows)[-50:]], axis=0).round(3).tolist()
    return {
        "steps": max(rows), "tokens": max(rows) * BATCH * LENGTH, "optimizer": "muon, adamw for vectors and embeddings",
        "learning rate": LR, "weight of the MTP loss": MTP_WEIGHT, "loss of the next token": last[0],
        "losses of the MTP steps": last[1:],
    }  # fmt: skip


def _data(run: Path) -> tuple[np.ndarray, PreTrainedTokenizerFast]:
    """Tokens to train on, and their tokenizer; made once."""
    rows = run / "tokens.npy"
    if not rows.exists():
        tokenizer = train_tokenizer()
        tokenizer.save_pretrained(run / "tokenizer")
        np.save(rows, tokens(tokenizer))
    return np.load(rows, mmap_mode="r"), PreTrainedTokenizerFast.from_pretrained(run / "tokenizer")
