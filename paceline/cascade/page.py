"""One page with the four cases of a cascade: every token coloured, marked and named by who gave it.

It is one file: no script, no address but its own, pictures of the prompts inside. Colour is never the only sign: each
kind of token has a line of its own kind below it and says what it is when pointed at.
"""

import base64
import html
import io
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from PIL import Image
from transformers import PreTrainedTokenizerBase

from ..core.outputs import Origin
from ..hf.chats import split_chat
from ..hf.prompts import Prompt
from ..sampling import Detokenizer
from .cascade import Cascade
from .cases import Case, Found
from .outcome import CascadeOutput
from .prompt_file import text_of

_MEANINGS = {
    "small": "the small model, alone",
    "drafted": "drafted by the small model, accepted by the large one",
    "recovered": "corrected by the large model",
    "bonus": "the large model's own, after a whole draft",
    "plain": "the large model's own, nothing was drafted",
    "rejected": "said by the small model, not by the large one",
}
_TITLES = {
    Case.CORRECTED: ("Unsure and wrong", "The small model was not sure enough, and the large one corrects it."),
    Case.AGREED: ("Unsure and right", "The small model was not sure enough; the large one says the same, in one pass."),
    Case.ALONE: ("Sure", "The small model answers alone. The large one is never called."),
    Case.LONG: ("A long answer", "No short answer: the small model drafts, the large one verifies and corrects."),
}
_STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#1b1b1b, #ececec); --paper: light-dark(#fdfdfb, #17181a);
  --line: light-dark(#d9d9d4, #3a3b3f); --soft: light-dark(#5c5c58, #a5a6aa);
  --small: light-dark(#0072b24d, #56b4e966); --drafted: light-dark(#009e7340, #009e7380);
  --recovered: light-dark(#e69f0066, #e69f0080); --bonus: light-dark(#cc79a74d, #cc79a780); }
body { font: 16px/1.6 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 54rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 0; } small, .facts { color: var(--soft); }
article { border-top: 1px solid var(--line); padding: 1.2rem 0; }
.said { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 1.05rem; line-height: 2; }
.prompt { white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid var(--line); padding-left: .8rem; }
img { max-width: 100%; max-height: 16rem; border: 1px solid var(--line); display: block; margin: .4rem 0; }
span.t { border-radius: 3px; padding: 1px 0; border-bottom: 2px solid transparent; }
.small { background: var(--small); border-bottom-style: double !important; border-bottom-width: 4px !important;
  border-bottom-color: currentColor !important; }
.drafted { background: var(--drafted); border-bottom-color: currentColor !important; }
.recovered { background: var(--recovered); border-bottom-style: dashed !important;
  border-bottom-color: currentColor !important; font-weight: 600; }
.bonus { background: var(--bonus); border-bottom-style: dotted !important;
  border-bottom-color: currentColor !important; }
.rejected { text-decoration: line-through; color: var(--soft); }
ul.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; }
"""


def page(cascade: Cascade, found: Mapping[Case, Found | None], count: int) -> str:
    """The whole page. found: the examples; count: prompts that were looked at in search of them."""
    choice, made = cascade.choice, cascade.calibration
    promise = (
        f"The small model answers alone where its {choice.signal} is at least {choice.threshold:.4g}. That was "
        f"calibrated on {made.n} prompts: of all prompts of their kind at most {100 * choice.max_disagreement:g}% are "
        f"answered alone and differently than the large model would (confidence {100 * choice.confidence:g}%)."
    )
    legend = "".join(
        f'<li><span class="t {name}" title="{html.escape(told)}">abc</span> {html.escape(told)}</li>'
        for name, told in _MEANINGS.items()
    )
    names = f"{made.small.name} before {made.large.name}"
    articles = "\n".join(_article(case, found.get(case), cascade.large.tokenizer, count) for case in Case)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="generator" content="paceline show">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">\n'
        f"<title>{html.escape(names)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(names)}</h1>\n<p>{html.escape(promise)}</p>\n"
        f'<ul class="legend" aria-label="What the marks mean">{legend}</ul>\n{articles}\n</body>\n</html>\n'
    )


def tokens(pieces: Seq[str], kinds: Seq[str], notes: Seq[str] | None = None) -> str:
    """One span a token, escaped, named by its kind. notes: what else to say of each."""
    more = notes or [""] * len(pieces)
    return "".join(
        f'<span class="t {kind}" title="{html.escape(_MEANINGS[kind] + note)}">{html.escape(piece)}</span>'
        for piece, kind, note in zip(pieces, kinds, more, strict=True)
    )


def pieces_of(tokenizer: PreTrainedTokenizerBase, token_ids: Seq[int]) -> list[str]:
    """The text of each token, special ones included; a character that spans tokens goes to its last."""
    text, pieces = Detokenizer(tokenizer, skip_special_tokens=False), list[str]()
    for token in token_ids:
        text.feed(token)
        pieces.append(text.take())
    if pieces:
        pieces[-1] += text.finish()
    return pieces


def kinds_of(output: CascadeOutput) -> list[str]:
    """Who gave each token of the answer."""
    if output.decided_by == "small":
        return ["small"] * len(output.token_ids)
    names = {Origin.DRAFTED: "drafted", Origin.RECOVERED: "recovered", Origin.BONUS: "bonus", Origin.PLAIN: "plain"}
    return [names[origin] for origin in output.output.origins]


def _article(case: Case, one: Found | None, tokenizer: PreTrainedTokenizerBase, count: int) -> str:
    title, told = _TITLES[case]
    head = f'<article id="{case.value}">\n<h2>{title}</h2>\n<p class="facts">{told}</p>\n'
    if one is None:
        return f"{head}<p>None of {count} prompts was such a case.</p>\n</article>"
    output = one.output
    answer = tokens(pieces_of(tokenizer, output.token_ids), kinds_of(output))
    return (
        f'{head}<div class="prompt">{_pictures(one.prompt)}{html.escape(text_of(one.prompt))}</div>\n'
        f'{_small(output, tokenizer)}<p>Answer:</p>\n<div class="said">{answer}</div>\n'
        f'<p class="facts">{html.escape(_facts(output))}</p>\n</article>'
    )


def _small(output: CascadeOutput, tokenizer: PreTrainedTokenizerBase) -> str:
    """What the small model said, and how likely each token was to it; struck out from where the large one left it."""
    if output.small is None:
        return ""
    said = output.small.token_ids
    agreed = next((i for i, (a, b) in enumerate(zip(said, output.token_ids, strict=False)) if a != b), len(said))
    kind = "small" if output.decided_by == "small" else "drafted"
    kinds = [kind if i < agreed else "rejected" for i in range(len(said))]
    (own,) = output.small.outputs
    notes = [f", ln p = {one.logprob:.3f}" for one in own.logprobs or []]
    return f'<p>The small model said:</p>\n<div class="said">{tokens(pieces_of(tokenizer, said), kinds, notes)}</div>\n'


def _facts(output: CascadeOutput) -> str:
    sure = "its answer did not end within the window" if output.confidence is None else (
        f"its {output.signal} was {output.confidence:.4f}, the threshold is {output.threshold:.4f}"
    )  # fmt: skip
    promise = "exact: the large model's own answer" if output.lossless else "lossy: answered by the small model alone"
    passes = 0 if output.decided_by == "small" else len(output.output.rounds)
    return f"{sure} · {len(output.token_ids)} tokens, {passes} passes of the large model · {promise}"


def _pictures(prompt: Prompt) -> str:
    if isinstance(prompt, str) or not prompt or not isinstance(prompt[0], Mapping):
        return ""
    _, images = split_chat(prompt)  # type: ignore[arg-type]
    return "".join(f'<img alt="picture {n} of the prompt" src="{_data_url(i)}">' for n, i in enumerate(images, 1))


def _data_url(image: Image.Image) -> str:
    held = io.BytesIO()
    image.save(held, format="PNG")
    return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()
