"""What invariant numerics cost: milliseconds per pass, invariant and fast in turns on the same loaded weights.

    python bench/numerics.py smollm2-135m

Prints the median of the repeats for plain decoding and for lookup; the last line is JSON.
"""

import argparse
import json
import statistics

from paceline import LLM, PromptLookup, SamplingParams
from paceline.eval.examples import EXAMPLES
from paceline.runner import load_model
from paceline.zoo import resolve


def ms_per_pass(llm: LLM, max_tokens: int) -> float:
    """Decode three prompts; seconds of decoding over target passes."""
    params, seconds, passes = SamplingParams(max_tokens=max_tokens), 0.0, 0
    for example in EXAMPLES[:3]:
        result = llm.generate(example.chat, params)[0]
        seconds, passes = seconds + result.timings.decode, passes + len(result.rounds)
    return seconds / passes * 1e3


def main() -> None:
    """Take turns, so that a machine that slows down slows both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    loaded = load_model(resolve(options.model))
    engines = {n: LLM(loaded, drafter=PromptLookup(), numerics=n) for n in ("invariant", "fast")}
    times: dict[str, list[float]] = {}
    for _ in range(options.repeat):
        for numerics, llm in engines.items():
            for kind, side in (("plain", llm.plain()), ("lookup", llm)):
                times.setdefault(f"{kind} {numerics}", []).append(ms_per_pass(side, options.max_tokens))
    medians = {name: round(statistics.median(values), 1) for name, values in times.items()}
    print("\n".join(f"{name:18} {value:6.1f} ms a pass" for name, value in medians.items()))
    print(json.dumps({"model": options.model, "ms_per_pass": medians}))


if __name__ == "__main__":
    main()
