"""What does a SPACE adapter bring? Tokens a pass and speed by k, by small trees and with the cost model choosing.

    python bench/space.py MODEL ADAPTER [--data FOLDER] [--suites mt_bench humaneval gsm8k] [--num-prompts 8]
        [--tokens 64] [--k 1 2 3 4] [--nodes 4 6 8] [--depths 2 3] [--temperatures 0 1] [--batch 1 4 8]
        [--weights none int8 int4] [--no-transition] [--drafters lookup self-int4 head:smollm2-135m-eagle]
        [--numerics auto] [--dtype float32] [--json FILE] [--quick]

ADAPTER: a folder or a packaged name. Every group of prompts is decoded plainly and with every row of the table, and
every answer is compared token by token with that of plain decoding with the same weights, in the same batch size.
`--no-transition` adds the rows of a copy of the adapter without its transition. `--drafters` adds other drafters, each
with a fixed budget (`--draft-nodes`, chains all in depth, trees `--draft-depth` deep) and with the cost model.
Prints a markdown table. Exits with 1 if an answer differs, with 2 for what cannot be run.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from common import beside, filled_in, read_prompts, take_turns, under

from paceline import LLM, CostModel, Fixed, PacelineError
from paceline.core.interfaces import Drafter, DraftPolicy, Verifier
from paceline.drafters import Space
from paceline.errors import ConfigError
from paceline.heads import load_head, read_record
from paceline.modules import SpaceAdapter
from paceline.runner import LoadedModel, load_model, with_weights
from paceline.spec_config import parse
from paceline.system.provenance import provenance
from paceline.zoo import resolve

TREE_TOP_K = 4
FULL: dict[str, object] = {
    "suites": ["mt_bench", "humaneval", "gsm8k"], "num_prompts": 8, "tokens": 64, "k": [1, 2, 3, 4],
    "nodes": [4, 6, 8], "depths": [2, 3], "temperatures": [0.0, 1.0],
}  # fmt: skip
QUICK: dict[str, object] = {
    "suites": ["built-in"], "num_prompts": 2, "tokens": 24, "k": [1, 3], "nodes": [4], "depths": [2],
    "temperatures": [0.0],
}  # fmt: skip


def without_transition(adapter: SpaceAdapter) -> SpaceAdapter:
    """A copy that foresees each token without knowing the one before it. Raises `ConfigError` where it does anyway."""
    if not adapter.config.transition_rank:
        raise ConfigError("the adapter has no transition", fix="leave out --no-transition")
    made = SpaceAdapter(replace(adapter.config, transition_rank=0))
    made.load_state_dict({k: v for k, v in adapter.state_dict().items() if not k.startswith("transition")})
    return made.to(adapter.masks.device, adapter.masks.dtype).eval().requires_grad_(False)


def settings_of(adapter: SpaceAdapter, args: argparse.Namespace) -> Iterator[tuple[str, int, DraftPolicy]]:
    """Label, top_k and policy of each row; budgets deeper than the adapter has masks are left out."""
    for k in args.k:
        if k <= adapter.num_masks:
            yield f"k = {k}", 1, Fixed(k)
    for nodes in args.nodes:
        for depth in args.depths:
            if depth <= min(nodes, adapter.num_masks):
                yield f"{nodes} nodes, {depth} deep", TREE_TOP_K, Fixed(depth, nodes)
    yield "chain, cost model", 1, CostModel()
    yield "tree, cost model", TREE_TOP_K, CostModel()


def engines_of(
    loaded: LoadedModel, adapters: dict[str, SpaceAdapter], batch: int, args: argparse.Namespace
) -> dict[str, LLM]:
    """Plain decoding, which wears no adapter, and an engine for each row of the table."""

    def engine(
        drafter: Drafter | None = None, policy: DraftPolicy | None = None, verifier: Verifier | None = None
    ) -> LLM:
        return LLM(
            loaded, drafter=drafter, policy=policy, verifier=verifier, max_batch_size=batch,
            numerics=None if args.numerics == "auto" else args.numerics, max_model_len=args.max_model_len,
        )  # fmt: skip

    made = {"plain": engine()}
    for name, adapter in adapters.items():
        worn: LLM | None = None
        for label, top_k, policy in settings_of(adapter, args):
            drafter = Space(adapter, top_k)
            worn_now = engine(drafter, policy) if worn is None else beside(worn, drafter, policy)
            worn = worn or worn_now
            made[f"{name}, {label}"] = worn_now
    for name in args.drafters:
        drafter, _, verifier = parse(name).build()
        depth = args.draft_depth if drafter.info.branches > 1 else args.draft_nodes
        made[name] = engine(drafter, Fixed(depth, args.draft_nodes), verifier)
        made[f"{name}, cost model"] = under(made[name], CostModel())
    return made


def header(suites: list[str]) -> str:
    """The first two lines of the table."""
    columns = ["weights", "batch", "T", "drafter", "tokens a pass", *[Path(one).stem for one in suites]]
    columns += ["speed-up", "nodes", "rows", "drafting", "identical"]
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def line(row: dict, suites: list[str]) -> str:
    """A line of the table."""
    cells = [row["weights"], row["batch"], f"{row['temperature']:g}", row["drafter"]]
    cells += [f"{row[key]:.2f}" for key in ("mean_acceptance_length", *suites, "speedup")]
    cells += [f"{row['nodes']:.1f}", f"{row['rows']:.1f}", f"{row['draft_share']:.0%}"]
    cells += [f"{row['answers'] - len(row['differing'])} of {row['answers']}"]
    return f"| {' | '.join(map(str, cells))} |"


def measure(args: argparse.Namespace) -> dict[str, object]:
    """Run all settings, printing each block of rows as it is done."""
    asked, prompts_hash = read_prompts(args.suites, args.data, args.num_prompts)
    original = load_model(resolve(args.model), args.dtype)
    adapter = load_head(args.adapter, original)
    if not isinstance(adapter, SpaceAdapter):
        raise ConfigError(f"{args.adapter!r} is no SPACE adapter", got=type(adapter).__name__)
    adapters = {"space": adapter}
    if args.no_transition:
        adapters["space without transition"] = without_transition(adapter)
    for k in {*args.k, *args.depths}:
        if k > adapter.num_masks:
            print(f"left out: {k} in a row, since the adapter has {adapter.num_masks} masks", file=sys.stderr)
    rows: list[dict] = []
    numerics = set[str]()
    print(header(args.suites), flush=True)
    for weights in args.weights:
        loaded = original if weights == "none" else with_weights(original, weights)[0]
        for batch in args.batch:
            engines = engines_of(loaded, adapters, batch, args)
            numerics |= {llm.numerics for llm in engines.values()}
            for temperature in args.temperatures:
                tallies = take_turns(engines, asked, temperature, args.tokens, batch)
                for label, tally in tallies.items():
                    row: dict = {"weights": weights, "batch": batch, "temperature": temperature, "drafter": label}
                    row |= tally.as_row(tallies["plain"])
                    row |= {"ratios": [round(one, 3) for one in tally.ratios(tallies["plain"])]}
                    row |= {"answers": tally.answers, "differing": tally.differing}
                    rows.append(row)
                    print(line(row, args.suites), flush=True)
    return {
        "settings": vars(args),
        "adapter": {"config": vars(adapter.config), "weights_sha256": read_record(args.adapter).get("weights_sha256")},
        "target": {"name": original.name, "fingerprint": original.fingerprint, "dtype": str(original.dtype)},
        "numerics": sorted(numerics),
        "prompts": len(asked),
        "prompts_hash": prompts_hash,
        "rows": rows,
        "provenance": provenance(),
    }


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("adapter")
    parser.add_argument("--data", help="the folder with the suites' folders")
    parser.add_argument("--suites", nargs="+", metavar="NAME_OR_FILE")
    parser.add_argument("--num-prompts", type=int, help="from each suite")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--k", type=int, nargs="*", help="num_speculative_tokens of the chains")
    parser.add_argument("--nodes", type=int, nargs="*", help="candidates of the trees")
    parser.add_argument("--depths", type=int, nargs="*", help="of the trees")
    parser.add_argument("--temperatures", type=float, nargs="+")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--weights", nargs="+", default=["none"], choices=["none", "int8", "int4"])
    parser.add_argument("--no-transition", action="store_true")
    parser.add_argument("--drafters", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--draft-nodes", type=int, default=15)
    parser.add_argument("--draft-depth", type=int, default=6)
    parser.add_argument("--numerics", default="auto", choices=["auto", "invariant", "fast"])
    parser.add_argument("--dtype")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="a minute: fewer of everything that is not given")
    return filled_in(parser.parse_args(given), QUICK, FULL)


def main(given: list[str] | None = None) -> int:
    """Measure, print, write; 1 where an answer is not that of plain decoding."""
    args = arguments(given)
    try:
        result = measure(args)
    except PacelineError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")
    differing = [row for row in result["rows"] if row["differing"]]  # type: ignore[union-attr, index]
    for row in differing:
        where = f"weights {row['weights']}, batch {row['batch']}, temperature {row['temperature']:g}"
        print(f"{row['drafter']} differs ({where}) on {', '.join(row['differing'])}", file=sys.stderr)
    print(f"\nNumerics: {', '.join(result['numerics'])}.")  # type: ignore[arg-type]
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
