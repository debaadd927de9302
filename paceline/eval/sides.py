"""The sides that take turns: an engine of ours, plain or speculative, and a peer in one of its modes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, cast

from pydantic import Field

from ..core.request import SamplingParams
from ..errors import ConfigError
from ..llm import LLM
from ..schema import checked
from .answers import Answer, Ask
from .judge import judge
from .reference import Decoded

if TYPE_CHECKING:
    from .peers.base import Peer

PLAIN = "plain"


@checked
class BenchOptions:
    """How to decode: the same for all sides. batch: prompts decoded side by side. repeat: rounds over all prompts."""

    max_tokens: Annotated[int, Field(ge=1)] = 128
    temperature: Annotated[float, Field(ge=0)] = 0.0
    seed: Annotated[int, Field(ge=0)] = 0
    batch: Annotated[int, Field(ge=1)] = 1
    repeat: Annotated[int, Field(ge=1)] = 1

    def params(self, ask: Ask, max_tokens: int | None = None) -> SamplingParams:
        """What an engine is asked for."""
        return SamplingParams(self.temperature, max_tokens=max_tokens or self.max_tokens, seed=ask.seed)


class Side(ABC):
    """Answers what it is asked and tells what that took."""

    def __init__(self, name: str):
        self.name = name

    @abstractmethod
    def answer(self, asks: Seq[Ask], options: BenchOptions, max_tokens: int | None = None) -> list[Answer]:
        """Answer a batch; `max_tokens` overrules that of the options."""


class EngineSide(Side):
    """One of our engines; its speed is emitted tokens over the seconds of its loop, whichever drafter it has."""

    def __init__(self, name: str, llm: LLM):
        super().__init__(name)
        self.llm = llm

    def answer(self, asks: Seq[Ask], options: BenchOptions, max_tokens: int | None = None) -> list[Answer]:
        """Decode the asks side by side, as many as the engine has slots."""
        params = [options.params(ask, max_tokens) for ask in asks]
        results = self.llm.generate([ask.prompt for ask in asks], params)
        timings = results[0].timings
        shares = [sum(one.seconds / one.batch for one in result.rounds) for result in results]
        read = sum(len(ask.token_ids) for ask in asks)
        answers = []
        for ask, result, share in zip(asks, results, shares, strict=True):
            one = result.outputs[0]
            answers.append(
                Answer(
                    ask,
                    self.name,
                    one.token_ids,
                    one.num_decoded,
                    one.text,
                    # The loop's own count also holds what no round does: policies and drafters that learn from it.
                    seconds=timings.decode * share / max(sum(shares), 1e-12),
                    prefill_s=timings.prefill * len(ask.token_ids) / read,
                    passes=sum(1 / r.batch for r in one.decoding),
                    seed=one.seed,
                    finish_reason=one.finish_reason,
                    origins=[origin.value for origin in one.origins],
                    sources=one.sources,
                    rounds=one.rounds,
                )
            )
        return answers

    def judge(self, plain: Answer, mine: Answer, options: BenchOptions) -> Answer:
        """`mine` with its verdict against the plain answer; none where the rule promises the law and not the tokens."""
        if not (self.llm.verifier.exact or options.temperature == 0):
            return mine
        assert plain.token_ids is not None
        assert mine.token_ids is not None
        assert mine.seed is not None
        sides = Decoded(plain.token_ids, plain.finish_reason), Decoded(mine.token_ids, mine.finish_reason)
        found = judge(self.llm, mine.ask.prompt, options.params(mine.ask), mine.seed, *sides)
        return replace(mine, verdict=found.verdict.value, reason=found.reason)


class PeerSide(Side):
    """Another engine in one of its modes; it answers one prompt at a time."""

    def __init__(self, peer: "Peer", mode: str):
        super().__init__(f"{peer.name}:{mode}")
        self.peer, self.mode = peer, mode

    def answer(self, asks: Seq[Ask], options: BenchOptions, max_tokens: int | None = None) -> list[Answer]:
        """Ask the peer, with its own count of tokens and its own clock. Raises `ConfigError` for a picture."""
        if any(ask.has_image for ask in asks):
            raise ConfigError("peers are asked about text alone", got="a prompt with a picture", fix="leave --peer out")
        answers = []
        for ask in asks:
            messages = cast("list[dict[str, str]]", ask.messages)
            got = self.peer.run(
                self.mode, messages, ask.token_ids, max_tokens or options.max_tokens, options.temperature
            )
            passes = None if got.num_passes is None else float(got.num_passes)
            answers.append(
                Answer(ask, self.name, got.token_ids, got.num_tokens, got.text, got.decode_s, got.prefill_s, passes)
            )
        return answers

    def judge(self, plain: Answer, mine: Answer, eos_ids: frozenset[int]) -> Answer:
        """`mine` with whether it is our plain answer, by tokens where the peer tells them, an end token apart."""
        if mine.token_ids is None or plain.token_ids is None:
            same = mine.text.strip() == plain.text.strip()
        else:
            ours, theirs = (_without_end(ids, eos_ids) for ids in (plain.token_ids, mine.token_ids))
            same = ours == theirs
        return replace(mine, verdict="identical" if same else "different")


def _without_end(token_ids: list[int], eos_ids: frozenset[int]) -> list[int]:
    end = len(token_ids)
    while end and token_ids[end - 1] in eos_ids:
        end -= 1
    return token_ids[:end]
