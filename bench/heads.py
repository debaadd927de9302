"""Which head, which tree? Accepted length and speed of several heads on the same prompts with the same number of nodes.

    python bench/heads.py MODEL --head eagle=FOLDER --head eagle3=FOLDER --head medusa=FOLDER
        [--data FOLDER] [--suites mt_bench,humaneval,gsm8k] [--num-prompts 8] [--tokens 64] [--nodes 16] [--depth 6]
        [--temperatures 0,1] [--trees dynamic,static,chain] [--policy] [--dtype float32]

Each prompt is decoded plainly, then with every head and tree, so that a machine that slows down slows all of them.
A chain spends the budget on depth. `--policy` lets the cost model set the budgets instead: the speed a user gets.
Prints a table, the share accepted by depth, and one JSON line.
"""

import argparse
import json
from pathlib import Path

from common import read_prompts, take_turns

from paceline import LLM, CostModel, Fixed
from paceline.drafters import Blockwise, Eagle, Medusa, Mtp, PromptLookup
from paceline.heads import load_head
from paceline.modules import BlockwiseHead, EagleHead, MedusaHead
from paceline.runner import load_model
from paceline.zoo import resolve


def drafters_of(heads: list[str], trees: list[str], target) -> dict:
    """One drafter for each head and tree, by its label."""
    made: dict = {"lookup": PromptLookup()}
    for given in heads:
        label, _, folder = given.partition("=")
        head = load_head(Path(folder), target)
        if isinstance(head, EagleHead):
            made |= {f"{label} {tree}": Eagle(head, tree=tree) for tree in trees}
        elif isinstance(head, MedusaHead):
            made[label] = Medusa(head)
        else:
            made[label] = Blockwise(head) if isinstance(head, BlockwiseHead) else Mtp(head)
    return made


def main() -> None:
    """Decode, count and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--head", action="append", required=True, metavar="LABEL=FOLDER")
    parser.add_argument("--data", default=None)
    parser.add_argument("--suites", default="mt_bench,humaneval,gsm8k")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--trees", default="dynamic,static,chain")
    parser.add_argument("--policy", action="store_true")
    parser.add_argument("--dtype", default=None)
    args = parser.parse_args()
    loaded = load_model(resolve(args.model), args.dtype)
    engines = {"plain": LLM(loaded, max_batch_size=1, max_model_len=2048)}
    for label, drafter in drafters_of(args.head, args.trees.split(","), loaded).items():
        depth = args.nodes if label.endswith("chain") or label == "lookup" else args.depth
        policy = CostModel() if args.policy else Fixed(depth, args.nodes)
        engines[label] = LLM(loaded, drafter=drafter, policy=policy, max_batch_size=1, max_model_len=2048)
    asked, _ = read_prompts(args.suites.split(","), args.data, args.num_prompts)
    rows = []
    for temperature in map(float, args.temperatures.split(",")):
        tallies = take_turns(engines, asked, temperature, args.tokens)
        for label, tally in tallies.items():
            same = not tally.differing or engines[label].numerics == "fast"
            assert same, f"{label} differs on {', '.join(tally.differing)}"
            rows.append({"temperature": temperature, "drafter": label, **tally.as_row(tallies["plain"])})
            print(rows[-1], flush=True)
    print(json.dumps({"settings": vars(args), "rows": rows}))


if __name__ == "__main__":
    main()
