"""What a cascade does, to look at: an HTML page with an example of each case, and the risk-coverage plot.

The page is one file without a script; images of the prompts are embedded. Colour is never the only mark: each kind of
token has its own line below it, and says what it is when pointed at.
"""

import base64
import html
import io
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import cast

from PIL import Image
from transformers import PreTrainedTokenizerBase

from ..core.outputs import Origin
from ..core.request import SamplingParams
from ..eval.plots import GREY, PALETTE, STYLE, load_matplotlib, save_figure
from ..eval.results import token_texts
from ..hf.chats import split_chat
from ..hf.prompts import Chat, Prompt
from .bound import upper_bound
from .calibration import Calibration
from .cascade import Cascade, CascadeOutput, Reason


class Case(StrEnum):
    """What became of a small answer."""

    CORRECTED = "corrected"  # unsure, and the large model's answer differs
    AGREED = "agreed"  # unsure, and the large model's answer is the same
    ALONE = "alone"  # sure: the large model is never called
    LONG = "long"  # not a short answer: both write it together


@dataclass(frozen=True)
class ReportExample:
    """A prompt, its place among the prompts, and its answer."""

    index: int
    prompt: Prompt
    output: CascadeOutput


_ORIGINS = {Origin.DRAFTED: "drafted", Origin.RECOVERED: "recovered", Origin.BONUS: "bonus", Origin.PLAIN: "plain"}
_MEANINGS = {
    "small": "the small model, alone",
    "drafted": "drafted by the small model, accepted by the large one",
    "recovered": "corrected by the large model",
    "bonus": "the large model's own, after a whole draft",
    "plain": "the large model's own, nothing was drafted",
    "rejected": "in the small model's answer, not in the large one's",
}
_TITLES = {
    Case.CORRECTED: ("Unsure and wrong", "The small model was not sure enough, and the large one corrects it."),
    Case.AGREED: ("Unsure and right", "The small model was not sure enough; the large one agrees, in one pass."),
    Case.ALONE: ("Sure", "The small model answers alone. The large one is never called."),
    Case.LONG: ("A long answer", "No short answer: the small model drafts, the large one verifies and corrects."),
}
_STYLE = """
body { max-width: 54rem; margin: 2rem auto; padding: 0 1rem; }
img { max-width: 100%; max-height: 16rem; display: block; margin: .4rem 0; }
.drafted { border-bottom: 1px solid currentColor; }
.small { background: var(--bonus); border-bottom: 4px double currentColor; }
.rejected { text-decoration: line-through; color: var(--soft); }
"""
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="paceline show">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{names}</title>
<style>{style}</style>
</head>
<body>
<h1>{names}</h1>
<p>{promise}</p>
<p class="legend" aria-label="What the marks mean">{legend}</p>
{articles}
</body>
</html>
"""


def case_of(output: CascadeOutput) -> Case | None:
    """Which case an answer is; None where the small model had no part in it."""
    if output.reason is Reason.UNSURE and output.small is not None:
        return Case.AGREED if output.small.token_ids == output.token_ids else Case.CORRECTED
    return {Reason.CONFIDENT: Case.ALONE, Reason.LONG: Case.LONG}.get(output.reason)


def find_examples(
    cascade: Cascade,
    prompts: Seq[Prompt],
    params: SamplingParams,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> dict[Case, ReportExample | None]:
    """The first prompt of each case; None where there is none. Prompts are answered in order, until all are found."""
    found: dict[Case, ReportExample | None] = dict.fromkeys(Case)
    for index, prompt in enumerate(prompts):
        progress("looking for examples", index, len(prompts))
        output = cascade.generate([prompt], params)[0]
        case = case_of(output)
        if case is not None and found[case] is None:
            found[case] = ReportExample(index, prompt, output)
        if all(found.values()):
            break
    return found


def page(cascade: Cascade, examples: Mapping[Case, ReportExample | None], count: int) -> str:
    """The whole page. `count` is the number of prompts that were searched for the examples."""
    choice, made = cascade.choice, cascade.calibration
    promise = (
        f"The small model answers alone where its {choice.signal} is at least {choice.threshold:.4g}. That was "
        f"calibrated on {made.count} prompts: of all prompts of their kind at most {100 * choice.max_disagreement:g}% "
        f"are answered alone and differently than by the large model (confidence {100 * choice.confidence:g}%)."
    )
    return _PAGE.format(
        names=html.escape(f"{made.small.name} before {made.large.name}"),
        style=(resources.files("paceline.eval") / "page.css").read_text(encoding="utf-8") + _STYLE,
        promise=html.escape(promise),
        legend=" ".join(tokens(["abc"], [kind]) + f" {html.escape(meaning)}" for kind, meaning in _MEANINGS.items()),
        articles="\n".join(_article(case, examples.get(case), cascade.large.tokenizer, count) for case in Case),
    )


def tokens(texts: Seq[str], kinds: Seq[str], notes: Seq[str] = ()) -> str:
    """One escaped span for each token, classed by its kind. `notes` are added to their titles."""
    return "".join(
        f'<span class="{kind}" title="{html.escape(_MEANINGS[kind] + note)}">{html.escape(text)}</span>'
        for text, kind, note in zip(texts, kinds, notes or [""] * len(texts), strict=True)
    )


def kinds_of(output: CascadeOutput) -> list[str]:
    """Which model gave each token of the answer, and how."""
    if output.decided_by == "small":
        return ["small"] * len(output.token_ids)
    return [_ORIGINS[origin] for origin in output.output.origins]


def prompt_html(prompt: Prompt) -> str:
    """The images of a prompt, embedded, and its text."""
    text, images = prompt if isinstance(prompt, str) else " ".join(map(str, prompt)), []
    if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
        messages, images = split_chat(cast("Chat", prompt))
        parts = [cast("list[dict[str, str]]", message["content"]) for message in messages]
        text = "\n".join(" ".join(part["text"] for part in content if "text" in part) for content in parts)
    shown = (f'<img alt="image {n} of the prompt" src="{_data_url(one)}">' for n, one in enumerate(images, 1))
    return "".join(shown) + f"<pre>{html.escape(text)}</pre>\n"


def _data_url(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _article(case: Case, example: ReportExample | None, tokenizer: PreTrainedTokenizerBase, count: int) -> str:
    title, meaning = _TITLES[case]
    head = f'<article id="{case.value}">\n<h2>{title}</h2>\n<p class="facts">{meaning}</p>\n'
    if example is None:
        return f"{head}<p>None of {count} prompts was such a case.</p>\n</article>"
    output = example.output
    answer = tokens(token_texts(tokenizer, output.token_ids, False), kinds_of(output))
    return (
        f"{head}{prompt_html(example.prompt)}"
        f'{_small(output, tokenizer)}<p>Answer:</p>\n<div class="text">{answer}</div>\n'
        f'<p class="facts">{html.escape(_facts(output))}</p>\n</article>'
    )


def _small(output: CascadeOutput, tokenizer: PreTrainedTokenizerBase) -> str:
    """The small model's answer with the probability of each token, struck out from where the large one differs."""
    if output.small is None:
        return ""
    own = output.small.token_ids
    agreed = next((i for i, (a, b) in enumerate(zip(own, output.token_ids, strict=False)) if a != b), len(own))
    kind = "small" if output.decided_by == "small" else "drafted"
    kinds = [kind if i < agreed else "rejected" for i in range(len(own))]
    notes = [f", ln p = {one.logprob:.3f}" for one in output.small.outputs[0].logprobs or []]
    answer = tokens(token_texts(tokenizer, own, False), kinds, notes)
    return f'<p>The small model\'s answer:</p>\n<div class="text">{answer}</div>\n'


def _facts(output: CascadeOutput) -> str:
    confidence = "its answer did not end within the window"
    if output.confidence is not None:
        confidence = f"its {output.signal} was {output.confidence:.4f}, the threshold is {output.threshold:.4f}"
    promise = "exact: the large model's own answer" if output.lossless else "lossy: answered by the small model alone"
    passes = 0 if output.decided_by == "small" else len(output.output.rounds)
    return f"{confidence} · {len(output.token_ids)} tokens, {passes} passes of the large model · {promise}"


def draw(calibration: Calibration, path: Path) -> None:
    """Write the risk-coverage plot, in the format that the name ends with. Raises `ConfigError` without matplotlib."""
    matplotlib = load_matplotlib()
    from matplotlib.figure import Figure

    choice, count = calibration.choose(), calibration.count
    points = calibration.curves[choice.signal]
    covered = [100 * point.covered / count for point in points]
    seen = [100 * point.differ / count for point in points]
    bound = [100 * upper_bound(point.differ, count, choice.confidence) for point in points]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.0, 4.4), layout="constrained")
        axes = figure.add_subplot()
        axes.step(covered, seen, where="post", color=PALETTE[0], marker=".", label="differ, seen")
        name = f"upper bound, {100 * choice.confidence:g}%"
        axes.step(covered, bound, where="post", color=PALETTE[1], linestyle="--", label=name)
        axes.axhline(100 * choice.max_disagreement, color=GREY, linewidth=1, label="promised")
        name = f"{choice.signal} ≥ {choice.threshold:.4g}"
        axes.plot(100 * choice.coverage, 100 * choice.differ, "o", color=PALETTE[5], label=name)
        axes.set_ylim(0, max(2.5 * 100 * choice.max_disagreement, 1.2 * max(seen)))
        axes.set_xlim(0, 100)
        axes.set_xlabel("answered by the small model alone, % of all prompts")
        axes.set_ylabel("answered alone and differently, %")
        axes.set_title(f"{calibration.small.name} before {calibration.large.name}, {count} prompts")
        axes.legend(loc="upper left")
        save_figure(figure, path, "paceline calibrate")
