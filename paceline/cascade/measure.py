"""Run both models over prompts and count: what `paceline calibrate` does.

The small model answers every prompt. The large one is asked only where that answer ended within the window, and then
whether it is its own (`Checker`): an answer that did not end is never given alone, so what the large model would have
said there changes no count. Every prompt is written to a journal at once, so that an interrupted run goes on.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

from ..core.request import SamplingParams
from ..drafters.draft_model import check_same_tokenizer
from ..errors import ConfigError
from ..hf.prompts import Prompt
from ..llm import LLM
from ..system.files import write_text
from ..system.provenance import provenance
from .bound import check_promise, prompts_needed
from .calibration import Calibration, Observed, curve_of, sampling_of
from .checker import Checker, check_exact
from .confidence import THRESHOLDS, Signal, confidences
from .identity import identity
from .outcome import ask_small, has_ended
from .prompt_file import hash_of

SHORT_LIMIT = 16
Progress = Callable[[str, int, int], None]


def calibrate(
    small: LLM,
    large: LLM,
    prompts: Seq[Prompt],
    *,
    max_disagreement: float = 0.01,
    confidence: float = 0.95,
    short_limit: int = SHORT_LIMIT,
    signals: Seq[Signal] = (Signal.MIN_PROB,),
    params: SamplingParams | None = None,
    told: Mapping[str, object] | None = None,
    out: Path | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> Calibration:
    """Measure both models on prompts, which must be drawn as the later ones will be, each of them once.

    signals: kinds of confidence to choose among; several make the test of each stricter. params: of the answers; a
    sampled answer gets the seed `params.seed` + its index. told: what the file is to say about the prompts. out: where
    the calibration is saved; until then what was measured is kept in a journal beside it.
    Raises `ConfigError`, also where the sample cannot promise what is asked for; the journal then stays.
    """
    params = params or SamplingParams()
    check_sample(len(prompts), max_disagreement, confidence, len(signals))
    if short_limit < 1:
        raise ConfigError("short_limit is too small", got=short_limit, expected=">= 1")
    if params.max_tokens < short_limit:
        raise ConfigError(
            "max_tokens would cut answers that may end within short_limit, and they would not be counted",
            got=f"max_tokens={params.max_tokens}",
            expected=f">= short_limit, {short_limit}",
            fix="calibrate with a larger max_tokens, or a smaller short_limit",
        )
    if params.logits_processors or params.n != 1:
        raise ConfigError("a calibration cannot remember these options", got="logits_processors, or n > 1")
    check_exact(small, "small")
    check_same_tokenizer(large.loaded, small.loaded)
    who = identity(small), identity(large)
    head = {
        "small": who[0].as_dict(),
        "large": who[1].as_dict(),
        "prompts": dict(told or {}),
        "count": len(prompts),
        "sha256": "" if out is None else hash_of(prompts),
        "short_limit": short_limit,
        "small_context": small.runner.max_length,
        "sampling": sampling_of(params),
        "seed": params.seed,
        "max_tokens": params.max_tokens,
    }
    written = _Journal(out, head)
    checker = Checker(large)
    for index in range(len(written.rows), len(prompts)):
        progress("prompts", index, len(prompts))
        own = replace(params, seed=(params.seed or 0) + index)
        written.add(_observe(small, checker, prompts[index], own, short_limit))
    progress("prompts", len(prompts), len(prompts))
    observed = written.rows
    made = Calibration(
        *who,
        len(observed),
        sum(one.confidences is not None for one in observed),
        {signal: curve_of(observed, signal, THRESHOLDS) for signal in signals},
        short_limit,
        small.runner.max_length,
        max_disagreement,
        confidence,
        sampling_of(params),
        dict(told or {}),
        provenance(),
    )
    made.choose()
    if out is not None:
        made.save(out)
    written.remove()
    return made


def check_sample(count: int, max_disagreement: float, confidence: float, num_signals: int = 1) -> None:
    """Raises `ConfigError` where even a sample without any disagreement would be too small to promise this."""
    check_promise(max_disagreement, confidence)
    if num_signals < 1:
        raise ConfigError("no kind of confidence is given", expected="at least one of " + ", ".join(Signal))
    need = prompts_needed(0, max_disagreement, 1 - (1 - confidence) / num_signals)
    if count < need:
        raise ConfigError(
            f"too few prompts to promise a disagreement of at most {max_disagreement:g} with confidence {confidence:g}",
            got=f"{count} prompts",
            expected=f"at least {need}, and more if any answer differs",
            fix=f"add {need - count} prompts or more, or allow a larger max_disagreement",
        )


def _observe(small: LLM, checker: Checker, prompt: Prompt, params: SamplingParams, limit: int) -> Observed:
    answer = ask_small(small, [prompt], [params], limit)[0]
    if answer is None or not has_ended(answer):
        return Observed(None, None)
    return Observed(confidences(answer.logprobs or []), checker.says(prompt, params, answer.token_ids))


class _Journal:
    """One line a prompt in a file whose name depends on all that decides them; without a path, in memory alone."""

    def __init__(self, path: Path | None, head: Mapping[str, object]):
        self.rows: list[Observed] = []
        self._path = None
        if path is None:
            return
        key = hashlib.sha256(json.dumps(head, sort_keys=True).encode()).hexdigest()[:12]
        self._path = path.with_name(f".{path.name}.{key}.partial")
        if self._path.exists():
            lines = self._path.read_bytes().split(b"\n")[:-1]  # a line without its end was cut
            self.rows = [_read_row(line, f"{self._path}, line {i}") for i, line in enumerate(lines, start=1)]
            text = "".join(_write_row(row) for row in self.rows)
            write_text(self._path, text)

    def add(self, row: Observed) -> None:
        """Remember a prompt."""
        self.rows.append(row)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_write_row(row))

    def remove(self) -> None:
        """It has become a calibration."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _write_row(row: Observed) -> str:
    sure = None if row.confidences is None else {signal.value: value for signal, value in row.confidences.items()}
    return json.dumps([sure, row.agrees]) + "\n"


def _read_row(line: bytes, where: str) -> Observed:
    try:
        sure, agrees = json.loads(line)
        if sure is None and agrees is None:
            return Observed(None, None)
        known = {Signal(name): float(value) for name, value in (sure or {}).items()}
        if set(known) != set(Signal) or not isinstance(agrees, bool):
            raise ValueError("not all of a prompt")
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"what an interrupted calibration left is damaged ({where})", got=str(error),
            fix="delete that file; the calibration then begins anew",
        ) from error  # fmt: skip
    return Observed(known, agrees)
