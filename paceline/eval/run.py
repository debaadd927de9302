"""The run: every side answers the same prompts in turns, so that a machine that slows down slows all of them.

    prompt of a category    1st              2nd              3rd
    order of the sides      plain, lookup    lookup, plain    plain, lookup

Two such prompts make ABBA, in which a steady drift of the machine cancels.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from ..errors import CacheFull, PacelineError
from ..hf.prompts import has_chat_template
from ..llm import LLM
from .answers import Answer, Ask
from .floor import Floor
from .sides import PLAIN, BenchOptions, EngineSide, PeerSide, Side
from .suites import Question

Progress = Callable[[str, int, int], None]
_WARM_UP = 32
"""Tokens: the first passes pay for memory, kernels and measurements that later ones have."""


@dataclass
class BenchRun:
    """What was measured so far.

    keep: is given the answers of each turn once they are measured. complete: False where the run was interrupted.
    failed: peers that gave up, by side, with their reason. too_long: turns that did not fit the context and were left
    out on all sides.
    """

    floor: Floor
    keep: Callable[[Seq[Answer]], None] = lambda answers: None
    answers: list[Answer] = field(default_factory=list[Answer])
    failed: dict[str, str] = field(default_factory=dict[str, str])
    too_long: int = 0
    complete: bool = False


def fitting(llm: LLM, questions: Seq[Question]) -> tuple[list[Question], int]:
    """The questions whose first turn fits the context, and how many do not."""
    kept = [question for question in questions if _encode(llm, question, []) is not None]
    return kept, len(questions) - len(kept)


def run_bench(
    run: BenchRun,
    plain: EngineSide,
    speculative: Seq[EngineSide],
    peers: Seq[PeerSide],
    questions: Seq[Question],
    options: BenchOptions,
    progress: Progress = lambda what, done, total: None,
) -> None:
    """Measure all sides into `run`, which holds what was measured also where this raises."""
    sides: list[Side] = [plain, *speculative, *peers]
    groups = [questions[i : i + options.batch] for i in range(0, len(questions), options.batch)]
    turns = [max(len(question.turns) for question in group) for group in groups]
    total, done = sum(turns) * options.repeat, 0
    progress("warming up", 0, len(sides))
    for count, side in enumerate(list(sides), start=1):
        _warm_up(run, plain.llm, sides, side, groups[0], options)
        progress("warming up", count, len(sides))
    run.floor.measure(plain.llm.loaded)
    for repeat in range(options.repeat):
        for number, is_flipped in enumerate(flips(groups, repeat)):
            if 2 * done >= total and len(run.floor.samples) == 1:
                run.floor.measure(plain.llm.loaded)
            for _ in _turns(run, plain, sides, groups[number], number * options.batch, repeat, options, is_flipped):
                done += 1
                progress("measuring", done, total)
    run.complete = True
    run.floor.measure(plain.llm.loaded)


def flips(groups: Seq[Seq[Question]], repeat: int = 0) -> list[bool]:
    """For each group whether the sides go in reverse order: every other time for each category, and each repeat."""
    seen: dict[tuple[str, ...], int] = {}
    for_each = []
    for group in groups:
        key = tuple(question.category for question in group)
        # Neighbouring categories start on different sides, so that one prompt of each is balanced as well.
        seen[key] = seen.get(key, len(seen) - 1) + 1
        for_each.append((seen[key] + repeat) % 2 == 1)
    return for_each


def _turns(
    run: BenchRun,
    plain: EngineSide,
    sides: list[Side],
    group: Seq[Question],
    first: int,
    repeat: int,
    options: BenchOptions,
    is_flipped: bool,
) -> Iterator[None]:
    """Play the conversations of a group, a turn of all sides at a time; yields after each turn."""
    told: list[list[str] | None] = [[] for _ in group]  # None: the conversation has outgrown the context
    for turn in range(max(len(question.turns) for question in group)):
        asks = []
        for place, question in enumerate(group):
            so_far = told[place]
            if so_far is None or turn >= len(question.turns):
                continue
            ask = ask_of(plain.llm, question, first + place, repeat, turn, so_far, options)
            if ask is None:
                run.too_long += len(question.turns) - turn if repeat == 0 else 0
                told[place] = None
            else:
                asks.append(ask)
        if asks:
            found: dict[str, list[Answer]] = {}
            for side in reversed(sides) if is_flipped else list(sides):
                answers = _ask(run, sides, side, asks, options)
                if answers is not None:
                    found[side.name] = answers
            for place, answer in enumerate(found[PLAIN]):
                # Every side goes on from the plain answer: after different texts speeds could not be compared.
                conversation = told[asks[place].index - first]
                assert conversation is not None
                conversation.append(answer.text)
                judged = _judged(plain, sides, answer, {name: rows[place] for name, rows in found.items()}, options)
                run.answers += judged
                run.keep(judged)
        yield


def _judged(
    plain: EngineSide, sides: Seq[Side], answer: Answer, rows: dict[str, Answer], options: BenchOptions
) -> list[Answer]:
    """The answers of all sides to one ask, in the order of the sides, with their verdicts."""
    judged = []
    for side in sides:
        mine = rows.get(side.name)
        if mine is None:
            continue
        if isinstance(side, EngineSide) and side is not plain:
            mine = side.judge(answer, mine, options)
        elif isinstance(side, PeerSide):
            mine = side.judge(answer, mine, plain.llm.loaded.eos_ids)
        judged.append(mine)
    return judged


def ask_of(
    llm: LLM, question: Question, index: int, repeat: int, turn: int, answers: Seq[str], options: BenchOptions
) -> Ask | None:
    """A turn as every side gets it, None where it does not fit the context."""
    ids = _encode(llm, question, answers)
    if ids is None:
        return None
    seed = options.seed + index + 100_003 * (repeat + 1009 * turn)  # samples of their own
    messages = [] if _is_bare(llm, question) else question.messages(answers)
    text = question.turns[turn]
    return Ask(index, repeat, turn, question.id, question.category, question.topic, text, messages, ids, seed)


def _is_bare(llm: LLM, question: Question) -> bool:
    return question.image is None and (question.chat is None or not has_chat_template(llm.loaded))


def _encode(llm: LLM, question: Question, answers: Seq[str]) -> list[int] | None:
    messages = question.messages(answers)
    try:
        if _is_bare(llm, question):
            return llm.encode("\n\n".join(str(message["content"]) for message in messages))
        return llm.encode(messages)
    except CacheFull:
        return None


def _warm_up(
    run: BenchRun, llm: LLM, sides: list[Side], side: Side, group: Seq[Question], options: BenchOptions
) -> None:
    asks = [ask_of(llm, question, place, 0, 0, [], options) for place, question in enumerate(group)]
    known = [ask for ask in asks if ask is not None]
    _ask(run, sides, side, known, options, min(_WARM_UP, options.max_tokens))


def _ask(
    run: BenchRun,
    sides: list[Side],
    side: Side,
    asks: Seq[Ask],
    options: BenchOptions,
    max_tokens: int | None = None,
) -> list[Answer] | None:
    """What a side answers; a peer that fails is noted and asked no more."""
    try:
        return side.answer(asks, options, max_tokens)
    except (PacelineError, OSError) as error:
        if not isinstance(side, PeerSide):
            raise
        run.failed[side.name] = str(error)
        sides.remove(side)
        return None
