"""A local model as a side of an audit: Paceline's own plain decoding."""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..core.request import SamplingParams, TokenSequence
from ..errors import PacelineError
from ..measure.prompts import Prompt
from ..measure.reference import NUM_TOP, TIE, Decoded, measure_scores
from ..system.files import Progress
from ..target.prompts import read_prompt
from .answers import Answer, Ask, Token
from .client import NoAnswer
from .run import Job, Run, run_of
from .verdicts import Judgement, Verdict, partings

if TYPE_CHECKING:
    from ..engine.output import RequestOutput
    from ..llm import LLM

_CHUNK = 64  # prompts between two signs of progress


class Local:
    """A `Side` that decodes here, one answer at a time."""

    most = 1

    def __init__(self, llm: "LLM", name: str):
        self.llm, self.name = llm.plain(), name
        self.about: dict[str, Any] = {"engine": "Paceline, plain decoding", "model": name, "numerics": llm.numerics}
        self._lock = threading.Lock()

    def answer(self, prompt: Prompt, ask: Ask, streamed: bool = False) -> Answer:
        """Answer a prompt. Raises `NoAnswer`, for instance for one that is too long."""
        try:
            with self._lock:
                return _answer(self.llm.generate([prompt], _params(ask))[0])
        except PacelineError as error:
            raise NoAnswer(f"{self.name} does not answer", got=error) from error

    def draw(self, jobs: Sequence[Job], progress: Progress) -> list[Run]:
        """Answer many prompts, in batches."""
        runs = list[Run]()
        for begin in range(0, len(jobs), _CHUNK):
            some = jobs[begin : begin + _CHUNK]
            try:
                results = self.llm.generate([job.text for job in some], [_params(job.ask) for job in some])
                runs += [Run(job, _answer(result)) for job, result in zip(some, results, strict=True)]
            except PacelineError:  # of one of them
                runs += [run_of(self, job) for job in some]
            progress(f"{self.name}: samples", len(runs), len(jobs))
        return runs

    def stop(self) -> None:
        """Nothing to end."""

    def judge(self, prompt: Prompt, ask: Ask, server: Answer, own: Answer, judgement: Judgement) -> Judgement:
        """A verdict on the difference to a server, by the gap of both tokens and the noise of rounding, measured here.

        As before where the server's token is not among the likely ones here.
        """
        params = _params(ask)
        with self._lock:
            output = self.llm.generate([prompt], params)[0].outputs[0]
            assert output.logprobs is not None
            for here in partings(own, server):
                entry = output.logprobs[here.place]
                words = {entry.texts.get(token, ""): token for token in [*entry][::-1]}  # the most likely of a text
                likely = here.others(words, own.tokens[here.place].text, server.text)
                if likely:
                    token = max((words[word] for word in likely), key=lambda one: entry[one].logprob)
                    ids = [*output.token_ids[: here.place], token]
                    return self._measured(prompt, params, output, ids, here.place, judgement)
        return judgement

    def _measured(
        self, prompt: Prompt, params: SamplingParams, output: Any, ids: list[int], place: int, judgement: Judgement
    ) -> Judgement:
        llm = self.llm
        prompt_ids, vision = read_prompt(llm.loaded, prompt, llm.runner.max_length)
        seq = TokenSequence(
            prompt_ids, params, params.seed or 0, llm.loaded.eos_ids, llm.runner.max_length, vision=vision
        )
        measured = measure_scores(
            llm.runner.loaded, seq, Decoded(output.token_ids, None), Decoded(ids, None), place + 1
        )
        gap, limit = abs(measured.gap or 0.0), TIE * measured.noise
        told = f"the tokens are {gap:.2g} nats apart here, rounding moves them by up to {limit:.2g}"
        verdict = Verdict.NEAR_TIE if gap <= limit else Verdict.DIFFERENT
        return Judgement(verdict, told, judgement.difference)


def _answer(result: "RequestOutput") -> Answer:
    output = result.outputs[0]
    tokens = tuple(
        Token(entry.texts.get(entry.token_id, ""), entry.logprob, _by_text(entry)) for entry in output.logprobs or ()
    )
    counts = len(result.prompt_token_ids), len(output.token_ids)
    return Answer(output.text, tokens, output.finish_reason, *counts)


def _params(ask: Ask) -> SamplingParams:
    return SamplingParams(temperature=ask.temperature, max_tokens=ask.max_tokens, seed=ask.seed, logprobs=NUM_TOP)


def _by_text(entry: Any) -> dict[str, float]:
    tops = dict[str, float]()
    for token in entry:
        tops.setdefault(entry.texts.get(token, ""), entry[token].logprob)
    return tops
