"""A result folder as one page of HTML that opens without a network: figures, coloured answers, their rounds."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Sequence
from importlib import resources

from ..core.figures import tokens_per_pass
from ..errors import ConfigError
from .results import SavedAnswer, SavedPeer, SavedResults, SavedRound, SavedRun, version_of

_HOLE = re.compile(r"\{\{(\w+)\}\}")
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
_TALL = 3.0  # bars above so many medians are cut, or one slow round would flatten the others


def chosen(answers: Sequence[SavedAnswer]) -> list[SavedAnswer]:
    """The answers worth a page: those with rounds, of the first repeat; the plain ones only where all are plain."""
    ours = [one for one in answers if one.rounds and one.token_ids and one.repeat == 0]
    return [one for one in ours if not one.is_plain] or ours


def page(results: SavedResults) -> str:
    """The whole page as text. Raises `ConfigError` where the results hold no answer with rounds."""
    answers = results.answers()
    shown = chosen(answers)
    if not shown:
        raise ConfigError("these results hold no answer of ours with its rounds", got=str(results.path))
    plain = {(one.id, one.turn): one for one in reversed(answers) if one.is_plain and one.repeat == 0}
    style, script = _part("colours.css") + _part("page.css"), _part("page.js")
    names = " and ".join(dict.fromkeys(one.side for one in shown))
    parts = {
        "title": html.escape(f"{results.model} with {names}"),
        "model": html.escape(results.model),
        "drafters": html.escape(names),
        "figures": figures(results),
        "made_by": made_by(results),
        "categories": _options(one.category for one in shown),
        "sides": _options(one.side for one in shown),
        "links": links(shown),
        "answers": "\n".join(article(n, one, plain.get((one.id, one.turn))) for n, one in enumerate(shown)),
        "data": as_script([_data(one) for one in shown]),
        "style": style,
        "script": script,
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }
    # In one pass, so that what looks like a hole in an answer stays text.
    return _HOLE.sub(lambda hole: parts[hole[1]], _part("page.html"))


def is_page(head: str) -> bool:
    """For `files.check_out`: whether `paceline show` wrote a page."""
    return '<meta name="generator" content="paceline show">' in head


def as_script(value: object) -> str:
    """JSON that can stand inside a script element, whatever the texts in it: no `<` is left."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")


def figures(results: SavedResults) -> str:
    """The numbers of the header: a table with a row for each drafter, and the columns for which there is a number."""
    plain = {"plain tok/s": _number(results.plain_tokens_per_s, 1)}
    rows = [{"drafter": html.escape(run.drafter), **_run_figures(run), **plain} for run in results.runs]
    rows += [
        {"drafter": html.escape(one.side), "speed-up": _number(one.over_plain.speedup, 2, "x"), **_speeds(one)}
        for one in results.peers
    ]
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if any(row.get(name) for row in rows)]
    if not names:
        return ""
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    body = ""
    for row in rows:
        first, *others = (row.get(name) or "–" for name in names)
        body += f'<tr><th scope="row">{first}</th>{"".join(f"<td>{value}</td>" for value in others)}</tr>'
    return (
        f'<div class="scroll"><table class="figures"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def made_by(results: SavedResults) -> str:
    """Where and when the results were measured, in one line."""
    origin, fraction = results.provenance, results.floor_fraction
    parts = [
        origin.get("gpu") or origin.get("cpu"),
        f"CPU threads: {origin['threads']}" if origin.get("threads") else None,
        f"numerics {results.numerics}" if results.numerics else None,
        None if fraction is None else f"plain decoding at {100 * fraction:.0f}% of the floor",
        None if results.complete else "interrupted before its end",
        version_of(origin),
        str(origin.get("time") or "")[:10],
        results.name,
    ]
    return html.escape(" · ".join(str(part) for part in parts if part))


def links(answers: Sequence[SavedAnswer]) -> str:
    """The list of answers, each a link to its own."""
    return "\n".join(
        f'<li data-category="{html.escape(one.category)}" data-side="{html.escape(one.side)}">'
        f'<a href="#answer-{n + 1}"><b>{n + 1}</b> {html.escape(one.category or one.id or "answer")}'
        f"<small>{html.escape(one.side)} · {tokens_per_pass(one.rounds):.2f} a pass</small></a></li>"
        for n, one in enumerate(answers)
    )


def article(index: int, answer: SavedAnswer, plain: SavedAnswer | None) -> str:
    """One answer: facts, legend, coloured text, timeline."""
    title = html.escape(f"{answer.category or 'answer'} · {answer.side}")
    where = html.escape(
        ", ".join(filter(None, [f"prompt {answer.id}", f"turn {answer.turn + 1}" if answer.turn else ""]))
    )
    prompt = (
        f"<details><summary>Prompt</summary><pre>{html.escape(answer.prompt)}</pre></details>" if answer.prompt else ""
    )
    return (
        f'<article id="answer-{index + 1}" data-answer="{index}">\n'
        f"<h2>{index + 1}. {title} <small>{where}</small></h2>\n"
        f'<p class="facts">{_facts(answer, plain)}</p>\n{prompt}'
        f'<div class="legend" role="group" aria-label="Colours, each can be switched off">{_legend(answer)}</div>\n'
        f'<div class="text" role="group" aria-label="The answer, token by token">{tokens(answer)}</div>\n'
        f"{timeline(answer.rounds)}\n</article>"
    )


def tokens(answer: SavedAnswer) -> str:
    """The text as one span for each token, classed by its origin; blanks are marked, yet copy as they are."""
    return "".join(
        f'<span class="{_class(origin)}{"" if piece else " empty"}">{_BLANKS.sub(_blank, html.escape(piece))}</span>'
        for piece, origin in zip(answer.texts, answer.origins, strict=True)
    )


def timeline(rounds: Sequence[SavedRound]) -> str:
    """Bars for each round: milliseconds stacked by part, and tokens stacked by who gave them."""
    if not rounds:
        return ""
    times = [tuple(1e3 * x for x in one.seconds) for one in rounds]
    sums = sorted(sum(one) for one in times)
    top = min(sums[-1], _TALL * sums[len(sums) // 2]) or 1.0
    cut = sum(1 for one in sums if one > top * 1.001)
    most = max(one.num_emitted for one in rounds) or 1
    given = [
        (float(min(one.num_accepted, one.num_emitted)), float(one.num_emitted > one.num_accepted)) for one in rounds
    ]
    caption = f"Milliseconds of each round, 0 to {top:.3g}" + (f"; {cut} taller cut off" if cut else "")
    return (
        f'<figure class="timeline"><figcaption>{caption}: {_key("draft")} {_key("verify")} {_key("rest")}</figcaption>'
        f"{_bars(times, ('draft', 'verify', 'rest'), top, caption)}"
        f"<figcaption>Tokens of each round, 0 to {most}: "
        f"{_key('accepted')} {_key('own', 'the target&#39;s own')}</figcaption>"
        f"{_bars(given, ('accepted', 'own'), float(most), 'Tokens of each round')}</figure>"
    )


# Helpers


def _data(answer: SavedAnswer) -> dict[str, object]:
    """What the page's script needs of an answer beyond its text."""
    return {
        "ids": answer.token_ids,
        "origins": "".join(origin[0] for origin in answer.origins),
        "rounds": [
            {
                "source": one.source,
                "emitted": one.num_emitted,
                "texts": one.texts,
                "ids": one.token_ids,
                "parents": one.parents,
                "path": one.path,
                "confidences": [round(x, 4) for x in one.confidences],
                "ms": [round(1e3 * x, 3) for x in one.seconds],
            }
            for one in answer.rounds
        ],
    }


def _options(names: Iterable[str]) -> str:
    return "".join(f"<option>{html.escape(name)}</option>" for name in dict.fromkeys(names) if name)


def _part(name: str) -> str:
    return (resources.files("paceline.eval") / name).read_text(encoding="utf-8")


def _run_figures(run: SavedRun) -> dict[str, str]:
    low, high = _number(run.speedup_low, 2), _number(run.speedup_high, 2)
    between = f" <small>{low} to {high}</small>" if low and high else ""
    counts = ", ".join(f"{count} {name.replace('_', '-')}" for name, count in run.verdicts.items() if count)
    return {
        "batch": str(run.batch) if run.batch > 1 else "",
        "speed-up": _number(run.speedup, 2, f"x{between}"),
        **_speeds(run),
        "answers against plain": html.escape(counts or "none compared") if run.verdicts else "",
    }


def _speeds(one: SavedRun | SavedPeer) -> dict[str, str]:
    return {"tokens a pass": _number(one.mean_acceptance_length, 2), "tok/s": _number(one.tokens_per_s, 1)}


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "" if value is None else f"{value:.{digits}f}{unit}"


def _facts(answer: SavedAnswer, plain: SavedAnswer | None) -> str:
    facts = [
        f"{len(answer.token_ids)} tokens in {len(answer.rounds)} rounds",
        f"{tokens_per_pass(answer.rounds):.2f} tokens a pass",
    ]
    if answer.tokens_per_s:
        facts.append(f"{answer.tokens_per_s:.1f} tok/s")
    if plain is not None and plain is not answer and plain.tokens_per_s and answer.tokens_per_s:
        facts.append(f"<b>{answer.tokens_per_s / plain.tokens_per_s:.2f}x</b> of plain decoding")
    if answer.prefill_s is not None:
        facts.append(f"prompt read in {1e3 * answer.prefill_s:.0f} ms")
    if answer.verdict:
        facts.append(html.escape(_VERDICTS.get(answer.verdict, answer.verdict)))
    elif plain is not None and plain is not answer:
        facts.append(
            "identical to plain decoding" if plain.token_ids == answer.token_ids else "differs from plain decoding"
        )
    return " · ".join(facts)


def _legend(answer: SavedAnswer) -> str:
    total = max(1, len(answer.origins))
    return "".join(
        f'<button type="button" aria-pressed="true" data-origin="{name}">'
        f'<i class="{_class(name)}">ab</i> {html.escape(meaning)} '
        f"<b>{count}</b> <small>{100 * count / total:.0f}%</small></button>"
        for name, meaning in MEANINGS.items()
        if (count := answer.origins.count(name))
    )


def _bars(rows: Sequence[tuple[float, ...]], names: tuple[str, ...], top: float, label: str) -> str:
    """One path for each part: rows of rectangles, stacked; x in rounds, y in hundredths of `top`, downwards."""
    paths = []
    for part, name in enumerate(names):
        steps = []
        for x, row in enumerate(rows):
            low, high = (min(100.0, 100 * sum(row[:end]) / top) for end in (part, part + 1))
            if high - low > 0.05:
                steps.append(f"M{x + 0.08:.2f} {100 - high:.1f}h.84v{high - low:.1f}h-.84z")
        paths.append(f'<path class="{name}" d="{"".join(steps)}"/>')
    wide = f"max-width:{max(60, 26 * len(rows))}px"
    return (
        f'<svg viewBox="0 0 {len(rows)} 100" preserveAspectRatio="none" role="img" aria-label="{html.escape(label)}" '
        f'style="{wide}"><rect class="cursor" x="-1" y="0" width="1" height="100"/>{"".join(paths)}</svg>'
    )


def _key(name: str, label: str = "") -> str:
    return f'<span class="key"><i class="{name}"></i>{label or name}</span>'


def _blank(found: re.Match[str]) -> str:
    text = found[0]
    marks = {"\n": '<i class="nl"></i>\n', "\t": '<i class="tab"></i>\t', "\r": '<i class="cr"></i>'}
    return marks.get(text) or f'<i class="sp">{text}</i>'


def _class(origin: str) -> str:
    return origin if origin in MEANINGS else "plain"
