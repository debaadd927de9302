"""Acceptance by simulation: what the MTP module would draft from every position of greedy answers, in plain torch."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, Qwen3_5ForCausalLM

from .model import Chains, Mtp


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


def measure(
    model: Qwen3_5ForCausalLM, mtp: Mtp, tokenizer: PreTrainedTokenizerBase, name: str, prompts: Sequence[str],
    depth: int = 3, max_tokens: int = 96,
) -> dict[str, Any]:  # fmt: skip
    """The row of a card: greedy answers to all prompts, in rounds that verify a chain of `depth` drafts each."""
    answers: list[dict[str, Any]] = []
    for prompt in prompts:
        start = tokenizer(prompt)["input_ids"]
        ids = answer(model, start, max_tokens)
        right, last = right_drafts(model, mtp, ids, depth), len(start)  # the prompt's own pass gave this token
        rounds, accepted = 0, torch.zeros(depth, dtype=torch.long)
        while last + 1 < len(ids):
            kept = right[:, last - 1].long()
            rounds, accepted, last = rounds + 1, accepted + kept, last + 1 + int(kept.sum())
        tokens = len(ids) - 1 - len(start)
        answers.append({"tokens": tokens, "rounds": rounds, "accepted": accepted.tolist()})
    tokens, rounds = (sum(one[key] for one in answers) for key in ("tokens", "rounds"))
    by_position = [round(sum(column) / rounds, 4) for column in zip(*(one["accepted"] for one in answers), strict=True)]
    result = {"mean_acceptance_length": round(tokens / rounds, 4), "per_position": by_position, "answers": answers}
    params, budget = {"temperature": 0.0, "max_tokens": max_tokens}, {"depth": depth, "nodes": depth}
    return {"name": name, "params": params, "budget": budget, "result": result}
