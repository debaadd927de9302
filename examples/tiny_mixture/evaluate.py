"""What is measured of the trained model: its loss and experts on held-out text, and acceptance in the engine."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from paceline import LLM, SamplingParams
from paceline.core.interfaces import DraftBudget
from paceline.measure.trials import run_trial
from paceline.methods.self_experts import choose_fewer

from .model import active_parameters, load

DRAFTERS: Mapping[str, DraftBudget] = {
    "lookup": DraftBudget(8, 8), "self-top1": DraftBudget(3, 3), "self-int4": DraftBudget(3, 3),
}  # fmt: skip


def evaluate(folder: Path, suites: Mapping[str, Sequence[str]], held_out: Tensor) -> dict[str, Any]:
    """What the record of a trained model says of it. suites: prompts by name. held_out: [rows, length] tokens."""
    model = load(folder)
    return {
        "parameters": model.num_parameters(), "parameters_active": active_parameters(model),
        "training": on_text(model, held_out), "acceptance": [*measure(folder, suites)],
    }  # fmt: skip


@torch.no_grad()
def on_text(model: Qwen3MoeForCausalLM, ids: Tensor) -> dict[str, Any]:
    """On [rows, length] tokens: the loss, the share of each expert in the choices of each layer, and the agreement.

    That is how often the best token is the same with one expert a token.
    """
    out, config = model(input_ids=ids, use_cache=False, output_router_logits=True), model.config
    chosen = [row.topk(config.num_experts_per_tok).indices.flatten() for row in out.router_logits]
    shares = [layer.bincount(minlength=config.num_experts) / len(layer) for layer in chosen]
    usage = [" ".join(f"{share:.2f}" for share in layer.tolist()) for layer in shares]
    choose_fewer(fewer := deepcopy(model), 1)
    agreed = (fewer(input_ids=ids, use_cache=False).logits.argmax(-1) == out.logits.argmax(-1)).float().mean().item()
    loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()
    found = {"held-out loss": round(loss, 3), "held-out agreement of one expert": round(agreed, 4)}
    return {**found, "use of the experts by layer": usage}


def measure(folder: Path, suites: Mapping[str, Sequence[str]], max_tokens: int = 96) -> Iterator[dict[str, Any]]:
    """The rows of a card: greedy answers to all prompts with each drafter."""
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    for drafter, budget in DRAFTERS.items():
        llm = LLM(folder, drafter=drafter, max_num_seqs=1)
        for name, texts in suites.items():
            trial = run_trial(llm, params, budget, {}, name=f"{drafter}, {name}", source="file", texts=texts)
            yield trial.as_dict()
