"""`paceline calibrate`: runs both models over prompts, counts, and plots the counts.

The large model verifies the small answers that ended within `short_limit`; others are never given alone and change no
count. Every prompt is written to a journal at once, so that an interrupted run can continue.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from ..core.request import SamplingParams
from ..errors import ConfigError
from ..hf.chats import split_chat
from ..hf.images import open_image
from ..llm import LLM
from ..measure.plots import GREY, PALETTE, STYLE, load_matplotlib, new_figure, save_figure
from ..policy import Fixed
from ..schema import checked, checked_call, validate
from ..system.files import Progress, parse_json, silent, write_text
from ..system.provenance import hash_prompts, provenance
from ..target.prompts import Prompt, is_chat
from .bound import Point, Share, prompts_needed, upper_bound
from .calibration import THRESHOLDS, Calibration, ModelId, Signal, confidences, sampling_options, too_small
from .cascade import ask_small
from .predicted import check_pair, confirms, cut_to, predicting, with_predictions


@checked
class Observed:
    """The confidence in a small answer, and whether it is the large one's; None where it did not end in time."""

    confidences: Mapping[Signal, float] | None
    agrees: bool | None

    def __post_init__(self):
        if (self.confidences is None) != (self.agrees is None) or set(self.confidences or Signal) != set(Signal):
            raise ConfigError("a line of the journal is incomplete")


def calibrate(
    small: LLM,
    large: LLM,
    prompts: Sequence[Prompt],
    *,
    max_disagreement: float = 0.01,
    confidence: float = 0.95,
    short_limit: int = 16,
    signals: Sequence[Signal] = (Signal.MIN_PROB,),
    params: SamplingParams | None = None,
    prompts_info: Mapping[str, object] | None = None,
    out: Path | None = None,
    progress: Progress = silent,
) -> Calibration:
    """Measure both models on a random sample of the prompts to come, without repetitions.

    signals: the kinds of confidence to choose among. With several, the test of each is stricter.
    params: the sampling options of the answers; a sampled answer gets the seed `params.seed` + its index.
    prompts_info: facts about the prompts for the file, besides their hash.
    out: the file of the calibration. Until it is written, all measurements are in a journal beside it.

    Raises `ConfigError`, also where the sample cannot guarantee the bound; the journal is then kept.
    """
    params, info = params or SamplingParams(), {**(prompts_info or {}), "sha256": hash_contents(prompts)}
    check_sample(len(prompts), max_disagreement, confidence, len(signals))
    if params.most_tokens < short_limit:
        raise ConfigError(
            "max_tokens would cut answers that may end within short_limit, and they would not be counted",
            got=f"max_tokens={params.max_tokens}",
            expected=f">= short_limit, {short_limit}",
            fix="calibrate with a larger max_tokens, or a smaller short_limit",
        )
    if params.logits_processors or params.n != 1 or params.adapter:
        raise ConfigError("a calibration cannot store these options", got="logits_processors, n > 1, or an adapter")
    check_pair(small, large)
    ids, sampling = (ModelId.of(small), ModelId.of(large)), sampling_options(params)
    decides = {
        "models": [asdict(model) for model in ids],
        "prompts": info,
        "count": len(prompts),
        "limits": [short_limit, small.runner.max_length, params.most_tokens],
        "sampling": sampling,
        "seed": params.seed,
    }
    journal, verifying = Journal(out, decides), with_predictions(large, None, Fixed(0))
    for index in range(len(journal.rows), len(prompts)):
        progress("prompts", index, len(prompts))
        seeded = replace(params, seed=(params.seed or 0) + index)
        answer = ask_small(small, [prompts[index]], [seeded], short_limit)[0]
        if answer is None or answer.finish_reason != "stop":
            journal.add(Observed(None, None))
            continue
        own = verifying.generate([prompts[index]], predicting(cut_to(seeded, answer), answer, large))[0]
        journal.add(Observed(confidences(answer.logprobs or []), confirms(own, answer)))
    progress("prompts", len(prompts), len(prompts))
    calibration = Calibration(
        *ids,
        len(prompts),
        sum(row.confidences is not None for row in journal.rows),
        {signal: curve_of(journal.rows, signal, THRESHOLDS) for signal in signals},
        short_limit,
        small.runner.max_length,
        max_disagreement,
        confidence,
        sampling,
        info,
        provenance(),
    )
    calibration.choose()
    if out is not None:
        calibration.save(out)
    journal.remove()
    return calibration


@checked_call
def check_sample(
    count: int, max_disagreement: Share, confidence: Share, num_signals: Annotated[int, Field(ge=1)] = 1
) -> None:
    """Raises `ConfigError` where even a sample without any disagreement is too small for the bound."""
    each = 1 - (1 - confidence) / num_signals
    if count < prompts_needed(0, max_disagreement, each):
        raise too_small(count, 0, max_disagreement, confidence, each)


def curve_of(observed: Sequence[Observed], signal: Signal, thresholds: Sequence[float]) -> tuple[Point, ...]:
    """The counts at each threshold; thresholds descend."""
    ended = [(answer.confidences[signal], bool(answer.agrees)) for answer in observed if answer.confidences is not None]
    return tuple(
        Point(t, sum(c >= t for c, _ in ended), sum(c >= t and not agrees for c, agrees in ended)) for t in thresholds
    )


def draw(calibration: Calibration, path: Path) -> None:
    """Write the risk-coverage plot, in the format that the name ends with. Raises `ConfigError` without matplotlib."""
    matplotlib = load_matplotlib()
    choice, count = calibration.choose(), calibration.count
    points = calibration.curves[choice.signal]
    covered = [100 * point.covered / count for point in points]
    seen = [100 * point.differ / count for point in points]
    bound = [100 * upper_bound(point.differ, count, choice.confidence) for point in points]
    with matplotlib.rc_context(STYLE):
        figure, axes = new_figure(4.4)
        axes.step(covered, seen, where="post", color=PALETTE[0], marker=".", label="differ, seen")
        name = f"upper bound, {100 * choice.confidence:g}%"
        axes.step(covered, bound, where="post", color=PALETTE[1], linestyle="--", label=name)
        axes.axhline(100 * choice.max_disagreement, color=GREY, linewidth=1, label="bound to guarantee")
        name = f"{choice.signal} ≥ {choice.threshold:.4g}"
        axes.plot(100 * choice.coverage, 100 * choice.point.differ / count, "o", color=PALETTE[5], label=name)
        axes.set_ylim(0, max(2.5 * 100 * choice.max_disagreement, 1.2 * max(seen)))
        axes.set_xlim(0, 100)
        title = f"{calibration.small.name} before {calibration.large.name}, {count} prompts"
        across = "answered by the small model alone, % of all prompts"
        axes.set(title=title, xlabel=across, ylabel="answered alone and differently, %")
        axes.legend(loc="upper left")
        save_figure(figure, path, "paceline calibrate")


class Journal:
    """One line per prompt in a file whose name depends on all settings that decide it; without a path, in memory."""

    def __init__(self, path: Path | None, decides: Mapping[str, object]):
        self.rows, self._path = list[Observed](), None
        if path is None:
            return
        key = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]
        self._path = path.with_name(f".{path.name}.{key}.partial")
        if not self._path.exists():
            return
        lines = self._path.read_bytes().split(b"\n")[:-1]  # a line without its end was cut
        for number, line in enumerate(lines, start=1):
            where = f"{self._path}, line {number}"
            try:
                self.rows.append(validate(Observed, parse_json(line, where), where))
            except ConfigError as error:
                message = f"the journal of an interrupted calibration is damaged ({where})"
                fix = "delete that file to start the calibration again"
                raise ConfigError(message, got=error, fix=fix) from error
        write_text(self._path, "".join(line.decode() + "\n" for line in lines))

    def add(self, row: Observed) -> None:
        """Append the observation of a prompt."""
        self.rows.append(row)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")

    def remove(self) -> None:
        """Remove the file, once the calibration is saved."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def hash_contents(prompts: Sequence[Prompt]) -> str:
    """Hash prompts and the pixels of their images, in hexadecimal. Raises `ConfigError` for an unreadable image."""
    parts = list[str]()
    for prompt in prompts:
        messages, images = split_chat(prompt) if is_chat(prompt) else (prompt, [])
        parts.append(json.dumps(messages, sort_keys=True, default=lambda array: array.tolist()))  # token ids
        for image in map(open_image, images):
            parts.append(hashlib.sha256(f"{image.size}".encode() + image.tobytes()).hexdigest())
    return hash_prompts(parts)
