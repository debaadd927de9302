"""A benchmark run: every side answers the same prompts in turns, so that a slower machine slows all of them.

The order of the sides is reversed with every prompt of a category, so that a steady drift cancels. `paceline bench` and
`paceline tune` measure with it; `bench/peers` adds other systems as sides.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from pydantic import Field

from ..core.request import SamplingParams
from ..core.round import Round
from ..errors import CacheFull, PacelineError
from ..llm import LLM
from ..schema import checked
from ..system.files import Progress, silent
from ..target.prompts import has_chat_template
from . import machine
from .check import judge
from .reference import Decoded
from .results import PLAIN
from .suites import Question

_WARM_UP = 32
"""Tokens: the first passes are slower, since they allocate memory, load kernels and measure."""


@checked
class BenchOptions:
    """How to decode, the same for all sides. batch: prompts decoded together. repeat: how often all prompts are run."""

    max_tokens: Annotated[int, Field(ge=1)] = 128
    temperature: Annotated[float, Field(ge=0)] = 0.0
    seed: Annotated[int, Field(ge=0)] = 0
    batch: Annotated[int, Field(ge=1)] = 1
    repeat: Annotated[int, Field(ge=1)] = 1


@dataclass(frozen=True)
class Ask:
    """One turn of one prompt, the same for every side.

    index: of the prompt in the run, the unit of every interval. repeat, turn: from 0. seed: of a sampled answer.
    messages: the whole conversation up to this turn.
    """

    index: int
    repeat: int
    turn: int
    question: Question
    messages: list[dict[str, object]]
    token_ids: list[int]
    seed: int

    @property
    def prompt(self) -> list[int] | list[dict[str, object]]:
        """The prompt for Paceline's engines: token ids, or the chat with its image."""
        return self.token_ids if self.question.image is None else self.messages

    def params(self, options: BenchOptions) -> SamplingParams:
        return SamplingParams(options.temperature, max_tokens=options.max_tokens, seed=self.seed)


@dataclass(frozen=True)
class TimedAnswer:
    """One side's answer to one `Ask`.

    num_tokens: tokens after the prefill pass, which gives the first and may give more. seconds: of decoding, after that
    pass; the time of a round is divided among the requests of its batch. prefill_s: of reading the prompt. passes: of
    the model, likewise divided; None where a peer does not count them. token_ids: None where a peer gives only text.
    verdict, reason: of the comparison with the plain answer.
    """

    ask: Ask
    side: str
    token_ids: list[int] | None
    num_tokens: int
    text: str
    seconds: float
    prefill_s: float
    passes: float | None
    finish_reason: str | None = None
    no_draft_reason: str | None = None
    verdict: str | None = None
    reason: str | None = None
    origins: list[str] = field(default_factory=list[str])
    sources: list[str] = field(default_factory=list[str])
    rounds: list[Round] = field(default_factory=list[Round])

    @property
    def length(self) -> int:
        """Tokens of the whole answer; a peer's prefill gives one."""
        return self.num_tokens + 1 if self.token_ids is None else len(self.token_ids)

    def as_dict(self) -> dict[str, Any]:
        ask, question = self.ask, self.ask.question
        asked = {key: getattr(question, key) for key in ("id", "category", "topic")}
        asked |= {key: getattr(ask, key) for key in ("turn", "repeat", "seed")}
        asked |= {"prompt": question.turns[ask.turn], "num_prompt_tokens": len(ask.token_ids)}
        own = {key: value for key, value in vars(self).items() if key != "ask"}
        return {"index": ask.index, **asked, **own, "rounds": [asdict(r) for r in self.rounds]}


class Side(ABC):
    """An engine that takes turns with others. is_peer: another system, which may fail without ending the run."""

    is_peer = False

    def __init__(self, name: str):
        self.name = name

    @abstractmethod
    def answer(self, asks: Sequence[Ask], options: BenchOptions) -> list[TimedAnswer]:
        """Answer a batch; Paceline's engines decode as many together as they have slots."""

    def judge(self, plain: TimedAnswer, answer: TimedAnswer, options: BenchOptions) -> TimedAnswer:
        """`answer` with its verdict against the plain answer."""
        return answer


class EngineSide(Side):
    """An engine of Paceline. Its speed is emitted tokens over the seconds of its loop."""

    def __init__(self, name: str, llm: LLM):
        super().__init__(name)
        self.llm = llm

    def answer(self, asks: Sequence[Ask], options: BenchOptions) -> list[TimedAnswer]:
        results = self.llm.generate([ask.prompt for ask in asks], [ask.params(options) for ask in asks])
        answers = []
        for ask, result in zip(asks, results, strict=True):
            completion = result.outputs[0]
            answers.append(
                TimedAnswer(
                    ask,
                    self.name,
                    completion.token_ids,
                    completion.num_decoded,
                    completion.text,
                    seconds=sum(r.seconds / r.batch for r in completion.rounds),
                    prefill_s=result.metrics.prefill,
                    passes=sum(1 / r.batch for r in completion.decoding),
                    finish_reason=completion.finish_reason,
                    no_draft_reason=completion.no_draft_reason,
                    origins=[origin.value for origin in completion.origins],
                    sources=completion.sources,
                    rounds=completion.rounds,
                )
            )
        return answers

    def judge(self, plain: TimedAnswer, answer: TimedAnswer, options: BenchOptions) -> TimedAnswer:
        """`answer` with its verdict; none where the verifier guarantees the distribution and not the tokens."""
        if not (self.llm.verifier.exact or options.temperature == 0):
            return answer
        assert plain.token_ids is not None
        assert answer.token_ids is not None
        sides = Decoded(plain.token_ids, plain.finish_reason), Decoded(answer.token_ids, answer.finish_reason)
        judgement = judge(self.llm, answer.ask.prompt, answer.ask.params(options), answer.ask.seed, *sides)
        return replace(answer, verdict=judgement.verdict.value, reason=judgement.reason)


OPEN_PEERS = ContextVar[Callable[..., AbstractContextManager[Any]] | None]("open_peers", default=None)
"""Opens the other systems of a `paceline bench`: called with (configs, llm, model, screen, missing), it returns their
sides and versions, and fills `missing` with the reasons of those that cannot start. `bench/peers` sets it."""


@dataclass
class BenchRun:
    """Sides that answer the same prompts, and their measurements so far.

    keep: called with the answers of each turn once they are measured. complete: False where the run was interrupted.
    failed: the reasons of failed peers, by side. too_long: turns that did not fit the context, left out on all sides.
    bandwidths: of reading memory, in bytes per second, measured three times since it drifts.
    """

    plain: EngineSide
    others: Sequence[Side]
    options: BenchOptions
    keep: Callable[[Sequence[TimedAnswer]], None] = lambda answers: None
    answers: list[TimedAnswer] = field(default_factory=list[TimedAnswer])
    failed: dict[str, str] = field(default_factory=dict[str, str])
    too_long: int = 0
    bandwidths: list[float] = field(default_factory=list[float])
    complete: bool = False

    @property
    def sides(self) -> list[Side]:
        """The sides that have not failed, plain first."""
        return [self.plain, *(side for side in self.others if side.name not in self.failed)]

    def measure(self, questions: Sequence[Question], progress: Progress = silent) -> None:
        """Let all sides answer; measurements are kept even if this raises."""
        size, repeats, device = self.options.batch, self.options.repeat, self.plain.llm.loaded.device
        groups = [questions[i : i + size] for i in range(0, len(questions), size)]
        total, done = sum(max(len(question.turns) for question in group) for group in groups) * repeats, 0
        progress("warming up", 0, len(self.sides))
        asks = [self._ask_of(question, place, 0, []) for place, question in enumerate(groups[0])]
        short = replace(self.options, max_tokens=min(_WARM_UP, self.options.max_tokens))
        for count, side in enumerate(self.sides, start=1):
            self._answers(side, [ask for ask in asks if ask is not None], short)
            progress("warming up", count, len(self.sides))
        self.bandwidths.append(machine.read_bandwidth(device))
        for repeat in range(repeats):
            for number, is_flipped in enumerate(flips(groups, repeat)):
                if 2 * done >= total and len(self.bandwidths) == 1:
                    self.bandwidths.append(machine.read_bandwidth(device))
                for _ in self._turns(groups[number], number * size, repeat, is_flipped):
                    done += 1
                    progress("measuring", done, total)
        self.complete = True
        self.bandwidths.append(machine.read_bandwidth(device))

    # Helpers

    def _turns(self, group: Sequence[Question], first: int, repeat: int, is_flipped: bool) -> Iterator[None]:
        """Play the conversations of a group, a turn of all sides at a time; yields after each turn."""
        said = {index: list[str]() for index in range(first, first + len(group))}
        for turn in range(max(len(question.turns) for question in group)):
            asks = list[Ask]()
            for index, question in enumerate(group, start=first):
                if index not in said or turn >= len(question.turns):
                    continue
                if ask := self._ask_of(question, index, repeat, said[index]):
                    asks.append(ask)
                else:
                    self.too_long += len(question.turns) - turn if repeat == 0 else 0
                    del said[index]
            if asks:
                sides = self.sides
                answers = {s.name: self._answers(s, asks, self.options) for s in (sides[::-1] if is_flipped else sides)}
                for place, plain in enumerate(answers[PLAIN]):
                    # All sides continue from the plain answer: after different texts speeds could not be compared.
                    said[plain.ask.index].append(plain.text)
                    pairs = [(side, answers[side.name][place]) for side in sides if answers[side.name]]
                    judged = [
                        answer if side is self.plain else side.judge(plain, answer, self.options)
                        for side, answer in pairs
                    ]
                    self.answers += judged
                    self.keep(judged)
            yield

    def _answers(self, side: Side, asks: Sequence[Ask], options: BenchOptions) -> list[TimedAnswer]:
        """The answers of a side. A peer that fails is recorded, not called again, and has none."""
        try:
            return side.answer(asks, options)
        except (PacelineError, OSError) as error:
            if not side.is_peer:
                raise
            self.failed[side.name] = str(error)
            return []

    def _ask_of(self, question: Question, index: int, repeat: int, answers: Sequence[str]) -> Ask | None:
        """The turn after these answers, the same for every side; None where it does not fit the context."""
        ids, turn = _encode(self.plain.llm, question, answers), len(answers)
        seed = self.options.seed + index + 100_003 * (repeat + 1009 * turn)  # other samples for each turn and repeat
        return None if ids is None else Ask(index, repeat, turn, question, question.messages(answers), ids, seed)


def fitting(llm: LLM, questions: Sequence[Question]) -> tuple[list[Question], int]:
    """The questions whose first turn fits the context, and how many do not."""
    kept = [question for question in questions if _encode(llm, question, []) is not None]
    return kept, len(questions) - len(kept)


def flips(groups: Sequence[Sequence[Question]], repeat: int = 0) -> list[bool]:
    """For each group whether the sides go in reverse order: every other time for each category, and each repeat."""
    seen: dict[tuple[str, ...], int] = {}
    for_each = []
    for group in groups:
        key = tuple(question.category for question in group)
        # Neighbouring categories start on different sides, so that one prompt of each is balanced as well.
        seen[key] = seen.get(key, len(seen) - 1) + 1
        for_each.append((seen[key] + repeat) % 2 == 1)
    return for_each


def _encode(llm: LLM, question: Question, answers: Sequence[str]) -> list[int] | None:
    messages = question.messages(answers)
    is_bare = question.image is None and (question.chat is None or not has_chat_template(llm.loaded))
    try:
        return llm.encode("\n\n".join(str(message["content"]) for message in messages) if is_bare else messages)
    except CacheFull:
        return None
