"""How good is a self-draft of fewer bits? Acceptance of 4, 3 and 2 bits in groups of several sizes, 4 tokens a round.

    python bench/self_draft.py MODEL [--tokens 48] [--prompts 4]

Only acceptance is measured: 3 and 2 bits run in the kernel and the memory of 4. Checkpoints that were made from 4-bit
files flatter INT4 in the groups of those files (32): look at the other rows. Prints a table and one JSON line.
"""

import argparse
import json

from paceline import LLM, Fixed, SamplingParams, SelfQuantized
from paceline.eval.examples import EXAMPLES
from paceline.runner import load_model
from paceline.zoo import resolve

SETTINGS = [(4, 32), (4, 64), (4, 128), (3, 32), (3, 64), (2, 32), (2, 64)]


def main() -> None:
    """Decode the same prompts with each setting."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=4)
    args = parser.parse_args()
    loaded = load_model(resolve(args.model))
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    rows = []
    for bits, group in SETTINGS:
        drafter = SelfQuantized(group, bits=bits)
        llm = LLM(loaded, drafter=drafter, policy=Fixed(4), max_batch_size=1, max_model_len=2048)
        rounds = [r for example in EXAMPLES[: args.prompts] for r in llm.generate(example.chat, params)[0].rounds]
        drafted, stood = (sum(getattr(r, name) for r in rounds) for name in ("num_drafted", "num_accepted"))
        first = sum(r.num_accepted > 0 for r in rounds) / len(rounds)
        length = sum(r.num_emitted for r in rounds) / len(rounds)
        head = drafter.report.lm_head if drafter.report else ""
        rows.append({"bits": bits, "group_size": group, "lm_head": head, "first_token": round(first, 3)})
        rows[-1] |= {"accepted": round(stood / drafted, 3), "mean_acceptance_length": round(length, 2)}
        print(rows[-1], flush=True)
    print(json.dumps({"model": args.model, "tokens": args.tokens, "prompts": args.prompts, "rows": rows}))


if __name__ == "__main__":
    main()
