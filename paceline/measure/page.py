"""A result folder as one page of HTML that opens without a network: figures, coloured answers, their rounds.

The page is the template `page.html`, which escapes every text that it is given.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

from ..core.round import tokens_per_pass
from ..errors import ConfigError
from .results import SavedAnswer, SavedResults, SavedRound, version_of

MEANINGS = {
    "drafted": "drafted and accepted",
    "recovered": "the target's correction",
    "bonus": "bonus after a full draft",
    "plain": "plain step",
}
_VERDICTS = {
    "identical": "identical to plain decoding",
    "near_tie": "near-tie",
    "bug": "differs from plain decoding: a bug",
}
_BLANKS = re.compile(r"\r|\n|\t|  +|^ +$")
_MARKS = {"\n": '<i class="nl"></i>\n', "\t": '<i class="tab"></i>\t', "\r": '<i class="cr"></i>'}
SIGN = '<meta name="generator" content="paceline show">'
"""At the beginning of every page."""
_TALL = 3.0  # bars longer than so many medians are cut, or one slow round would flatten the others


def chosen(answers: Sequence[SavedAnswer]) -> list[SavedAnswer]:
    """The answers to show: those with rounds, of the first repeat; plain ones only if all are plain."""
    ours = [answer for answer in answers if answer.rounds and answer.token_ids and answer.repeat == 0]
    return [answer for answer in ours if not answer.is_plain] or ours


def page(results: SavedResults) -> str:
    """The whole page as text. Raises `ConfigError` where the results hold no answer with rounds."""
    answers = results.answers()
    shown = chosen(answers)
    if not shown:
        raise ConfigError("these results have no answer of Paceline with its rounds", got=str(results.path))
    script = _part("page.js")
    return ENVIRONMENT.get_template("page.html").render(
        results=results,
        shown=shown,
        plain={
            (answer.id, answer.turn): answer for answer in reversed(answers) if answer.is_plain and answer.repeat == 0
        },
        drafters=" and ".join(dict.fromkeys(answer.side for answer in shown)),
        version=version_of(results.provenance),
        data=[_data(answer) for answer in shown],
        style=_part("colours.css") + _part("page.css"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def timeline(rounds: Sequence[SavedRound]) -> dict[str, Any]:
    """For each round the milliseconds of its parts, drawn up to `top`, and its tokens by origin, up to `most`.

    cut: how many rounds took longer than `top`.
    """
    times = [_milliseconds(r) for r in rounds]
    sums = sorted(sum(parts) for parts in times)
    top = min(sums[-1], _TALL * sums[len(sums) // 2]) or 1.0
    most = max(r.num_emitted for r in rounds) or 1
    return {
        "top": top,
        "cut": sum(total > top * 1.001 for total in sums),
        "most": most,
        "milliseconds": times,
        "tokens": [(min(r.num_accepted, r.num_emitted), r.num_emitted > r.num_accepted) for r in rounds],
    }


# Helpers


def _data(answer: SavedAnswer) -> dict[str, object]:
    """What the page's script needs of an answer besides its text."""
    rounds = [
        {key: getattr(r, key) for key in ("source", "num_emitted", "texts", "parents", "path")}
        | {"confidences": [round(x, 4) for x in r.confidences], "ms": [round(x, 3) for x in _milliseconds(r)]}
        for r in answer.rounds
    ]
    return {"ids": answer.token_ids, "origins": "".join(origin[0] for origin in answer.origins), "rounds": rounds}


def _milliseconds(r: SavedRound) -> list[float]:
    """Of drafting, of verifying, and the rest."""
    return [1e3 * r.draft_s, 1e3 * r.verify_s, 1e3 * r.rest_s]


def _part(name: str) -> str:
    return (resources.files("paceline.measure") / name).read_text(encoding="utf-8")


def _marked(text: str) -> Markup:
    """A text with visible blanks that are still copied unchanged."""
    return Markup(_BLANKS.sub(lambda match: _MARKS.get(match[0]) or f'<i class="sp">{match[0]}</i>', escape(text)))


ENVIRONMENT = Environment(
    loader=PackageLoader("paceline.measure", ""), autoescape=True, trim_blocks=True, lstrip_blocks=True
)
ENVIRONMENT.filters["marked"] = _marked
ENVIRONMENT.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
ENVIRONMENT.globals |= {
    "zip": zip,
    "timeline": timeline,
    "pace": lambda answer: f"{tokens_per_pass(answer.rounds):.2f}",
    "meanings": MEANINGS,
    "verdicts": _VERDICTS,
}
