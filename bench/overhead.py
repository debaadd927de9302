"""What Paceline adds to a round: milliseconds outside the model's forward pass, which a fixed tensor stands in for.

    python bench/overhead.py

"cold": the pass reads 64 MB, as weights would be read, so that nothing is left in the caches. Best of the medians of
three runs; the last line is JSON. Logits are float32 of 49,152 tokens; a lookup round drafts five, all of which stand.
"""

import json
import statistics
import time

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline import LLM, CostModel, Coupled, Fixed, PromptLookup, SamplingParams
from paceline.attention.masks import PassLayout
from paceline.core.draft import Draft
from paceline.core.request import TokenSequence
from paceline.core.tree import TokenTree
from paceline.sampling.distribution import target_distribution

VOCAB, TOKEN, ROWS, REPEATS = 49_152, 7, 16, 3
SIZE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
WEIGHTS = np.ones(1 << 23)  # 64 MB


class Passes:
    """Stand in for the passes of a model; `gaps`: the ms between one and the next."""

    def __init__(self) -> None:
        self.logits, self.end, self.cold, self.gaps = torch.randn(1, 64, VOCAB), 0.0, False, list[float]()
        self.logits[..., TOKEN] = 100.0

    def __call__(self, token_ids: torch.Tensor | None, layout: PassLayout, *_: object) -> torch.Tensor:
        """Logits of each row."""
        self.gaps.append(1e3 * (time.perf_counter() - self.end))
        if self.cold:
            WEIGHTS.sum()
        logits = self.logits[:, : layout.head_rows or layout.num_nodes].clone()
        self.end = time.perf_counter()
        return logits


def rounds(sampling: dict[str, float], **options: object) -> tuple[float, float]:
    """Median ms of a round, with warm caches and with cold ones. sampling: fields of `SamplingParams`."""
    llm, passes = LLM(LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **SIZE)), max_num_seqs=1, **options), Passes()  # type: ignore[arg-type]
    object.__setattr__(llm.runner.loaded, "forward", passes)
    medians: tuple[list[float], list[float]] = [], []
    for run in range(2 * REPEATS + 2):  # the first of both kinds warm up
        passes.gaps, passes.cold = [], run % 2 == 1
        llm.generate([5, 6, TOKEN, TOKEN], SamplingParams(max_tokens=150, ignore_eos=True, seed=1, **sampling))  # type: ignore[arg-type]
        medians[passes.cold].append(statistics.median(passes.gaps[1:]))  # the first is of the time before the answer
    return min(medians[0][1:]), min(medians[1][1:])


@torch.inference_mode()
def verification() -> float:
    """Median ms of verifying a greedy chain of `ROWS` rows whose drafted first half is accepted."""
    seq, half = TokenSequence([5, TOKEN], SamplingParams(), 0, frozenset(), 1 << 20), [TOKEN] * (ROWS // 2)
    logits, times = torch.randn(1, ROWS, VOCAB), list[float]()
    logits[..., TOKEN] = 100.0
    for _ in range(100 * REPEATS):
        draft, begin = Draft(TokenTree.chain([half + [5] * (ROWS // 2)])), time.perf_counter()
        walks = Coupled().verify(draft, target_distribution(logits, [seq], draft.tree), [0], [2])
        times.append(1e3 * (time.perf_counter() - begin))
        assert len(walks[0].path) == ROWS // 2 - 1
    return min(statistics.median(times[i::REPEATS]) for i in range(REPEATS))


torch.set_num_threads(1)  # others would be waited for
told = {f"greedy verification of {ROWS} rows": verification()}
for name, (sampling, options) in {
    "plain round": (dict[str, float](), dict[str, object]()),
    "sampled": ({"temperature": 1.0}, {}),
    "sampled, top_p": ({"temperature": 0.7, "top_p": 0.9}, {}),
    "lookup round": ({}, {"drafter": PromptLookup(), "policy": Fixed(5)}),
    "lookup round, cost model": ({}, {"drafter": PromptLookup(), "policy": CostModel(5)}),
}.items():
    told[name], told[f"{name}, cold"] = rounds(sampling, **options)
for name, value in told.items():
    print(f"{name:36} {value:.3f} ms")
print(json.dumps(told))
