"""How far 16 bits move a model's distribution: Paceline's pass and transformers', each against transformers in float32.

    python bench/rounding.py smollm2-135m

Both read the same texts, the built-in prompts with the answers of plain decoding, and both compute in the dtype that
Paceline loads the model in. Printed is the mean over the answers' tokens of KL(float32 || other), in nats, and how
often the most likely token is the same. The last line is JSON.
"""

import argparse
import json

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline import LLM, SamplingParams
from paceline.eval.prompts import EXAMPLES, user_prompt
from paceline.runner.prefill import reference_logits
from paceline.system.provenance import provenance
from paceline.zoo import resolve


def divergence(exact: Tensor, other: Tensor) -> Tensor:
    """KL(exact || other) in nats of each row of logits [T, V]."""
    p, q = (torch.log_softmax(one.double(), -1) for one in (exact, other))
    return (p.exp() * (p - q)).sum(-1)


def compare(name: str, num_prompts: int, max_tokens: int) -> dict[str, object]:
    """Mean divergence and agreement of both, over the tokens of all answers."""
    folder = resolve(name)
    llm = LLM(folder, max_num_seqs=1)
    prompts = [user_prompt(llm.loaded, one.prompt) for one in EXAMPLES[:num_prompts]]
    results = llm.generate(prompts, SamplingParams(max_tokens=max_tokens))
    exact, same = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval() for dtype in (torch.float32, llm.loaded.dtype)
    )
    sums = {side: [0.0, 0.0] for side in ("paceline", "transformers")}
    tokens = 0
    for result in results:
        text, rows = [*result.prompt_token_ids, *result.token_ids][:-1], len(result.token_ids)
        tokens += rows
        with torch.inference_mode():
            right = exact(torch.tensor([text])).logits[0, -rows:]
            theirs = same(torch.tensor([text])).logits[0, -rows:]
            ours = reference_logits(llm.loaded, text, rows)
        for side, logits in (("paceline", ours), ("transformers", theirs)):
            sums[side][0] += float(divergence(right, logits).sum())
            sums[side][1] += float((right.argmax(-1) == logits.argmax(-1)).sum())
    found = {side: {"mean_kl": kl / tokens, "same_top": top / tokens} for side, (kl, top) in sums.items()}
    return {"model": name, "dtype": str(llm.loaded.dtype), "prompts": len(results), "tokens": tokens, **found}


def main() -> None:
    """Print a line for each, and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--num-prompts", type=int, default=len(EXAMPLES))
    parser.add_argument("--max-tokens", type=int, default=128)
    options = parser.parse_args()
    found = compare(options.model, options.num_prompts, options.max_tokens)
    for side in ("paceline", "transformers"):
        one = found[side]
        assert isinstance(one, dict)
        print(f"{side:<13} mean KL {one['mean_kl']:.2e} nats, same most likely token {one['same_top']:.2%}")
    print(json.dumps({**found, "provenance": provenance()}))


if __name__ == "__main__":
    main()
