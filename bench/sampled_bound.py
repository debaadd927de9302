"""Where the tokens of sampled drafts go: what a head drafts on real states, beside the bounds of any draft.

    python bench/sampled_bound.py smollm2-135m --head smollm2-135m-eagle --data DIR [--temperature 1] [--num-prompts 40]
        [--max-tokens 64] [--nodes 7] [--depth 7] [--levels 4] [--every 4] [--draws 8]

The target answers each prompt with a seed; then it answers again, and at each place of the answers drafts are compared
with the token that it emits there. HEAD is of the EAGLE family or DFlash. Three tables:

Tokens a pass: each draft begins where the one before ended, as in the engine. "target" drafts with p itself instead of
the head: what it lacks is the price of not knowing the noise, or of the head's vocabulary. Chains of single tokens are
also replayed with each level as good as the first, and with the tokens outside the vocabulary drafted.

One token, by level: the mean chance that a draft has the target's token, after the true text. p is the target's
distribution and q the head's, its rollout having read its own states since the first level.

    shared k     argmax(log p + g) is among the k largest of log q + g: the rule of the engine; g is Gumbel noise
    drawn k      k draws from q without the noise: the most that any lossless rule accepts, 1 + min over sets H of
                 p(H) - q(H)^k (arXiv 2502.18779), which is 1 - TV for k = 1
    fixed k      p of the k most probable tokens by q, as without noise
    best k       p of its k most probable tokens: the bound of all drafts that do not know the noise
    floor        (1 - TV) / (1 + TV), which shared 1 never falls below (arXiv 2408.07978)

By divergence: the same for the places of the first level, by KL(p || q) within the vocabulary, in nats. And the tokens
of the head's trees by its confidence in them, beside the share that the target chooses. The last line is JSON.
"""

import argparse
import heapq
import json
import math
import sys
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import torch
from rich.progress import track

from paceline import LLM, SamplingParams
from paceline.cli.options import quieten
from paceline.core.draft import Draft
from paceline.core.interfaces import DraftBudget, Drafter, DrafterInfo
from paceline.core.nodes import Tree
from paceline.core.round import tokens_per_pass
from paceline.core.tree import TokenTree
from paceline.measure.record import measured_on
from paceline.measure.suites import choose, read_suite
from paceline.methods.heads.top_tokens import TokenRanking
from paceline.methods.spec import from_short_name, spec_class
from paceline.policy.simple import Fixed
from paceline.system.hardware import use_threads
from paceline.target.prefill import reference_logits

COUNTS = (1, 2, 4, 8)
KINDS = [f"{kind} {count}" for kind in ("shared", "drawn", "fixed", "best") for count in COUNTS]
KL_EDGES = (0.1, 0.3, 1.0, 3.0)
SURE_EDGES = (0.1, 0.3, 0.5, 0.7, 0.9)


def bounds(p, q):
    """(the chance that argmax(log p + g) = argmax(log q + g), the most that is accepted of each of `COUNTS` draws).

    The chance is the sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i).
    """
    p_in, q_in = p[q > 0], q[q > 0]
    order = (p_in / q_in).argsort()
    p_i, q_i = p_in[order], q_in[order]
    p_so_far, q_so_far = p_i.cumsum(0), q_i.cumsum(0)
    by_p, by_q = p.sum() - p_so_far + p_i, (q_so_far - q_i).clamp_min(0)  # the tokens j where each ratio is the larger
    shared = (1 / (by_p / p_i + by_q / q_i))[p_i > 0].sum()
    # The sets that matter are the beginnings of this order.
    return shared, [1 + (p_so_far - q_so_far.clamp_max(1) ** k).clamp_max(0).min() for k in COUNTS]


def rates(p, q, best, noise):
    """What one token's drafts have, by name.

    p, q: over the vocabulary of the head and, at the end, everything outside of it, float64 [Vd + 1]. best: the largest
    of p outside and inside, descending. noise: [N, Vd + 1].
    """
    within = p[:-1] / p[:-1].sum()
    spread = (within * (within.log() - q[:-1].log())).nan_to_num(0, 0, 0).sum()
    shared, most = bounds(p, q)
    found = {"outside": p[-1], "KL": spread, "floor": most[0] / (2 - most[0]), "shared 1": shared}
    ours, chosen = q.log().float() + noise, (p.log().float() + noise).argmax(-1, keepdim=True)
    rank = (ours > ours.gather(-1, chosen)).sum(-1).where(chosen[:, 0] < len(p) - 1, len(p))
    found |= {f"shared {k}": (rank < k).double().mean() for k in COUNTS[1:]}
    found |= {f"drawn {k}": value for k, value in zip(COUNTS, most, strict=True)}
    found |= {f"fixed {k}": p[q.topk(k).indices].sum() for k in COUNTS}
    found |= {f"best {k}": best[:k].sum() for k in COUNTS}
    return {name: float(value) for name, value in found.items()}


@dataclass(frozen=True, eq=False)
class Told(TokenRanking):
    """Lets a head draft the true tokens, and keeps its logits at each level."""

    future: list = field(default_factory=list)
    levels: list = field(default_factory=list)

    def in_pass(self, seqs, offset, count):
        return 0, None

    def top(self, logits, seqs, offset, count, known=None):
        self.levels.append(logits[:1].float())
        return [[self.future[offset]]], [[0.0]]


class Side:
    """A draft of every round: the tokens and passes of all answers. at: where its next round begins."""

    def __init__(self, drafter, budget, uses_noise=True):
        self.drafter, self.budget, self.uses_noise = drafter, budget, uses_noise
        self.at = self.tokens = self.passes = 0
        self.sure = []  # (confidence, whether it is right) of each drafted token after the true text

    def play(self, seq, answer):
        begin = seq.num_output
        depth = min(self.budget.depth, len(answer) - 1 - begin)
        (tree,), node, count = [Tree.of(seq.token_ids[-1:])], 0, 0
        if depth > 0:
            draft = self.drafter.propose([seq], [replace(self.budget, depth=depth)])
            (tree,) = draft.tree.rows
            while tree.children[node]:
                if draft.confidence is not None:
                    given = [(child, float(draft.confidence[0, child])) for child in tree.children[node]]
                    self.sure += [(sure, tree.token_ids[child] == answer[begin + count]) for child, sure in given]
                below = tree.child(node, answer[begin + count])
                if below is None:
                    break
                node, count = below, count + 1
        self.add(begin, count + 1)

    def add(self, begin, emitted):
        self.at, self.tokens, self.passes = begin + emitted, self.tokens + emitted, self.passes + 1


class BestTree(Drafter):
    """Draft with the target itself: the tree of the most probable paths, of a target whose noise is unknown.

    expected: of each draft, the tokens that it makes on average over the noise: 1 and the probabilities of its paths.
    """

    name = "target"

    def bind(self, target, verifier):
        self.runner, self.expected = target.run_model(target.loaded), []

    def propose(self, seqs, budgets):
        (seq,), (budget,), runner = seqs, budgets, self.runner
        runner.extend_cache(seq.slot, seq.token_ids[runner.cache.lengths[seq.slot] : -1])
        tokens, parents, masses, depths, waiting = [seq.token_ids[-1]], [-1], [1.0], [0], []
        while True:
            node = len(tokens) - 1
            if depths[node] < budget.depth:
                logits = runner.forward([seq.slot], TokenTree.from_lists([tokens], [parents]))[0, node]
                chances, ids = (logits.double() / seq.params.temperature).softmax(-1).topk(budget.nodes)
                for chance, token in zip((masses[node] * chances).tolist(), ids.tolist(), strict=True):
                    heapq.heappush(waiting, (-chance, node, token))
            if len(tokens) > budget.nodes or not waiting:
                break
            chance, parent, token = heapq.heappop(waiting)
            tokens, parents = [*tokens, token], [*parents, parent]
            masses, depths = [*masses, -chance], [*depths, depths[parent] + 1]
        self.expected.append(sum(masses))
        return Draft(TokenTree.from_lists([tokens], [parents]), source=self.name)

    def release(self, slots):
        for slot in slots:
            self.runner.cache.truncate(slot, 0)


class Recorder(Drafter):
    """Asks every side where its round begins, and a head at every place; drafts nothing.

    answer: what is decoded now. logits: the target's before each of its tokens, over the temperature. rates: by level,
    of each place. ranks: of each answer, by level, how many tokens the head prefers to that of the place; None where
    its vocabulary does not have it.
    """

    name = "recorder"
    info = DrafterInfo(reads_states=True)

    def __init__(self, sides, head, args):
        self.sides, self.head, self.args = sides, head, args
        self.rates, self.ranks = [[] for _ in range(args.levels)], []
        self.random = torch.Generator().manual_seed(0)

    def bind(self, target, verifier):
        for drafter in self.drafters():
            drafter.bind(target, verifier)
        for side in self.sides.values():
            if not side.uses_noise:
                side.drafter._ranking = replace(side.drafter._ranking, uses_noise=False)
        ranking = self.head._ranking
        self.head._ranking = Told(ranking.draft_ids, True, ranking.banned)
        self.columns = {token: column for column, token in enumerate(ranking.draft_ids.tolist())}

    def drafters(self):
        return [self.head, *(side.drafter for side in self.sides.values())]

    def begin(self, answer, logits):
        self.answer, self.logits = answer, logits.double() / self.args.temperature
        self.ranks.append([[None] * len(answer) for _ in range(self.args.levels)])
        for side in self.sides.values():
            side.at = 0

    def propose(self, seqs, budgets):
        (seq,) = seqs
        for side in self.sides.values():
            if seq.num_output >= side.at:
                side.play(seq, self.answer)
        self.compare(seq)
        return Draft(TokenTree.chain([[seq.token_ids[-1]]]), source=self.name)

    def compare(self, seq):
        begin, ranking, args = seq.num_output, self.head._ranking, self.args
        ranking.future[:], ranking.levels[:] = self.answer[begin : begin + args.levels], []
        depth = len(ranking.future)
        self.head.propose([seq], [DraftBudget(depth, depth)])
        for level, logits in enumerate(ranking.levels):
            column = self.columns.get(ranking.future[level])
            if column is not None:
                scores = ranking.scores(logits, [seq], level)[0]
                self.ranks[-1][level][begin + level] = int((scores > scores[column]).sum())
            if begin % args.every == 0:
                whole = self.logits[begin + level].softmax(-1)
                p, q = whole[ranking.draft_ids], (logits[0].double() / args.temperature).softmax(-1)
                p, q = torch.cat([p, (1 - p.sum()).clamp_min(0)[None]]), torch.cat([q, q.new_zeros(1)])
                noise = -torch.empty(args.draws, len(q)).exponential_(generator=self.random).log()
                self.rates[level].append(rates(p, q, whole.topk(COUNTS[-1]).values, noise))

    def release(self, slots):
        for drafter in self.drafters():
            drafter.release(slots)


def chained(ranks, depth, is_right):
    """Tokens a pass of chains whose token of (level, place) is right where `is_right` says so of an answer's ranks."""
    tokens = passes = 0
    for levels in ranks:
        place, length = 0, len(levels[0])
        while place < length:
            level = 0
            while level < min(depth, length - 1 - place) and is_right(levels, level, place + level):
                level += 1
            place, tokens, passes = place + level + 1, tokens + level + 1, passes + 1
    return tokens / passes


def head_drafter(name, **options):
    """The drafter of a head, with options of `Eagle`."""
    keys = {**from_short_name(f"head:{name}"), **options}
    return spec_class(keys.pop("method")).read(keys).build()


def measure(model, make, prompts, args):
    """All tables. make: a drafter with the head, from options of `Eagle`."""
    budget, nodes = DraftBudget(args.depth, args.nodes), args.nodes
    llm = LLM(model, drafter=make(), max_num_seqs=1)
    best = BestTree()
    sides = {
        f"head, {nodes} nodes": Side(make(), budget),
        f"head, {nodes} nodes, without counts of the text": Side(make(ngrams=False), budget),
        f"head, {nodes} nodes, without these and the noise": Side(make(ngrams=False), budget, uses_noise=False),
        "head, a chain, without counts of the text": Side(make(ngrams=False, tree="chain"), budget),
        **{f"head, {n} nodes": Side(make(), replace(budget, nodes=n)) for n in args.wider},
        f"target, {nodes} nodes, without the noise": Side(best, budget),
    }
    recorder = Recorder(sides, make(ngrams=False, tree="chain"), args)
    recording = llm.using(drafter=recorder, policy=Fixed(1))
    rounds = []
    for number, prompt in enumerate(track(prompts, "Recording")):
        params = SamplingParams(temperature=args.temperature, seed=number, max_tokens=args.max_tokens)
        (output,) = llm.generate([prompt], params)
        rounds += output.outputs[0].rounds
        answer = list(output.token_ids)
        recorder.begin(answer, reference_logits(llm.loaded, [*output.prompt_token_ids, *answer[:-1]], len(answer)))
        (again,) = recording.generate([prompt], params)
        if list(again.token_ids) != answer:
            sys.exit(f"prompt {number}: the answer is not that of the first run")
    ranks, deepest = recorder.ranks, args.levels - 1
    passes = {"head, default policy": tokens_per_pass(rounds)}
    passes |= {name: side.tokens / side.passes for name, side in sides.items()}
    passes |= {
        "the chain replayed": chained(ranks, args.depth, lambda r, s, i: r[min(s, deepest)][i] == 0),
        "the chain, each level as the first": chained(ranks, args.depth, lambda r, s, i: r[0][i] == 0),
        "the chain, with the tokens outside": chained(ranks, args.depth, lambda r, s, i: not r[min(s, deepest)][i]),
        "target, the head's vocabulary, with the noise": chained(
            ranks, args.depth, lambda r, s, i: r[0][i] is not None
        ),
        "target, with the noise": chained(ranks, args.depth, lambda r, s, i: True),
    }
    return {
        "tokens_per_pass": passes,
        "best_tree_expected": mean(best.expected),
        "levels": [averaged(level) for level in recorder.rates],
        "by_kl": grouped([(row["KL"], row) for row in recorder.rates[0]], KL_EDGES),
        "by_confidence": grouped([(s, {"right": r}) for s, r in sides[f"head, {nodes} nodes"].sure], SURE_EDGES),
    }


def mean(values):
    """Their mean; 0 of none."""
    return sum(values) / max(1, len(values))


def averaged(rows):
    """The mean of each name over rows."""
    return {name: mean([row[name] for row in rows]) for name in (rows[0] if rows else ())}


def grouped(pairs, edges):
    """The means of rows by their key: the range of the key, its mean and the share of all rows come first."""
    found = []
    for low, high in pairwise([-math.inf, *edges, math.inf]):
        inside = [(key, row) for key, row in pairs if low <= key < high]
        if inside:
            about = {"below": None if high == math.inf else high, "mean": mean([key for key, _ in inside])}
            share = len(inside) / len(pairs)
            found.append({**about, "share": share, **averaged([row for _, row in inside])})
    return found


def show(found):
    """Print the tables."""
    print("| draft | tokens a pass |\n|---|---|")
    for name, value in found["tokens_per_pass"].items():
        print(f"| {name} | {value:.2f} |")
    print(f"\nThe trees of the target make {found['best_tree_expected']:.2f} tokens on average over the noise.\n")
    levels = [level for level in found["levels"] if level]
    print("| one token | " + " | ".join(f"level {number}" for number, _ in enumerate(levels, 1)) + " |")
    print("|---" * (1 + len(levels)) + "|")
    for name in levels[0]:
        print(f"| {name} | " + " | ".join(f"{level[name]:.3f}" for level in levels) + " |")
    for key, names in {"by_kl": ("floor", *KINDS), "by_confidence": ("right",)}.items():
        print(f"\n| {key.replace('_', ' ')} below | mean | share | " + " | ".join(names) + " |")
        print("|---" * (3 + len(names)) + "|")
        for row in found[key]:
            print(
                f"| {row['below'] or 'all'} | "
                + " | ".join(f"{row[name]:.3f}" for name in ("mean", "share", *names))
                + " |"
            )


def main():
    """Measure, print the tables and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--head", required=True, help="a folder or packaged name")
    parser.add_argument("--suite", default="spec_bench")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--num-prompts", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=7, help="of a tree, without its root")
    parser.add_argument("--wider", type=int, nargs="*", default=[15, 63], help="further numbers of nodes")
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--levels", type=int, default=4, help="whose distributions are compared")
    parser.add_argument("--every", type=int, default=4, help="compare at every Nth place")
    parser.add_argument("--draws", type=int, default=8, help="of the noise, where a chance is not known exactly")
    args = parser.parse_args()
    if args.temperature <= 0:
        parser.error("--temperature must be above 0: without noise the bound of a draft is p of its token, 0 or 1")
    quieten(debug=False)
    use_threads()
    questions = choose(read_suite(args.suite, args.data), args.num_prompts)
    prompts = [one.turns[0] if one.chat is None else one.messages([]) for one in questions]
    found = measure(args.model, lambda **options: head_drafter(args.head, **options), prompts, args)
    show(found)
    print(json.dumps({**found, "options": {**vars(args), "data": None}, "provenance": measured_on()}))


if __name__ == "__main__":
    main()
