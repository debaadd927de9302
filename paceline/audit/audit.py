"""The audit of one server, of two, or of a server against a local model: what is asked, and what is compared.

greedy     each side answers every prompt alone; a server again, in other orders, and several at a time
pairs      the first answers of the first side against those of each other side
seeds      sampled answers of one seed, twice, and of another seed
sampling   many short answers: the distribution of the first side against that of each other side
speed      streamed answers of all servers in turns
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import PacelineError
from ..measure.prompts import Prompt
from ..system.files import Progress, silent
from . import sampling
from .answers import Answer, Ask, Server, Side
from .client import NoAnswer, Unreachable
from .engines import Acceptance
from .local import Local
from .rates import interval, median_interval
from .record import Case, Comparison, Drafts, Fault, Record, Speed
from .run import Job, Misses, Run, perform, shuffled, together
from .verdicts import TOLERANCE, Judgement, Verdict, compare, drift, faults, witnessed

_ORDER = list(Verdict)
_SEED_TOKENS, _SEED_PROMPTS, _SAMPLED_PROMPTS = 16, 4, 4


@dataclass(frozen=True)
class Plan:
    """What is asked. temperature: of sampled answers, None for none; samples: of each prompt and side.

    tolerance: nats that two tokens of a near-tie may be apart; None: `verdicts.TOLERANCE`, or the noise that a local
    model measures. card: the mean acceptance length that the drafts should have.
    """

    prompts: Sequence[Prompt]
    max_tokens: int = 64
    is_greedy: bool = True
    temperature: float | None = 1.0
    seed: int = 0
    repeats: int = 2
    concurrency: int = 4
    samples: int = 100
    timings: int = 2
    tolerance: float | None = None
    card: float | None = None

    def num_requests(self, sides: Sequence[Side]) -> int:
        """About how many requests an audit sends."""
        servers = sum(isinstance(side, Server) for side in sides)
        greedy = len(self.prompts) * (len(sides) + servers * 3 * self.repeats) * self.is_greedy
        few = min(len(self.prompts), _SAMPLED_PROMPTS)
        drawn = 0 if self.temperature is None else few * (self.samples * max(len(sides), 1) + 3)
        return greedy + drawn + servers * len(self.prompts) * self.timings


class Audit:
    """One audit. `run` fills `record`, which can be read at any time, also after an error."""

    def __init__(self, sides: Sequence[Side], plan: Plan, progress: Progress = silent):
        self.sides, self.plan, self.progress = list(sides), plan, progress
        self.servers = [side for side in sides if isinstance(side, Server)]
        self.record = Record(
            [_words(prompt) for prompt in plan.prompts],
            {side.name: dict(side.about) for side in sides},
            tolerance=TOLERANCE if plan.tolerance is None else plan.tolerance,
            stopped="not complete",
        )
        self._is_one_engine = len({side.about["engine"] for side in sides}) == 1
        self._drafts = dict[str, list[Acceptance]]()  # of a server, by prompt

    def run(self) -> Record:
        """Do everything. Raises `PacelineError`, with the findings so far in `record`."""
        try:
            self._try_out()
            if self.plan.is_greedy:
                self._greedy()
            if self.plan.temperature is not None:
                self._seeds(self.plan.temperature)
                self._sampling(self.plan.temperature)
            if self.plan.timings:
                self._speed()
            self.record.stopped = None
        except KeyboardInterrupt:
            self.record.stopped = "stopped by Ctrl-C"
            raise
        except PacelineError as error:
            self.record.stopped = str(error)
            raise
        finally:
            self._conclude()
        return self.record

    # Stages

    def _try_out(self) -> None:
        """One short answer of each server: what it refuses altogether would be refused again and again."""
        for side in self.servers:
            try:
                side.answer(self.plan.prompts[0], Ask(1, 0.0, self.plan.seed))
            except NoAnswer as error:
                fix = "--raw asks /v1/completions, --chat /v1/chat/completions"
                raise Unreachable(f"{side.name} does not answer", got=error, fix=fix) from error

    def _greedy(self) -> None:
        plan = self.plan
        jobs = [Job(index, prompt, Ask(plan.max_tokens, 0.0, plan.seed)) for index, prompt in enumerate(plan.prompts)]
        for side in self.sides:
            self._alone(side, jobs)
        for side in self.servers:
            for repeat in range(plan.repeats):
                seed = plan.seed + repeat
                self._ask(side, "again", jobs, 1)
                self._ask(side, "other order", shuffled(jobs, seed), 1)
                if self._size(side) > 1:
                    self._ask(side, "together", shuffled(jobs, seed + 1), self._size(side))

    def _alone(self, side: Side, jobs: Sequence[Job]) -> None:
        """One after another; what a server says of drafts is read with each answer, or from its metrics around it."""
        runs = self.record.runs.setdefault((side.name, "alone"), [])
        before, misses = (side.metrics() if isinstance(side, Server) else None), 0

        def keep(run: Run) -> None:
            nonlocal before, misses
            runs.append(run)
            found = None if run.answer is None else run.answer.drafts
            if isinstance(side, Server) and misses < 2:  # of one that has no metrics, or hides them behind a timeout
                after, counted = side.metrics(), None
                if before is not None and after is not None:
                    counted = side.engine.acceptance(before, after)
                misses = misses + 1 if after is None else 0
                before = after
                if counted is not None and (found is None or not found.is_exact):
                    found = counted
            if found is not None:
                self._drafts.setdefault(side.name, []).append(found)

        perform(side, jobs, 1, self.progress, f"{side.name}: one by one", keep)

    def _ask(self, side: Side, manner: str, jobs: Sequence[Job], at_a_time: int) -> list[Run]:
        runs = self.record.runs.setdefault((side.name, manner), [])
        stage = {"alone": "one by one", "together": f"{at_a_time} at a time"}.get(manner, manner)
        return perform(side, jobs, at_a_time, self.progress, f"{side.name}: {stage}", runs.append)

    def _seeds(self, temperature: float) -> None:
        plan = self.plan
        for side in self.servers:
            prompts = list(enumerate(plan.prompts[:_SEED_PROMPTS]))
            seeds = [plan.seed, plan.seed, plan.seed + 1]
            jobs = [
                Job(index, prompt, Ask(min(_SEED_TOKENS, plan.max_tokens), temperature, seed))
                for seed in seeds
                for index, prompt in prompts
            ]
            runs = perform(side, jobs, 1, self.progress, f"{side.name}: seeds", _ignore)
            self._failed(side, runs)
            if "seed" in side.refused:  # as its remark says
                continue
            first, again, other = (
                [run.answer.text if run.answer else None for run in runs[at * len(prompts) :][: len(prompts)]]
                for at in range(3)
            )
            twice, changed = (
                [a == b for a, b in zip(first, second, strict=True) if a is not None and b is not None]
                for second in (again, other)
            )
            if not all(twice):
                text = f"the same seed gave another answer to {twice.count(False)} of {len(twice)} prompts"
                self.record.faults.append(Fault(side.name, text, is_unstable=True))
            elif changed and all(changed):
                text = "another seed changed no sampled answer; the temperature or the seed may be ignored"
                self.record.remarks.append(f"{side.name}: {text}")

    def _sampling(self, temperature: float) -> None:
        plan, record, drawn = self.plan, self.record, dict[str, list[list[Answer]]]()
        prompts = list(enumerate(plan.prompts[:_SAMPLED_PROMPTS]))
        for number, side in enumerate(self.sides):
            # Other seeds for each prompt and side: engines may draw the same numbers for one seed, and the tests take
            # all samples for independent.
            size, begin = min(sampling.TOKENS, plan.max_tokens), plan.seed + number * len(prompts) * plan.samples
            jobs = [
                Job(index, prompt, Ask(size, temperature, begin + index * plan.samples + one))
                for index, prompt in prompts
                for one in range(plan.samples)
            ]
            if isinstance(side, Local):
                runs = side.draw(jobs, self.progress)
            else:
                runs = perform(side, jobs, plan.concurrency, self.progress, f"{side.name}: samples", _ignore)
            drawn[side.name] = [
                [run.answer for run in runs if run.answer is not None and run.job.prompt == index]
                for index, _ in prompts
            ]
            self._failed(side, runs)
        first, locals_ = self.sides[0].name, [side for side in self.sides if isinstance(side, Local)]
        tests = len(self.sides) - 1 + len(self.servers) + len(locals_)
        for side in self.sides[1:]:
            pairs = list(zip(drawn[first], drawn[side.name], strict=True))
            record.tests.append(sampling.two_sided(f"{first} and {side.name}", pairs, tests))
        for side in locals_ if temperature == 1.0 else []:
            asked = zip(drawn[first], drawn[side.name], prompts, strict=True)
            pairs = [(ours, side.answer(prompt, Ask(1, 0.0)).tokens[0].top) for ours, own, (_, prompt) in asked if own]
            record.tests.append(sampling.exact(f"first tokens of {first} against the law of {side.name}", pairs, tests))
        for side in self.servers:
            name = f"{side.name}, against its own log-probabilities"
            test = sampling.by_rank(name, [one for answers in drawn[side.name] for one in answers], tests)
            if test is not None and temperature == 1.0:
                record.tests.append(test)
            elif test is not None:
                record.remarks.append(f"{name}: not tested, since the temperature is not 1")

    def _size(self, side: Side) -> int:
        """How many greedy answers a side gives together."""
        return min(together(side, self.plan.concurrency), len(self.plan.prompts))

    def _failed(self, side: Side, runs: Sequence[Run]) -> None:
        if failed := [run for run in runs if run.answer is None]:
            told = f"{len(failed)} of {len(runs)} sampled answers failed: {failed[0].error}"
            self.record.faults.append(Fault(side.name, told))

    def _speed(self) -> None:
        plan = self.plan
        jobs = [Job(i, prompt, Ask(plan.max_tokens, 0.0, plan.seed), True) for i, prompt in enumerate(plan.prompts)]
        total, done = len(jobs) * plan.timings * len(self.servers), 0
        misses = {side.name: Misses() for side in self.servers}
        for turn in range(plan.timings):
            for job in jobs:
                order = self.servers if turn % 2 == 0 else self.servers[::-1]
                for side in order:
                    runs = self.record.runs.setdefault((side.name, "streamed"), [])
                    perform(side, [job], 1, silent, "", runs.append, misses[side.name])
                    done += 1
                    self.progress("speed, in turns", done, total)

    # Conclusions

    def _conclude(self) -> None:
        record, first = self.record, self.sides[0]
        record.comparisons = []
        for side in self.sides:
            for manner in ("again", "other order", "together", "streamed"):
                name = f"{side.name}, {manner}"
                self._compare(name, (side, "alone"), (side, manner), True)
        for side in self.sides[1:]:
            self._compare(f"{first.name} against {side.name}", (first, "alone"), (side, "alone"), False)
        for side in self.servers:
            if self.plan.is_greedy and side.most < self.plan.concurrency:
                told = f"takes {side.most} requests at a time, so not {self.plan.concurrency} were asked together"
                record.remarks.append(f"{side.name} {told}")
            self._self_contradictions(side)
            record.remarks += [f"{side.name}: {remark}" for remark in side.engine.remarks]
            if side.refused:
                told = ", ".join(f"{name} ({said})" for name, said in side.refused.items())
                record.remarks.append(f"{side.name} refuses {told}")
        record.speeds = [*filter(None, map(self._speed_of, self.servers))]
        record.drafts = [*filter(None, map(self._drafts_of, self.servers))]
        if self.plan.card is not None:
            self._compare_card(self.plan.card)

    def _compare(self, name: str, first: tuple[Side, str], second: tuple[Side, str], is_own: bool) -> None:
        runs = self.record.runs
        base = {run.job.prompt: run for run in runs.get((first[0].name, first[1]), [])}
        others = runs.get((second[0].name, second[1]), [])
        cases = list[Case]()
        for prompt in sorted({run.job.prompt for run in others} & {*base}):
            found = [self._judge(base[prompt], run, second[0], is_own) for run in others if run.job.prompt == prompt]
            worst = max(found, key=lambda judgement: _ORDER.index(judgement.verdict))
            drifts = [_drift(base[prompt], run) for run in others if run.job.prompt == prompt]
            known = [one for one in drifts if one is not None]
            counts = Counter(judgement.verdict for judgement in found)
            cases.append(Case(prompt, counts, worst, max(known, default=None)))
        if cases:
            names = f"{first[0].name}, {first[1]}", f"{second[0].name}, {second[1]}"
            self.record.comparisons.append(Comparison(name, *names, is_own, tuple(cases)))

    def _judge(self, first: Run, second: Run, side: Side, is_own: bool) -> Judgement:
        if first.answer is None or second.answer is None:
            return Judgement(Verdict.FAILED, first.error or second.error)
        judgement = compare(first.answer, second.answer, self.record.tolerance, is_own or self._is_one_engine)
        if isinstance(side, Local) and self.plan.tolerance is None and judgement.difference is not None:
            return side.judge(first.job.text, first.job.ask, first.answer, second.answer, judgement)
        if judgement.is_open:
            found = {name: run for (name, manner), runs in self.record.runs.items() if manner == "alone" for run in runs
                     if run.job.prompt == first.job.prompt}  # fmt: skip
            others = {name: run.answer for name, run in found.items() if run.answer is not None}
            return witnessed(judgement, first.answer, second.answer, others, self.record.tolerance)
        return judgement

    def _self_contradictions(self, side: Server) -> None:
        seen, longest = Counter[str](), self._longest(side)
        for (name, _), runs in self.record.runs.items():
            for run in runs if name == side.name else ():
                if run.answer is not None:
                    ask = run.job.ask
                    is_greedy = ask.temperature == 0
                    seen.update(faults(run.answer, ask.max_tokens, is_greedy, self.record.tolerance, longest))
        for text, count in seen.items():
            self.record.faults.append(Fault(side.name, f"{text} ({count} answers)"))
        runs = [run for (name, _), found in self.record.runs.items() if name == side.name for run in found]
        answers = [run.answer for run in runs if run.answer is not None]
        if answers and not any(answer.text for answer in answers):
            self.record.faults.append(Fault(side.name, "every answer is empty"))
        if answers and not any(answer.tokens for answer in answers):
            told = "lists no log-probabilities, so it says of no difference whether it was close"
            self.record.remarks.append(f"{side.name} {told}")

    def _longest(self, side: Server) -> int | None:
        """The most tokens of a prompt and its answer that a server had, whoever asked."""
        same = {one.name for one in self.servers if one.client.url == side.client.url}
        runs = (run for (name, _), found in self.record.runs.items() if name in same for run in found)
        answers = [run.answer for run in runs if run.answer is not None]
        counts = [(one.prompt_tokens, one.completion_tokens) for one in answers]
        return max((sum(filter(None, both)) for both in counts if None not in both), default=None)

    def _timed(self, side: Side) -> dict[int, tuple[float, float]]:
        """Of each prompt the tokens and seconds of its streamed answers."""
        sums = dict[int, tuple[float, float]]()
        for run in self.record.runs.get((side.name, "streamed"), []):
            if run.answer is not None and run.answer.num_tokens:
                tokens, seconds = sums.get(run.job.prompt, (0.0, 0.0))
                sums[run.job.prompt] = tokens + run.answer.num_tokens, seconds + run.answer.seconds
        return sums

    def _speed_of(self, side: Server) -> Speed | None:
        times, base = self._timed(side), self._timed(self.sides[0])
        if not times:
            return None
        firsts = [run.answer.first_s for run in self.record.runs[side.name, "streamed"] if run.answer is not None]
        known = sorted(first for first in firsts if first is not None)
        both = sorted({*times} & {*base})
        ratio = None
        if side is not self.sides[0] and both:
            ratio = interval([base[at] for at in both], [times[at] for at in both], self.plan.seed)
        own = interval([(1, 1)] * len(times), list(times.values()), self.plan.seed)
        return Speed(side.name, own, median_interval(known), ratio)

    def _drafts_of(self, side: Server) -> Drafts | None:
        """What was drafted in the answers that were asked for one by one."""
        found = [one for one in self._drafts.get(side.name, []) if one.passes]
        if not found:
            return None
        drafted = [one.drafted for one in found if one.drafted is not None]
        rows = [(one.accepted + one.passes, one.passes) for one in found]
        return Drafts(
            side.name,
            sum(drafted) if drafted else None,
            sum(one.accepted for one in found),
            sum(one.passes for one in found),
            interval([(1, 1)] * len(rows), rows, self.plan.seed),
            is_exact=all(one.is_exact for one in found),
        )

    def _compare_card(self, card: float) -> None:
        """With the first server that drafts; TGI counts passes without a draft too, so one that accepts comes first."""
        drafts = self.record.drafts
        if not self.plan.is_greedy:
            told = "it is compared in greedy answers, which were not asked"
        elif not drafts:
            told = "the server has no metrics of drafts that are known here"
        else:
            at = next((at for at, one in enumerate(drafts) if one.drafted or one.accepted), 0)
            if drafts[at].is_exact:
                drafts[at] = drafts[at]._replace(card=card)
                return
            told = f"answers of {drafts[at].name} count passes without a draft too; start it with --metrics"
        self.record.remarks.append(f"the card was not compared: {told}")


def _ignore(run: Run) -> None:
    pass


def _words(prompt: Prompt) -> str:
    """A prompt as text, for reports."""
    if isinstance(prompt, str):
        return prompt
    said: list[Any] = [message.get("content") for message in prompt]
    return "\n".join(one if isinstance(one, str) else "[parts]" for one in said)


def _drift(first: Run, second: Run) -> float | None:
    return None if first.answer is None or second.answer is None else drift(first.answer, second.answer)
