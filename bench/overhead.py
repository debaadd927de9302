"""What Paceline adds to a round: milliseconds outside the model's forward pass, which a fixed tensor stands in for.

    python bench/overhead.py

Best of the medians of some runs, since other programs may slow one down; the last line is JSON. No model is fetched.
The logits are float32 of 49,152 tokens, as SmolLM2 has; a lookup round drafts five tokens, all of which stand.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline import LLM, CostModel, Coupled, Fixed, PromptLookup, SamplingParams
from paceline.core.draft import Draft
from paceline.core.request import Sequence
from paceline.core.tree import TokenTree
from paceline.sampling import target_law

VOCAB, TOKEN, ROWS = 49_152, 7, 16


def engine(**options: object) -> tuple[LLM, Callable[[], list[float]]]:
    """An engine whose passes cost nothing, and what gives the ms between passes since it was last asked."""
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    llm = LLM(LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **size)), max_batch_size=1, **options)  # type: ignore[arg-type]
    fixed, ends, gaps = torch.randn(1, 64, VOCAB), [0.0], list[float]()
    fixed[..., TOKEN] = 100.0

    def forward(token_ids: torch.Tensor, *_: object) -> torch.Tensor:
        gaps.append(1e3 * (time.perf_counter() - ends[0]))
        logits = fixed[:, : token_ids.shape[1]]
        ends[0] = time.perf_counter()
        return logits

    def taken() -> list[float]:
        told = gaps[1:]  # the first is of the time between two answers
        gaps.clear()
        return told

    object.__setattr__(llm.runner.loaded, "forward", forward)
    return llm, taken


def rounds(repeats: int, tokens: int, **options: object) -> float:
    """Median ms of a round."""
    llm, taken = engine(**options)
    params, medians = SamplingParams(max_tokens=tokens, ignore_eos=True), list[float]()
    for _ in range(repeats + 1):  # the first warms up
        llm.generate([5, 6, TOKEN, TOKEN], params)
        medians.append(statistics.median(taken()))
    return min(medians[1:])


@torch.inference_mode()
def verification(repeats: int, calls: int = 100) -> float:
    """Median ms of the law and the verdict of a greedy chain of `ROWS` rows, the drafted half of which stands."""
    seq = Sequence([5, TOKEN], SamplingParams(), 0, frozenset(), 1 << 20)
    tokens = [TOKEN] * (ROWS // 2) + [5] * (ROWS // 2)
    logits, seeds, positions = torch.randn(1, ROWS, VOCAB), torch.tensor([0]), torch.tensor([2])
    logits[..., TOKEN] = 100.0
    medians, verifier = list[float](), Coupled()
    for _ in range(repeats):
        times = list[float]()
        for _ in range(calls):
            draft = Draft(TokenTree.chain([tokens]))
            begin = time.perf_counter()
            verdict = verifier.verify(draft, target_law(logits, [seq], draft.tree), seeds, positions)
            times.append(1e3 * (time.perf_counter() - begin))
            assert int(verdict.num_accepted) == ROWS // 2 - 1
        medians.append(statistics.median(times))
    return min(medians)


def main() -> None:
    """Print all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=300)
    args = parser.parse_args()
    told = {
        "plain round": rounds(args.repeats, args.tokens),
        "lookup round": rounds(args.repeats, args.tokens, drafter=PromptLookup(), policy=Fixed(5)),
        "lookup round, cost model": rounds(args.repeats, args.tokens, drafter=PromptLookup(), policy=CostModel(5)),
        f"greedy verification of {ROWS} rows": verification(args.repeats),
    }
    for name, value in told.items():
        print(f"{name:40} {value:.3f} ms")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
