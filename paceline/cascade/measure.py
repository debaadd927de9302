"""Run both models over prompts and count: what `paceline calibrate` does.

The small model answers every prompt. The large one is asked only where that answer ended within the window, and only
whether it is its own (`AnswerChecker`): an answer that did not end is never given alone, so the large model's answer
would change no count. Every prompt is written to a journal at once, so that an interrupted run continues.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, replace
from os import PathLike
from pathlib import Path

from PIL import Image

from ..core.request import SamplingParams
from ..drafters.draft_model import check_same_tokenizer
from ..errors import ConfigError
from ..eval.prompts import is_address, names_file
from ..hf.prompts import Prompt
from ..llm import LLM
from ..schema import checked, validate
from ..system.files import parse_json, write_text
from ..system.provenance import hash_prompts, provenance, sha256_of
from .bound import Point, check_promise, prompts_needed
from .calibration import THRESHOLDS, Calibration, ModelId, Signal, confidences, sampling_options
from .cascade import ask_small, has_ended
from .predicted import AnswerChecker, check_exact

SHORT_LIMIT = 16
Progress = Callable[[str, int, int], None]


@checked
class Observed:
    """One prompt: how confident the small model was, and whether its answer is the large model's.

    Both are None where the small answer did not end within the window.
    """

    confidences: Mapping[Signal, float] | None
    agrees: bool | None

    def __post_init__(self):
        if (self.confidences is None) != (self.agrees is None) or set(self.confidences or Signal) != set(Signal):
            raise ConfigError("only a part of what was observed of a prompt is here")


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
    prompts_info: Mapping[str, object] | None = None,
    out: Path | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> Calibration:
    """Measure both models on prompts, which must be drawn as the later ones will be, each of them once.

    signals: the kinds of confidence to choose among. With several, the test of each is stricter.
    params: the sampling options of the answers; a sampled answer gets the seed `params.seed` + its index.
    prompts_info: what the file says about the prompts.
    out: the file of the calibration. Until it is written, all measurements are in a journal beside it.

    Raises `ConfigError`, also where the sample cannot promise the bound; the journal then stays.
    """
    params, info = params or SamplingParams(), dict(prompts_info or {})
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
    ids, sampling = (ModelId.of(small), ModelId.of(large)), sampling_options(params)
    decides = {
        "models": [asdict(one) for one in ids],
        "prompts": info,
        "count": len(prompts),
        "sha256": "" if out is None else hash_contents(prompts),
        "limits": [short_limit, small.runner.max_length, params.max_tokens],
        "sampling": sampling,
        "seed": params.seed,
    }
    journal, checker = Journal(out, decides), AnswerChecker(large)
    for index in range(len(journal.rows), len(prompts)):
        progress("prompts", index, len(prompts))
        own = replace(params, seed=(params.seed or 0) + index)
        journal.add(_observe(small, checker, prompts[index], own, short_limit))
    progress("prompts", len(prompts), len(prompts))
    made = Calibration(
        *ids,
        len(prompts),
        sum(one.confidences is not None for one in journal.rows),
        {signal: curve_of(journal.rows, signal, THRESHOLDS) for signal in signals},
        short_limit,
        small.runner.max_length,
        max_disagreement,
        confidence,
        sampling,
        info,
        provenance(),
    )
    made.choose()
    if out is not None:
        made.save(out)
    journal.remove()
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


def curve_of(observed: Seq[Observed], signal: Signal, thresholds: Seq[float]) -> tuple[Point, ...]:
    """The counts at each threshold, given in falling order."""
    ended = [(one.confidences[signal], bool(one.agrees)) for one in observed if one.confidences is not None]
    return tuple(
        Point(t, sum(c >= t for c, _ in ended), sum(c >= t and not agrees for c, agrees in ended)) for t in thresholds
    )


def _observe(small: LLM, checker: AnswerChecker, prompt: Prompt, params: SamplingParams, limit: int) -> Observed:
    answer = ask_small(small, [prompt], [params], limit)[0]
    if answer is None or not has_ended(answer):
        return Observed(None, None)
    return Observed(confidences(answer.logprobs or []), checker.agrees(prompt, params, answer.token_ids))


class Journal:
    """One line a prompt in a file whose name depends on all that `decides` the lines; without a path, in memory."""

    def __init__(self, path: Path | None, decides: Mapping[str, object]):
        self.rows: list[Observed] = []
        self._path = None
        if path is None:
            return
        key = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]
        self._path = path.with_name(f".{path.name}.{key}.partial")
        if self._path.exists():
            lines = self._path.read_bytes().split(b"\n")[:-1]  # a line without its end was cut
            self.rows = [_read_row(line, f"{self._path}, line {i}") for i, line in enumerate(lines, start=1)]
            write_text(self._path, "".join(line.decode() + "\n" for line in lines))

    def add(self, row: Observed) -> None:
        """Remember a prompt."""
        self.rows.append(row)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")

    def remove(self) -> None:
        """Remove the file, once the calibration is saved."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _read_row(line: bytes, where: str) -> Observed:
    try:
        return validate(Observed, parse_json(line, where), where)
    except ConfigError as error:
        fix = "delete that file; the calibration then begins anew"
        raise ConfigError(
            f"the journal of an interrupted calibration is damaged ({where})", got=error, fix=fix
        ) from error


def hash_contents(prompts: Seq[Prompt]) -> str:
    """Hash prompts and the content of their images, in hexadecimal; of images at addresses only the address.

    Raises `ConfigError` for an image file that cannot be read.
    """
    return hash_prompts([json.dumps(_with_hashes(one), sort_keys=True) for one in prompts])


def _with_hashes(value: object) -> object:
    """The prompt with every image that is no address replaced by its hash."""
    if isinstance(value, Mapping):
        return {key: _hash(one) if names_file(value, key, one) else _with_hashes(one) for key, one in value.items()}
    if isinstance(value, bytes | bytearray | memoryview | PathLike | Image.Image):
        return _hash(value)
    return [_with_hashes(one) for one in value] if isinstance(value, list | tuple) else value


def _hash(source: object) -> object:
    """The hash of an image, in any form that a prompt may hold it."""
    if isinstance(source, Image.Image):
        source = f"{source.mode} {source.size} {source.getpalette()} ".encode() + source.tobytes()
    if isinstance(source, bytes | bytearray | memoryview):
        return {"sha256": hashlib.sha256(source).hexdigest()}
    if is_address(str(source)):
        return str(source)
    try:
        return {"sha256": sha256_of(str(source))}
    except OSError as error:
        raise ConfigError(f"the image {str(source)!r} cannot be read", got=error.strerror) from error
