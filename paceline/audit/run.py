"""Asks requests of a side: one after another, in another order, or several at a time."""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from ..measure.prompts import Prompt
from ..system.files import Progress
from .answers import Answer, Ask, Side
from .client import NoAnswer, Unreachable

MANY = 5
"""So many failures in a row end an audit."""


class Job(NamedTuple):
    """One request. prompt: its place among the prompts."""

    prompt: int
    text: Prompt
    ask: Ask
    streamed: bool = False


class Run(NamedTuple):
    """What became of a job: an answer, or why there is none."""

    job: Job
    answer: Answer | None
    error: str = ""


class Misses:
    """Failures of a side in a row."""

    def __init__(self):
        self.count = 0

    def count_in(self, side: Side, run: Run) -> None:
        """Raises `Unreachable` at too many."""
        self.count = 0 if run.answer is not None else self.count + 1
        if self.count >= MANY:
            raise Unreachable(f"{side.name}: {self.count} requests in a row have no answer", got=run.error)


def perform(
    side: Side,
    jobs: Sequence[Job],
    at_a_time: int,
    progress: Progress,
    stage: str,
    keep: Callable[[Run], None],
    misses: Misses | None = None,
) -> list[Run]:
    """Run jobs, in their order; up to `at_a_time` together. keep: gets each as soon as it ends.

    misses: of the jobs before. Raises `Unreachable` where the server is gone.
    """
    workers = together(side, at_a_time)
    done, misses = dict[int, Run](), misses or Misses()
    progress(stage, 0, len(jobs))
    with ThreadPoolExecutor(workers, thread_name_prefix="audit") as pool:
        waiting, left = dict[Future[Run], int](), list(enumerate(jobs))[::-1]
        try:
            while left or waiting:
                while left and len(waiting) < workers:
                    index, job = left.pop()
                    waiting[pool.submit(run_of, side, job)] = index
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    run = done[waiting.pop(future)] = future.result()
                    keep(run)
                    misses.count_in(side, run)
                    progress(stage, len(done), len(jobs))
        except BaseException:
            side.stop()
            raise
    return [done[index] for index in range(len(jobs))]


def together(side: Side, at_a_time: int) -> int:
    """How many requests a side gets at a time."""
    return max(1, min(at_a_time, side.most))


def shuffled(jobs: Sequence[Job], seed: int) -> list[Job]:
    """The same jobs in another order, always the same one for a seed."""
    order = list(jobs)
    random.Random(seed).shuffle(order)
    return order


def run_of(side: Side, job: Job) -> Run:
    """Run one job."""
    try:
        return Run(job, side.answer(job.text, job.ask, job.streamed))
    except NoAnswer as error:
        return Run(job, None, str(error))
