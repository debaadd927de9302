"""What Paceline adds to a round: milliseconds outside the model's forward pass, which a fixed tensor stands in for.

    python bench/overhead.py

"cold": the pass reads 64 MB, as weights would be read, so that Python finds nothing of its own in the caches. Best of
the medians of some runs, since other programs may slow one down; the last line is JSON. No model is fetched. Logits
are float32 of 49,152 tokens, as SmolLM2 has; a lookup round drafts five tokens, all of which stand.
"""

import argparse
import json
import statistics
import time

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline import LLM, CostModel, Coupled, Fixed, PromptLookup, SamplingParams
from paceline.core.draft import Draft
from paceline.core.request import Sequence
from paceline.core.tree import TokenTree
from paceline.sampling import target_law

VOCAB, TOKEN, ROWS = 49_152, 7, 16
SIZE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
WEIGHTS = np.ones(1 << 23)  # 64 MB


class Passes:
    """Stand in for the passes of a model; `gaps`: the ms between one and the next."""

    def __init__(self) -> None:
        self.logits, self.end, self.cold, self.gaps = torch.randn(1, 64, VOCAB), 0.0, False, list[float]()
        self.logits[..., TOKEN] = 100.0

    def __call__(self, token_ids: torch.Tensor, *_: object) -> torch.Tensor:
        """Logits of each row."""
        self.gaps.append(1e3 * (time.perf_counter() - self.end))
        if self.cold:
            WEIGHTS.sum()
        logits = self.logits[:, : token_ids.shape[1]].clone()
        self.end = time.perf_counter()
        return logits


def rounds(repeats: int, tokens: int, **options: object) -> tuple[float, float]:
    """Median ms of a round, with warm caches and with cold ones."""
    llm, passes = LLM(LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **SIZE)), max_batch_size=1, **options), Passes()  # type: ignore[arg-type]
    object.__setattr__(llm.runner.loaded, "forward", passes)
    medians = dict[bool, list[float]]({False: [], True: []})
    for run in range(2 * repeats + 2):  # the first of both kinds warm up
        passes.gaps, passes.cold = [], run % 2 == 1
        llm.generate([5, 6, TOKEN, TOKEN], SamplingParams(max_tokens=tokens, ignore_eos=True))
        medians[passes.cold].append(statistics.median(passes.gaps[1:]))  # the first is of the time before the answer
    return min(medians[False][1:]), min(medians[True][1:])


@torch.inference_mode()
def verification(repeats: int, calls: int = 100) -> float:
    """Median ms of the law and the verdict of a greedy chain of `ROWS` rows, the drafted half of which stands."""
    seq = Sequence([5, TOKEN], SamplingParams(), 0, frozenset(), 1 << 20)
    tokens = [TOKEN] * (ROWS // 2) + [5] * (ROWS // 2)
    logits = torch.randn(1, ROWS, VOCAB)
    logits[..., TOKEN] = 100.0
    medians, verifier = list[float](), Coupled()
    for _ in range(repeats):
        times = list[float]()
        for _ in range(calls):
            draft = Draft(TokenTree.chain([tokens]))
            begin = time.perf_counter()
            verdict = verifier.verify(draft, target_law(logits, [seq], draft.tree), [0], [2])
            times.append(1e3 * (time.perf_counter() - begin))
            assert int(verdict.num_accepted) == ROWS // 2 - 1
        medians.append(statistics.median(times))
    return min(medians)


def main() -> None:
    """Print all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=150)
    args = parser.parse_args()
    told = {f"greedy verification of {ROWS} rows": verification(args.repeats)}
    for name, options in {
        "plain round": dict[str, object](),
        "lookup round": {"drafter": PromptLookup(), "policy": Fixed(5)},
        "lookup round, cost model": {"drafter": PromptLookup(), "policy": CostModel(5)},
    }.items():
        told[name], told[f"{name}, cold"] = rounds(args.repeats, args.tokens, **options)
    for name, value in told.items():
        print(f"{name:36} {value:.3f} ms")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
