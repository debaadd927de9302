"""Metrics of a server in Prometheus' text format, with vLLM's names under a prefix.

They have the meanings of vLLM's documentation; with the prefix "vllm" its dashboards work.
"""

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from ..async_llm import AsyncLLM

_TO_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40)
_WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("Until the first token of a request.", _TO_FIRST),
    "inter_token_latency_seconds": ("Between tokens.", _BETWEEN),
    "e2e_request_latency_seconds": ("Until the end of a request.", _WHOLE),
    "request_queue_time_seconds": ("Waiting for slots.", _WHOLE),
    "request_prefill_time_seconds": ("Reading a prompt.", _WHOLE),
    "request_decode_time_seconds": ("In rounds behind a prompt.", _WHOLE),
    "request_prompt_tokens": ("Tokens of a prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens of an answer.", _TOKENS),
    "request_params_max_tokens": ("The max_tokens of a request, where it has any.", _TOKENS),
}


class Metrics:
    """The metrics that a server counts itself; others come from the engine.

    counts, sums: of each histogram, the observations per bucket (the last is above all bounds), and their sum.
    """

    def __init__(self, prefix: str, model: str):
        self.prefix, self.labels = prefix, {"model_name": model}
        self.finished: dict[str, int] = dict.fromkeys(("stop", "length", "tool_calls", "abort", "error"), 0)
        self.counts = {name: [0] * (len(bounds) + 1) for name, (_, bounds) in _HISTOGRAMS.items()}
        self.sums = dict.fromkeys(_HISTOGRAMS, 0.0)

    def observe(self, name: str, value: float, times: int = 1) -> None:
        """Count a value in a histogram `times` times."""
        self.counts[name][bisect_left(_HISTOGRAMS[name][1], value)] += times
        self.sums[name] += value * times

    def text(self, engine: AsyncLLM | None) -> str:
        """All metrics as text. engine: None while the model is not loaded; its counts then begin anew."""
        own = [
            *self.lines("request_success_total", "Choices by why they ended.", self.finished, "finished_reason"),
            *(line for name in _HISTOGRAMS for line in self.histogram_lines(name)),
        ]
        return "\n".join([*(() if engine is None else self._engine_lines(engine)), *own]) + "\n"

    def _engine_lines(self, engine: AsyncLLM) -> list[str]:
        stats = engine.stats()
        taken = 1 - stats.free_slots / engine.llm.runner.num_slots
        return [
            *self.lines("num_requests_running", "Requests being answered.", engine.num_running),
            *self.lines("num_requests_waiting", "Requests waiting for a slot.", engine.num_waiting),
            *self.lines("num_preemptions_total", "Slots given to another answer.", stats.preemptions),
            *self.lines("kv_cache_usage_perc", "Share of the slots that are taken.", taken),
            *self.lines("prompt_tokens_total", "Tokens of prompts read.", stats.prompt_tokens),
            *self.lines("prefix_cache_queries_total", "Tokens looked for.", stats.prefix_cache_queries),
            *self.lines("prefix_cache_hits_total", "Tokens found.", stats.prefix_cache_hits),
            *self.lines("generation_tokens_total", "Tokens generated.", stats.generated_tokens),
            *self.lines("spec_decode_num_drafts_total", "Drafts verified.", stats.drafts),
            *self.lines("spec_decode_num_draft_tokens_total", "Tokens drafted.", stats.draft_tokens),
            *self.lines("spec_decode_num_accepted_tokens_total", "Drafts accepted.", stats.accepted_tokens),
            *self.lines(
                "spec_decode_num_accepted_tokens_per_pos_total",
                "Drafted tokens accepted at each place of a draft.",
                dict(enumerate(stats.accepted_by_position or (0,))),
                "position",
            ),
            *(line for name, pair in engine.llm.decoder.drafter.metrics().items() for line in self.lines(name, *pair)),
        ]

    def lines(self, name: str, words: str, values: float | Mapping[Any, float], label: str = "") -> Iterator[str]:
        """The lines of a counter, whose name ends with _total, or of a gauge. label: the label of several values."""
        yield from self._head(name, "counter" if name.endswith("_total") else "gauge", words)
        if isinstance(values, Mapping):
            yield from (self._line(name, value, {label: key}) for key, value in values.items())
        else:
            yield self._line(name, values)

    def histogram_lines(self, name: str) -> Iterator[str]:
        """The lines of a histogram."""
        words, bounds = _HISTOGRAMS[name]
        yield from self._head(name, "histogram", words)
        for bound, count in zip([*bounds, "+Inf"], accumulate(self.counts[name]), strict=True):
            yield self._line(f"{name}_bucket", count, {"le": bound})
        yield self._line(f"{name}_sum", self.sums[name])
        yield self._line(f"{name}_count", sum(self.counts[name]))

    def _head(self, name: str, kind: str, words: str) -> list[str]:
        return [f"# HELP {self.prefix}:{name} {words}", f"# TYPE {self.prefix}:{name} {kind}"]

    def _line(self, name: str, value: float, labels: Mapping[str, object] | None = None) -> str:
        pairs = {**self.labels, **(labels or {})}
        return f"{self.prefix}:{name}{{{','.join(f'{key}={_quoted(pairs[key])}' for key in pairs)}}} {value}"


class Watch:
    """Measures the times of one request for the histograms."""

    def __init__(self, metrics: Metrics):
        self.metrics, self.begin = metrics, time.perf_counter()
        self.first_s: float | None = None
        self.seconds = 0.0
        self._last = dict[int, float]()

    def tokens(self, index: int, count: int) -> None:
        """Record that `count` further tokens of a choice were emitted."""
        if not count:
            return
        now = time.perf_counter()
        if self.first_s is None:
            self.first_s = now - self.begin
            self.metrics.observe("time_to_first_token_seconds", self.first_s)
        if index in self._last:
            self.metrics.observe("inter_token_latency_seconds", (now - self._last[index]) / count, count)
        self._last[index] = now

    def end(self, reasons: Iterable[str] = ()) -> None:
        """The request is over. reasons: why each choice ended."""
        self.seconds = time.perf_counter() - self.begin
        self.metrics.observe("e2e_request_latency_seconds", self.seconds)
        for reason in reasons:
            self.metrics.finished[reason] += 1


def joined(pages: Sequence[str]) -> str:
    """One page: the samples of each metric together, as Prometheus wants them."""
    families = dict[str, list[str]]()
    for page in pages:
        for block in f"\n{page}".split("\n# HELP ")[1:]:
            words, kind, *samples = block.splitlines()
            families.setdefault(words.partition(" ")[0], [f"# HELP {words}", kind]).extend(samples)
    return "\n".join(line for lines in families.values() for line in lines) + "\n"


def _quoted(value: object) -> str:
    """A label value: quoted, with its quotes, backslashes and line ends escaped."""
    text = str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{text}"'
