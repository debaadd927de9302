"""Does the default policy stay near plain decoding when the drafter is always wrong?

    python bench/never_slower.py MODEL [--draft MODEL] [--tokens 256] [--repeat 2]

Two adversaries: `free` hands over wrong tokens at no cost; `dear` runs a draft model for each of them first and then
hands over another token. Plain and speculative answers alternate, in an order that alternates too. The first answer of
each adversary is the one in which the policy meets it; all are counted. Prints a table and one JSON line.
"""

import argparse
import json
import statistics
from dataclasses import replace
from typing import final

from paceline import LLM, DraftModel, SamplingParams
from paceline.core.draft import Draft
from paceline.core.interfaces import Drafter
from paceline.core.tree import TokenTree
from paceline.measure.prompts import EXAMPLES, user_prompt


@final
class Free(Drafter):
    """As many wrong tokens as it may draft: the position of a token is its id."""

    name = "free"

    def propose(self, seqs, budgets):
        rows = [
            [seq.token_ids[-1], *(3 + i for i in range(budget.depth))]
            for seq, budget in zip(seqs, budgets, strict=True)
        ]
        return Draft(TokenTree.chain(rows), source=self.name)


@final
class Dear(Drafter):
    """A draft model whose every token is replaced by another."""

    name = "dear"

    def __init__(self, model: str):
        self.inner = DraftModel(model)

    def bind(self, target, verifier):
        self.inner.bind(target, verifier)
        self.vocab_size = target.vocab_size

    def draft_options(self, seq):
        return [replace(look, source=self.name) for look in self.inner.draft_options(seq)]

    def propose(self, seqs, budgets):
        """The draft model's tokens, each moved on by one id."""
        draft = self.inner.propose(seqs, budgets)
        ids, parents, probes = draft.tree.lists
        ids = [[row[0], *((token + 1) % self.vocab_size for token in row[1:])] for row in ids]
        tree = TokenTree.from_lists(ids, parents, draft.tree.device, probes)
        return replace(draft, tree=tree, source=self.name)

    def release(self, slots):
        self.inner.release(slots)


def main() -> None:
    """Measure both adversaries."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--draft", help="the draft model of `dear`; left out without one")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=2)
    args = parser.parse_args()
    first = LLM(args.model)
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    found: dict[str, dict[str, float]] = {}
    for adversary in [Free(), *([Dear(args.draft)] if args.draft else [])]:
        llm = LLM(first.loaded, drafter=adversary)
        plain = llm.plain()
        plain.generate(user_prompt(plain.loaded, EXAMPLES[0].prompt), SamplingParams(max_tokens=8))
        ratios: list[float] = []
        seconds = {"plain": 0.0, "default": 0.0}
        for turn, example in enumerate(list(EXAMPLES[:4]) * args.repeat):
            took, answers = {}, {}
            sides = [("plain", plain), ("default", llm)]
            for name, side in sides if turn % 2 else sides[::-1]:
                result = side.generate(user_prompt(side.loaded, example.prompt), params)[0]
                answers[name], took[name] = result.token_ids, result.metrics.decode
                seconds[name] += took[name]
            assert answers["plain"] == answers["default"]
            ratios.append(took["plain"] / took["default"])
        total = seconds["plain"] / seconds["default"]
        found[adversary.name] = {"first": ratios[0], "median": statistics.median(ratios), "all": total}
        told = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"{adversary.name}: {total:.3f} of plain decoding over {args.tokens} tokens ({told})", flush=True)
    print(json.dumps({"model": args.model, "tokens": args.tokens, "ratios": found}))


if __name__ == "__main__":
    main()
