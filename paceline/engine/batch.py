"""Requests of one caller: all answered together, or one as a stream."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

from tqdm.auto import tqdm

from ..core.request import RequestOutputKind
from .loop import SpeculativeDecoder
from .output import StreamChunk
from .request import Request, drop_waiting_pixels
from .scheduler import run
from .stats import EngineStats


def answer_all(
    decoder: SpeculativeDecoder,
    openings: Sequence[Callable[[], Request]],
    stats: EngineStats,
    num_answers: int,
    use_tqdm: bool = False,
    return_exceptions: bool = False,
) -> list[Any]:
    """The outputs of requests, in their order. All are opened before the first is answered.

    num_answers: of all of them, for the progress bar. return_exceptions: see `LLM.generate`.
    """
    try:
        opened = _opened(decoder, openings, return_exceptions)
        requests = list(drop_waiting_pixels(opened, decoder.runner.num_slots))
        with (
            decoder.runner.fair_lock(),
            tqdm(total=num_answers, desc="Processed prompts", disable=not use_tqdm) as bar,
            closing(run(decoder, requests, stats, return_exceptions=return_exceptions)) as steps,
        ):
            for step in steps:
                bar.update(sum(answer.seq.is_finished for answers in step.updated.values() for answer in answers))
            return [request.result(return_exceptions) for request in requests]
    except Exception as error:
        if len(openings) > 1:
            error.add_note("To get the other answers: return_exceptions=True.")
        raise


def _opened(
    decoder: SpeculativeDecoder, openings: Sequence[Callable[[], Request]], return_exceptions: bool
) -> Iterator[Request]:
    for opening in openings:
        try:
            yield opening()
        except Exception as error:
            if not return_exceptions:
                raise
            yield Request(decoder, error=error)


def stream(decoder: SpeculativeDecoder, request: Request, stats: EngineStats) -> Iterator[StreamChunk]:
    """The chunks of a request of one answer, see `LLM.stream`."""
    (answer,), whole = request.answers, None
    kind, steps = answer.seq.params.output_kind, run(decoder, [request], stats)
    try:
        while whole is None or whole.finish_reason is None:
            with decoder.runner.fair_lock():
                next(steps)
                part = answer.part()
                completion = answer.completion() if request.is_finished else None
            whole = part if whole is None or kind is RequestOutputKind.DELTA else whole.joined(part)
            if kind is not RequestOutputKind.FINAL_ONLY or completion is not None:
                yield StreamChunk(whole.text, whole.token_ids, whole.origins, whole.finish_reason, completion)
    finally:
        with decoder.runner.fair_lock():
            steps.close()
