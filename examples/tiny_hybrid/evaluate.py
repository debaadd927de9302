"""Acceptance by simulation: what the MTP module would draft from every position of greedy answers, in plain torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3_5ForCausalLM

from .model import Chains, Mtp, load


def evaluate(folder: Path, suites: Mapping[str, Sequence[str]], held_out: Tensor) -> dict[str, Any]:
    """What the record of a trained model says of it. suites: prompts by name. held_out: [rows, length] tokens."""
    (model, mtp), tokenizer = load(folder), AutoTokenizer.from_pretrained(folder)
    own = sum(weight.numel() for weight in mtp.parameters())
    return {
        "parameters_mtp": own, "parameters": model.num_parameters() + own, "training": on_text(model, mtp, held_out),
        "acceptance": [row for name, texts in suites.items() for row in measure(model, mtp, tokenizer, name, texts)],
    }  # fmt: skip


@torch.no_grad()
def answer(model: Qwen3_5ForCausalLM, prompt: list[int], max_tokens: int) -> list[int]:
    """The prompt and its greedy continuation, by transformers token by token."""
    ids, decoder = torch.tensor([prompt]), cast(Any, model)
    done = decoder.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens)
    return done[0].tolist()


@torch.no_grad()
def right_drafts(model: Qwen3_5ForCausalLM, mtp: Mtp, ids: list[int], depth: int) -> Tensor:
    """[depth, length - 1]: whether the chain after token t + 1 is right up to this draft."""
    row = torch.tensor([ids])
    chains = Chains(model, mtp, model.model(input_ids=row, use_cache=False).last_hidden_state[:, :-1])
    drafted, right, found = row[0, 1:], torch.ones(len(ids) - 1, dtype=torch.bool), list[Tensor]()
    for step in range(depth):
        drafted = model.lm_head(chains.step(model.model.embed_tokens(drafted[None])))[0].argmax(-1)
        truth = torch.cat([row[0, 2 + step :], torch.full((step + 1,), -1)])[: len(drafted)]
        right = right & (drafted == truth)
        found.append(right)
    return torch.stack(found)


@torch.no_grad()
def on_text(model: Qwen3_5ForCausalLM, mtp: Mtp, ids: Tensor, depth: int = 3) -> dict[str, Any]:
    """On [rows, length] tokens that were not generated: loss, and how often each step's best token is the model's."""
    states = model.model(input_ids=ids, use_cache=False).last_hidden_state
    logits, embeds, length = model.lm_head(states), model.model.embed_tokens(ids), ids.shape[1] - depth
    chains, best, agreed = Chains(model, mtp, states[:, :length]), logits.argmax(-1), list[float]()
    for step in range(1, depth + 1):
        guess = model.lm_head(chains.step(embeds[:, step : step + length])).argmax(-1)
        agreed.append(round((guess == best[:, step : step + length]).float().mean().item(), 4))
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()
    return {"held-out loss": round(loss, 3), "held-out agreement": agreed}


def measure(
    model: Qwen3_5ForCausalLM, mtp: Mtp, tokenizer: PreTrainedTokenizerBase, name: str, prompts: Sequence[str],
    depths: Sequence[int] = (1, 2, 3), max_tokens: int = 96,
) -> list[dict[str, Any]]:  # fmt: skip
    """The rows of a card, one for each length of chains: greedy answers to all prompts, in rounds."""
    done: list[tuple[int, Tensor]] = []
    for prompt in prompts:
        start = tokenizer(prompt)["input_ids"]
        ids = answer(model, start, max_tokens)
        done.append((len(start), right_drafts(model, mtp, ids, max(depths))))
    params = {"temperature": 0.0, "max_tokens": max_tokens}
    rows: list[dict[str, Any]] = []
    for depth in depths:
        answers = [rounds_of(right[:depth], start) for start, right in done]
        tokens, rounds = (sum(one[key] for one in answers) for key in ("tokens", "rounds"))
        accepted = zip(*(one["accepted"] for one in answers), strict=True)
        result = {
            "mean_acceptance_length": round(tokens / rounds, 4), "answers": answers,
            "per_position": [round(sum(position) / rounds, 4) for position in accepted],
        }  # fmt: skip
        rows.append({"name": name, "params": params, "budget": {"depth": depth, "nodes": depth}, "result": result})
    return rows


def rounds_of(right: Tensor, last: int) -> dict[str, Any]:
    """One answer in rounds, and its drafts accepted by position. last: the token that the prompt's own pass gave."""
    begin, rounds, accepted = last, 0, torch.zeros(len(right), dtype=torch.long)
    while last < right.shape[1]:
        kept = right[:, last - 1].long()
        rounds, accepted, last = rounds + 1, accepted + kept, last + 1 + int(kept.sum())
    return {"tokens": right.shape[1] - begin, "rounds": rounds, "accepted": accepted.tolist()}
