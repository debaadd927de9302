"""The prompts that are measured, and how long that takes."""

from typing import TYPE_CHECKING

from rich.markup import escape

from ..errors import ConfigError
from .screen import Screen, duration

if TYPE_CHECKING:
    from ..llm import LLM
    from ..measure.run import BenchOptions
    from ..measure.suites import Question


def announce(task: str, tokens: float, llm: "LLM", screen: Screen, more_s: float = 0.0) -> None:
    """Say what is decoded next, and how long that takes if nothing is accepted.

    tokens: of all answers, those that are decoded together counted once. more_s: seconds of what follows.
    """
    if not screen.json:
        took = duration(more_s + tokens * llm.runner.pass_seconds(1))
        screen.say(escape(f"{task}. This takes up to about {took}."))


def announce_run(
    questions: "list[Question]", drafters: list[str], how: "BenchOptions", llm: "LLM", screen: Screen
) -> None:
    """As `announce`, of plain decoding and drafters that answer the same questions in turns."""
    task = f"{len(questions)} prompts, each answered plainly and with {', '.join(drafters)}"
    answers = sum(len(question.turns) for question in questions) * how.repeat * (1 + len(drafters)) / how.batch
    announce(f"{task}, up to {how.max_tokens} tokens", answers * how.max_tokens, llm, screen)


def choose_prompts(
    questions: "list[Question]", number: int | None, llm: "LLM", screen: Screen
) -> "tuple[list[Question], int]":
    """The prompts to measure, and how many do not fit the context. Raises `ConfigError` where none fits."""
    from ..measure.run import fitting
    from ..measure.suites import choose

    kept, left_out = fitting(llm, questions)
    chosen = choose(kept, number)
    remark_raw(sum(prompt.chat is None for prompt in chosen), llm, screen)
    if not chosen:
        got = f"{left_out} prompts of {llm.runner.max_length} tokens or more"
        raise ConfigError("no prompt fits the context", got=got, fix="raise --max-model-len if the model allows it")
    return chosen, left_out


def remark_raw(count: int, llm: "LLM", screen: Screen) -> None:
    """Warn that this many prompts are raw text to continue, where the model has a chat template."""
    from ..target.prompts import has_chat_template

    if count and has_chat_template(llm.loaded):
        text = 'A "prompt" or a plain line is text to continue; name it "question" to ask it in a chat.'
        screen.warn(f"Prompts without the model's chat template: {count}.", text)
