"""The default policy on drafts and texts of a real model, without the noise of the clock.

    python bench/replay.py record MODEL TRACE.jsonl --data DIR -d lookup -d self-int4 [--suite spec_bench ...]
        [--temperature 0] [--num-prompts 24] [--max-tokens 96]
    python bench/replay.py run TRACE.jsonl [-d lookup+self-int4 ...] [--seeds 5] [--fresh]

`record` decodes plainly and notes what each drafter would propose at every position, and what passes and drafts take on
this machine. Answers do not depend on drafts, so `run` can replay any policy and any combination of these drafters: it
drafts, accepts and learns as in the engine, on a clock that adds up the recorded seconds. The policy sees them with
noise (3%, and one in a hundred far too long); speed-ups are counted in the true ones. Requests come one by one, in an
order drawn from each seed. The policy learns from one half of the answers and is measured on the other, then the other
way round; with `--fresh` it has learnt nothing, and all answers count.

Columns are speed-ups over plain decoding; "best single" is the smallest ratio, over the categories, of a combination to
the best of its members in that category, with hindsight, and the same over all answers.
"""

import argparse
import json
import math
import random
import sys
from collections import defaultdict
from itertools import takewhile
from pathlib import Path

from rich.progress import track

from paceline import LLM, CostModel, SamplingParams
from paceline.cli.options import quieten
from paceline.config import parse
from paceline.core.draft import Draft
from paceline.core.interfaces import DraftBudget, Drafter, DrafterInfo, DraftOptions
from paceline.core.nodes import Tree, depths_of, path_to
from paceline.core.request import TokenSequence
from paceline.core.round import Origin, Round
from paceline.core.tree import TokenTree
from paceline.policy.constants import FEW_TOKENS
from paceline.policy.costs import PassCurve
from paceline.policy.simple import Fixed
from paceline.system.hardware import use_threads

DEPTH, TREE_DEPTH, TREE_NODES = 10, 5, 23  # of what is recorded
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
REST = 0.001  # seconds of a round outside the pass and the draft
NOISE, OUTLIERS = 0.03, 0.01


class Recorder(Drafter):
    """Asks every drafter at every position, and drafts nothing. proposals: by name, one row for each position."""

    name = "recorder"

    def __init__(self, drafters):
        self.drafters, self.proposals = drafters, {}

    @property
    def info(self):
        infos = [drafter.info for drafter in self.drafters.values()]
        return DrafterInfo(max(one.branches for one in infos), reads_states=any(one.reads_states for one in infos))

    def bind(self, target, verifier):
        for drafter in self.drafters.values():
            drafter.bind(target, verifier)

    def propose(self, seqs, budgets):
        (seq,) = seqs
        for name, drafter in self.drafters.items():
            (offer,) = drafter.draft_options(seq)
            depth = min(TREE_DEPTH if offer.branches > 1 else DEPTH, seq.remaining - 1)
            row = {"position": seq.num_output, "hint": offer.hint, "branches": offer.branches}
            row |= {"uncached": offer.uncached_tokens, "at_once": offer.at_once}
            if offer.hint >= 0 and depth > 0:
                budget = DraftBudget(depth, TREE_NODES if offer.branches > 1 else depth, should_continue=lambda _: True)
                draft = drafter.propose(seqs, [budget])
                (tree,) = draft.tree.rows
                given = None if draft.confidence is None else draft.confidence[0].tolist()
                row |= {"ids": tree.token_ids, "parents": tree.parents, "confidences": given}
            self.proposals.setdefault(name, []).append(row)
        return Draft(TokenTree.chain([[seq.token_ids[-1]]]), source=self.name)

    def observe(self, seqs, draft, logits, walks):
        for drafter in self.drafters.values():
            drafter.observe(seqs, draft, logits, walks)

    def release(self, slots):
        for drafter in self.drafters.values():
            drafter.release(slots)


def record(args):
    """Write the trace: a line of seconds, then a line for each answer."""
    from paceline.measure.suites import choose, read_suite

    recorder = Recorder({name: parse(name).build()[0] for name in args.drafter})
    llm = LLM(args.model, drafter=recorder, policy=Fixed(1), max_num_seqs=1)
    params = SamplingParams(temperature=args.temperature, seed=0, max_tokens=args.max_tokens)
    questions = [one for suite in args.suite for one in choose(read_suite(suite, args.data), args.num_prompts)]
    llm.generate(questions[0].turns[0], params)  # warms up
    seconds = {
        "passes": {rows: llm.runner.pass_seconds(rows) for rows in ROWS},
        "drafts": {name: next(iter(one.seconds().values()), (0.0, 0.0)) for name, one in recorder.drafters.items()},
    }
    with args.trace.open("w", encoding="utf-8") as out:
        out.write(json.dumps(seconds) + "\n")
        for question in track(questions, "Recording"):
            answers = []
            for _ in question.turns:
                recorder.proposals = {}
                prompt = question.turns[0] if question.chat is None else question.messages(answers)
                (result,) = llm.generate(prompt, params)
                row = {
                    "category": question.category,
                    "prompt": list(result.prompt_token_ids),
                    "output": list(result.token_ids),
                    "proposals": recorder.proposals,
                }
                out.write(json.dumps(row) + "\n")
                answers.append(result.text)


class Replayed(Drafter):
    """Drafters of a trace, joined. answer: what is decoded now. cached: tokens that each of them has read of it."""

    name = "replayed"

    def __init__(self, names, seconds, answers):
        self.names, self.timed = names, {name: seconds["drafts"][name] for name in names}
        first = {name: answers[0]["proposals"][name][0] for name in names}
        self.branches = {name: row["branches"] for name, row in first.items()}
        self.at_once = {name: row.get("at_once", False) for name, row in first.items()}
        self.begin(answers[0])

    @property
    def info(self):
        return DrafterInfo(max(self.branches.values()))

    def begin(self, answer):
        self.output, self.cached = answer["output"], dict.fromkeys(self.names, 0)
        self.uncached = {name: answer["proposals"][name][0].get("uncached", 0) for name in self.names}
        self.rows = {name: {row["position"]: row for row in answer["proposals"][name]} for name in self.names}

    def reads(self, name):
        """Whether it must read the whole prompt before it drafts."""
        return self.uncached[name] > FEW_TOKENS

    def draft_options(self, seq):
        rows = {name: self.rows[name].get(seq.num_output, {"hint": -1}) for name in self.names}
        unread = {name: (seq.num_cached - self.cached[name]) * self.reads(name) for name in self.names}
        return [
            DraftOptions(name, rows[name]["hint"], unread[name], self.branches[name], at_once=self.at_once[name])
            for name in self.names
        ]

    def seconds(self):
        return {name: timed for name, timed in self.timed.items() if any(timed)}

    def propose(self, seqs, budgets):
        raise NotImplementedError  # `play` reads the rows

    def play(self, seq, budget):
        """(Round without its seconds, seconds of drafting) of the drafter that the budget names."""
        name = self.names[budget.drafter_index]
        row = self.rows[name].get(seq.num_output, {"hint": -1})
        depth = min(budget.depth, budget.nodes, seq.remaining - 1)
        nodes, levels = cut(row, budget, depth) if depth > 0 and "ids" in row else ([0], 0)
        ids, parents, given = (row.get(key) or [-1] for key in ("ids", "parents", "confidences"))
        tree, at, accepted = Tree.of(ids, parents).part(nodes), 0, []
        for token in self.output[seq.num_output :]:
            at = tree.child(at, token)
            if at is None:
                break
            accepted.append(at)
        spent, (token_s, read_s) = 0.0, self.timed[name]
        if levels:
            spent = (1 if self.at_once[name] else levels) * token_s + read_s * (
                seq.num_cached - self.cached[name]
            ) * self.reads(name)
            self.cached[name] = seq.num_cached
        emitted = 0
        for token in self.output[seq.num_output :][: len(accepted) + 1]:
            emitted += 1
            if seq.append(token, Origin.DRAFTED, name):
                break
        made = Round(
            name, max(tree.depths), len(accepted), emitted,
            token_ids=tuple(nodes), parents=tuple(tree.parents), path=tuple(accepted),
            confidences=() if given == [-1] else tuple(given[node] for node in nodes[1:]),
            hint=row["hint"], batch=1, num_rows=len(nodes),
        )  # fmt: skip
        return made, spent


def cut(row, budget, depth):
    """What a drafter with this budget would have drafted of a recorded tree: its nodes, root first, and the levels."""
    parents, given = row["parents"], row["confidences"]
    depths, scores, levels = depths_of(parents), [1.0], 0
    for node in range(1, len(parents)):
        scores.append(scores[parents[node]] * (given[node] if given else 1.0))
    while levels < min(depth, max(depths)):
        levels += 1
        best = max((n for n in range(len(depths)) if depths[n] == levels), key=lambda n: scores[n])
        path = [given[node] for node in path_to(parents, best)] if given else []
        if given and budget.should_continue is not None and not budget.should_continue(path):
            break
    drafted = sorted((n for n in range(1, len(depths)) if depths[n] <= levels), key=lambda n: (-scores[n], n))
    kept = takewhile(lambda pair: scores[pair[1]] >= budget.min_prob(pair[0]), enumerate(drafted[: budget.nodes]))
    return [0, *sorted(n for _, n in kept)], levels


def replay(seconds, lessons, answers, names, rng):
    """Category -> [seconds, seconds of plain decoding, tokens, passes] of `answers`; `lessons` come before them."""
    now, curve = 0.0, PassCurve({int(rows): took for rows, took in seconds["passes"].items()})
    drafter, policy = Replayed(names, seconds, answers), CostModel(clock=lambda: now)
    policy.bind(drafter, lambda rows: seen(curve.seconds(rows), rng), pads_trees=False)
    found = defaultdict(lambda: [0.0] * 4)
    for number, answer in enumerate([*lessons, *answers]):
        drafter.begin(answer)
        params = SamplingParams(max_tokens=len(answer["output"]), ignore_eos=True)
        seq = TokenSequence(answer["prompt"], params, 0, frozenset(), 10**6, slot=0)
        while not seq.is_finished:
            made, spent = drafter.play(seq, policy.budgets([seq])[0])
            took = spent, curve.seconds(made.num_rows), REST
            told = [seen(part, rng) for part in took]
            now += sum(told)
            timed = dict(zip(("draft_s", "verify_s", "rest_s"), told, strict=True))
            policy.observe(seq, Round(**{**made.__dict__, **timed}))
            row = sum(took), made.num_emitted * (curve.seconds(1) + REST), made.num_emitted, 1
            for name in (answer["category"], "all") if number >= len(lessons) else ():
                found[name] = [a + b for a, b in zip(found[name], row, strict=True)]
        policy.release([0])
    return found


def replays(seconds, answers, names, args):
    """Sums of `replay` over all seeds."""
    total = defaultdict(lambda: [0.0] * 4)
    for seed in range(args.seeds):
        rng = random.Random(seed)
        halves = answers[::2], answers[1::2]
        for lessons, measured in [((), answers)] if args.fresh else [halves, halves[::-1]]:
            shuffled = (rng.sample(part, len(part)) for part in (lessons, measured))
            for name, row in replay(seconds, *shuffled, names, rng).items():
                total[name] = [a + b for a, b in zip(total[name], row, strict=True)]
    return total


def seen(seconds, rng):
    """What a stopwatch says."""
    return seconds * math.exp(rng.gauss(0, NOISE)) * (rng.uniform(5, 20) if rng.random() < OUTLIERS else 1.0)


def run(args):
    """Replay and print the table."""
    with args.trace.open(encoding="utf-8") as lines:
        seconds, *answers = map(json.loads, lines)
    singles = list(seconds["drafts"])
    asked = args.drafter or [*singles, *(f"{a}+{b}" for i, a in enumerate(singles) for b in singles[i + 1 :])]
    unknown = sorted({name for one in asked for name in one.split("+")} - set(singles))
    if unknown:
        sys.exit(f"not in this trace: {', '.join(unknown)}; it has {', '.join(singles)}")
    speeds = {}
    for one in track(dict.fromkeys([*singles, *asked]), "Replaying", transient=True):
        cells = replays(seconds, answers, one.split("+"), args)
        speeds[one] = {name: (cell[1] / cell[0], cell[2] / cell[3]) for name, cell in cells.items()}
    names = sorted(speeds[singles[0]], key="all".__eq__)
    print("| drafter | " + " | ".join(names) + " | best single, worst category | all |")
    print("|---" * (len(names) + 3) + "|")
    for one in asked:
        shown = [f"{speed:.2f} ({tokens:.2f})" for speed, tokens in map(speeds[one].get, names)]
        ratio = {n: speeds[one][n][0] / max(speeds[part][n][0] for part in one.split("+")) for n in names}
        ratios = [f"{min(ratio.values()):.3f}", f"{ratio['all']:.3f}"] if "+" in one else ["", ""]
        print("| " + " | ".join([one, *shown, *ratios]) + " |")


def main():
    """Record or run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    recording = verbs.add_parser("record")
    recording.add_argument("model")
    recording.add_argument("trace", type=Path)
    recording.add_argument("--data", type=Path, required=True)
    recording.add_argument("--drafter", "-d", action="append", required=True)
    recording.add_argument("--suite", nargs="+", default=["spec_bench", "humaneval", "gsm8k"])
    recording.add_argument("--temperature", type=float, default=0.0)
    recording.add_argument("--num-prompts", type=int, default=24, help="of each suite")
    recording.add_argument("--max-tokens", type=int, default=96)
    recording.set_defaults(do=record)
    running = verbs.add_parser("run")
    running.add_argument("trace", type=Path)
    running.add_argument("--drafter", "-d", action="append", help="default: each of the trace and each pair")
    running.add_argument("--seeds", type=int, default=5)
    running.add_argument("--fresh", action="store_true", help="start each order with a policy that has learnt nothing")
    running.set_defaults(do=run)
    args = parser.parse_args()
    quieten(debug=False)
    use_threads()
    args.do(args)


if __name__ == "__main__":
    main()
