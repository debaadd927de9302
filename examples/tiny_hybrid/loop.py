"""The training loop of small models: the corpus in rows, the optimizers, the log and the checkpoints."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from paceline.train.muon import Muon

from .corpus import tokens, train_tokenizer

LR, BATCH, LENGTH = 4e-3, 4, 512
_CHECKPOINT, _LOG = "checkpoint.pt", "log.jsonl"
_SAVE_SECONDS = 180


def fit(
    run: Path, steps: int, modules: Sequence[nn.Module], losses: Callable[[Tensor], list[Tensor]],
    weights: Sequence[float], seed: int,
) -> None:  # fmt: skip
    """Train for `steps`, over whose last third the rate falls to nothing; goes on from the last checkpoint, if any.

    Matrices are trained by Muon, embeddings and vectors by AdamW.

    losses: those of [BATCH, LENGTH + 1] tokens; `weights` has the part of each in what is lowered.
    """
    named = [pair for module in modules for pair in module.named_parameters()]
    is_matrix = {name: weight.ndim > 1 and min(weight.shape[-2:]) > 1 and "embed" not in name for name, weight in named}
    matrices, others = ([weight for name, weight in named if is_matrix[name] == kind] for kind in (True, False))
    optimizers = [Muon(matrices, weight_decay=0.1), torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)]
    parts, step = [*modules, *optimizers], 0
    if (run / _CHECKPOINT).exists():
        step, *states = torch.load(run / _CHECKPOINT, weights_only=True)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
    data, saved = np.load(run / "tokens.npy", mmap_mode="r"), time.monotonic()
    windows = np.random.default_rng(seed).permutation(len(data) // LENGTH - 1)
    while step < steps:
        began = time.monotonic()
        starts = [LENGTH * int(windows[i % len(windows)]) for i in range(step * BATCH, (step + 1) * BATCH)]
        ids = torch.from_numpy(np.stack([data[start : start + LENGTH + 1] for start in starts]).astype(np.int64))
        found = losses(ids)
        (torch.stack(found) * torch.tensor(weights)).sum().backward()
        torch.nn.utils.clip_grad_norm_([weight for _, weight in named], 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = LR * min(1.0, (step + 1) / 100, 0.02 + 3 * (steps - step) / steps)
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        row = {"step": step, "losses": [round(loss.item(), 4) for loss in found]}
        with (run / _LOG).open("a") as file:
            file.write(json.dumps({**row, "seconds": round(time.monotonic() - began, 1)}) + "\n")
        if step == steps or time.monotonic() - saved > _SAVE_SECONDS:
            saved = time.monotonic()
            torch.save([step, *(part.state_dict() for part in parts)], run / f"{_CHECKPOINT}.new")
            (run / f"{_CHECKPOINT}.new").replace(run / _CHECKPOINT)


def summary(run: Path) -> tuple[dict[str, Any], list[float]]:
    """What a card says of a finished run, and its losses at the end."""
    rows = {row["step"]: row for row in map(json.loads, (run / _LOG).read_text().splitlines())}
    last = np.mean([rows[step]["losses"] for step in sorted(rows)[-50:]], axis=0).round(3).tolist()
    steps = max(rows)
    optimizer = "muon, adamw for vectors and embeddings"
    return {"steps": steps, "tokens": steps * BATCH * LENGTH, "optimizer": optimizer, "learning rate": LR}, last


def prepare(run: Path) -> PreTrainedTokenizerFast:
    """The tokenizer; it and the tokens to train on are made once."""
    if not (run / "tokens.npy").exists():
        tokenizer = train_tokenizer()
        tokenizer.save_pretrained(run / "tokenizer")
        np.save(run / "tokens.npy", tokens(tokenizer))
    return PreTrainedTokenizerFast.from_pretrained(run / "tokenizer")
