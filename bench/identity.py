"""Is speculative text the text of plain decoding? Counts verdicts over prompts, drafters, temperatures and numerics.

    python bench/identity.py smollm2-135m --prompts HumanEval.jsonl.gz --prompts question.jsonl --drafter lookup \\
        --drafter self-int4 --num-prompts 40 --max-tokens 64

With invariant numerics the prompts run in batches, since neighbours cannot change a bit, and every difference counts
as a bug. With fast numerics they run one by one, as `paceline check` does, which tells rounding ties from bugs.
The last line is JSON.
"""

import argparse
import json
import time
from pathlib import Path

from paceline import LLM, SamplingParams
from paceline.config import parse
from paceline.measure.check import check
from paceline.measure.prompts import read_prompts
from paceline.measure.record import measured_on
from paceline.system.provenance import hash_prompts
from paceline.target import load_model
from paceline.zoo import resolve


def compare_batched(llm: LLM, prompts: list[list[int]], temperature: float, max_tokens: int) -> dict[str, float]:
    """Verdict counts and acceptance of one setting, every request with a seed of its own."""
    params = [SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=i) for i in range(len(prompts))]
    plain = llm.plain().generate(prompts, params)
    spec = llm.generate(prompts, params)
    same = sum(a.token_ids == b.token_ids for a, b in zip(plain, spec, strict=True))
    tokens, rounds = sum(len(r.token_ids) for r in spec), sum(len(r.rounds) for r in spec)
    return {
        "identical": same,
        "near_tie": 0,
        "bug": len(prompts) - same,
        "tokens": tokens,
        "mean_acceptance_length": round(tokens / rounds, 3),
    }


def compare_singly(llm: LLM, prompts: list[list[int]], temperature: float, max_tokens: int) -> dict[str, float]:
    """The same through `paceline check`, with every difference explained."""
    report = check(llm, prompts, max_tokens=max_tokens, temperatures=[temperature], with_distribution_test=False)
    tokens = sum(c.num_tokens for c in report.comparisons)
    return {**report.verdicts, "tokens": tokens, "mean_acceptance_length": round(report.mean_acceptance_length, 3)}


def main() -> None:
    """Run the settings one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", action="append", required=True, type=Path)
    parser.add_argument("--num-prompts", type=int, default=40, help="from each file")
    parser.add_argument("--drafter", action="append", required=True)
    parser.add_argument("--temperature", action="append", type=float)
    parser.add_argument("--numerics", action="append", choices=["invariant", "fast"])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8)
    options = parser.parse_args()
    loaded = load_model(resolve(options.model))
    texts = [prompt for path in options.prompts for prompt in read_prompts(path, options.num_prompts)]
    rows: list[dict[str, object]] = []
    for numerics in options.numerics or ["invariant", "fast"]:
        for name in options.drafter:
            drafter, policy, verifier = parse(name, policy="fixed").build()
            batch = options.batch_size if numerics == "invariant" else 1
            llm = LLM(
                loaded, drafter=drafter, policy=policy, verifier=verifier, numerics=numerics, max_num_seqs=batch,
                max_model_len=4096,
            )  # fmt: skip
            prompts = [llm.encode(text) for text in texts]
            compare = compare_batched if numerics == "invariant" else compare_singly
            for temperature in options.temperature or [0.0, 0.7, 1.0]:
                begin = time.perf_counter()
                row: dict[str, object] = {"drafter": name, "numerics": numerics, "temperature": temperature}
                row |= compare(llm, prompts, temperature, options.max_tokens)
                row["seconds"] = round(time.perf_counter() - begin, 1)
                rows.append(row)
                print(row, flush=True)
    result = {
        "model": options.model,
        "prompts": len(texts),
        "prompts_hash": hash_prompts([json.dumps(text) for text in texts]),
        "max_tokens": options.max_tokens,
        "rows": rows,
        "provenance": measured_on(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
