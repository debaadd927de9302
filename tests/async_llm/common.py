"""Engines on tiny models, the answers that requests have alone, and schedules in which they come and go."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import TypeVar

from paceline import LLM, AsyncLLM, Fixed, RequestOutput, SamplingParams
from paceline.core.request import RequestOutputKind
from tests.helpers import all_free, talking

DELTA, CUMULATIVE, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
T = TypeVar("T")
TEXTS = ("abcabcabcab", "the cat and the cat", "x", "0123456789" * 12, "to be or not to be, to be or")


def tiny_llm(
    drafter=None, slots: int = 3, policy=None, chunk: int | None = None, name: str = "llama", **options
) -> LLM:
    """chunk: tokens that are read at once, so that tiny prompts have several chunks."""
    model = talking(name=name, max_position_embeddings=512)
    made = LLM(model, drafter=drafter, policy=policy or Fixed(3), max_num_seqs=slots, **options)
    made.runner.chunk = chunk or made.runner.chunk
    return made


@asynccontextmanager
async def engine_of(llm: LLM, **options):
    """An engine that must leave every slot free."""
    engine = AsyncLLM(llm, **options)
    try:
        yield engine
        await idle(engine)
        assert all_free(llm.runner), "a slot was not given back"
    finally:
        engine.shutdown()


def serve(llm: LLM, work: Callable[[AsyncLLM], Awaitable[T]], **options) -> T:
    """What `work` gives for such an engine."""

    async def main() -> T:
        async with engine_of(llm, **options) as engine:
            return await work(engine)

    return asyncio.run(main())


def held(llm: LLM) -> threading.Event:
    """Rounds wait until this is set."""
    may_go_on, step = threading.Event(), llm.decoder.step
    llm.decoder.step = lambda seqs: (may_go_on.wait(30), step(seqs))[1]
    return may_go_on


async def submitted(engine: AsyncLLM, number: int) -> None:
    """Wait until so many requests are with the engine's thread."""
    while sum(ticket.is_submitted for ticket in engine._thread.tickets.values()) < number:
        await asyncio.sleep(0.001)


async def idle(engine: AsyncLLM) -> None:
    """Wait until requests that were dropped are gone."""
    for _ in range(2000):
        if engine.num_running == engine.num_waiting == 0:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("requests are left over")


async def answer(engine: AsyncLLM, prompt, params: SamplingParams, request_id: str | None = None) -> RequestOutput:
    """The whole answer, joined of what comes."""
    whole = None
    async with aclosing(engine.generate(prompt, params, request_id)) as outputs:
        async for output in outputs:
            joins = whole is not None and params.output_kind is DELTA
            whole = whole.joined(output) if joins else output
    assert whole is not None
    assert whole.finished
    return whole


def facts(output: RequestOutput) -> list[tuple]:
    """What the user sees of the answers."""
    return [(one.text, one.token_ids, one.finish_reason, one.stop_reason, one.logprobs) for one in output.outputs]


@dataclass(frozen=True)
class Ask:
    """A request of a schedule: when it comes, and after how many outputs its reader leaves (None: never)."""

    prompt: object
    params: SamplingParams
    delay_s: float
    leaves_after: int | None = None


def schedule(seed: int, count: int, prompts=TEXTS, leaving: float = 0.2, seconds: float = 0.05) -> list[Ask]:
    """Random requests at random times: greedy and sampled, one answer or two, stop strings, readers that leave."""
    rng = Random(seed)
    made = []
    for _ in range(count):
        temperature = rng.choice((0.0, 1.0))
        params = SamplingParams(
            temperature=temperature,
            seed=rng.randrange(1000),
            n=rng.choice((1, 2)) if temperature else 1,
            max_tokens=rng.choice((1, 5, 24)),
            stop=rng.choice(((), ("a",), ("bc", "e"))),
            ignore_eos=rng.random() < 0.5,
            logprobs=rng.choice((None, None, 2)),
            include_stop_str_in_output=rng.random() < 0.3,
            output_kind=rng.choice((DELTA, CUMULATIVE, FINAL_ONLY)),
        )
        leaves = rng.randrange(4) if rng.random() < leaving else None
        made.append(Ask(rng.choice(prompts), params, rng.random() * seconds, leaves))
    return made


async def run(engine: AsyncLLM, asks: list[Ask]) -> list[RequestOutput | None]:
    """The answers of a schedule; None for readers that left."""

    async def one(ask: Ask) -> RequestOutput | None:
        await asyncio.sleep(ask.delay_s)
        if ask.leaves_after is None:
            return await answer(engine, ask.prompt, ask.params)
        params = replace(ask.params, output_kind=DELTA)
        async with aclosing(engine.generate(ask.prompt, params)) as outputs:
            for _ in range(ask.leaves_after):
                if await anext(outputs, None) is None:
                    break
        return None

    return await asyncio.gather(*(one(ask) for ask in asks))


def wrong(llm: LLM, asks: list[Ask], got: list[RequestOutput | None]) -> list[int]:
    """The requests that were not answered as they are alone, by plain decoding that reads every prompt."""
    plain, prefixes = llm.plain(), llm.runner.prefixes
    most = prefixes.max_bytes
    prefixes.resize(0)
    found = [
        place
        for place, (ask, output) in enumerate(zip(asks, got, strict=True))
        if output is not None and facts(output) != facts(plain.generate([ask.prompt], ask.params)[0])
    ]
    prefixes.resize(most)
    return found
