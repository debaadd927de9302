"""An audit as JSON, Markdown, a page of HTML, and JUnit's XML."""

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from jinja2 import Environment, PackageLoader

from .. import __version__
from ..errors import ConfigError
from ..system.files import check_out, write_text
from .record import Case, Comparison, FailOn, Record, counts_as_failure, fault_counts
from .verdicts import Difference, Verdict

SUFFIXES = (".md", ".html", ".xml")
_SHOWN = 20
"""Differences that a report shows at length."""
_CONTROLS = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML cannot hold."""
_SIGN = "paceline check"  # near the beginning of every report
_HALVES = re.compile("[\ud800-\udfff]")  # of pairs: no encoding has them alone


def check_files(files: Sequence[Path]) -> None:
    """Raises `ConfigError` for a file of a kind that is not written, or that cannot be."""
    for file in files:
        if file.suffix.lower() not in SUFFIXES:
            raise ConfigError("a report is of no such kind", got=str(file), expected=" or ".join(SUFFIXES))
        check_out(file, _SIGN)


def write_report(record: Record, file: Path, fail_on: FailOn = "different") -> None:
    """Write a report of the kind that the file's suffix says."""
    kinds = {".md": markdown, ".html": page, ".xml": junit}
    write_text(file, kinds[file.suffix.lower()](record, fail_on))


def as_json(record: Record, fail_on: FailOn = "different") -> dict[str, Any]:
    """The whole audit, without the answers themselves."""
    failures = record.failures(fail_on)
    found = {
        "passed": record.is_complete and not failures,
        "complete": record.is_complete,
        "stopped": record.stopped,
        "fail_on": fail_on,
        "failures": failures,
        "sides": record.sides,
        "settings": record.settings,
        "tolerance": record.tolerance,
        "prompts": list(record.prompts),
        "comparisons": [_comparison(one) for one in record.comparisons],
        "faults": [fault._asdict() for fault in record.faults],
        "tests": [{**test._asdict(), "passed": test.passed} for test in record.tests],
        "speeds": [speed._asdict() for speed in record.speeds],
        "drafts": [{**drafts._asdict(), "below_card": drafts.is_below_card} for drafts in record.drafts],
        "remarks": record.remarks,
    }
    return _encodable(found)


def markdown(record: Record, fail_on: FailOn = "different") -> str:
    """For a pull request."""
    lines = [f"# {_cell(title(record, fail_on))}", "", f"*{_SIGN} {__version__}; {_cell(settings_of(record))}*", ""]
    lines += [f"- **{_cell(name)}**: {_cell(about_side(about))}" for name, about in record.sides.items()]
    lines += [f"- {_cell(reason)}" for reason in record.failures(fail_on)]
    for heads, rows in _tables(record):
        lines += ["", *_table(heads, rows)]
    for name, case, difference in _shown(record):
        lines += ["", f"**{_cell(name)}, prompt {case.prompt + 1}**: {case.worst.verdict}, {_cell(case.worst.reason)}"]
        if difference is not None:
            lines += ["", *(f"    {line}" for line in context(difference))]
    for heading, entries in (
        ("Faults", [f"{f.subject}: {f.text}" for f in record.faults]),
        ("Remarks", record.remarks),
    ):
        if entries:
            lines += ["", f"## {heading}", "", *(f"- {_cell(entry)}" for entry in entries)]
    return "\n".join(lines) + "\n"


def page(record: Record, fail_on: FailOn = "different") -> str:
    """One page of HTML that opens without a network."""
    style = (resources.files("paceline.measure") / "colours.css").read_text(encoding="utf-8")
    text = _ENVIRONMENT.get_template("report.html").render(
        record=record,
        title=title(record, fail_on),
        failures=record.failures(fail_on),
        passed=record.is_complete and not record.failures(fail_on),
        sides={name: about_side(about) for name, about in record.sides.items()},
        tables=_tables(record),
        shown=_shown(record),
        settings=settings_of(record),
        version=__version__,
        style=style,
    )
    return _plain(text)


def junit(record: Record, fail_on: FailOn = "different") -> str:
    """JUnit's XML: a test for each prompt of each comparison, and for each other finding."""
    root = ElementTree.Element("testsuites", name="paceline check")
    for comparison in record.comparisons:
        suite = _suite(root, comparison.name)
        for case in comparison.cases:
            words = " ".join(record.prompts[case.prompt].split())[:60]
            test = _test(suite, comparison.name, f"prompt {case.prompt + 1}: {words}")
            if counts_as_failure(case.worst.verdict, comparison.is_own, fail_on):
                told = case.worst.reason
                if case.worst.difference is not None:
                    told += "\n" + "\n".join(context(case.worst.difference))
                _failure(test, case.worst.verdict.value, told)
    suite = _suite(root, "other findings")
    for fault in record.faults:
        test = _test(suite, "faults", f"{fault.subject}: {fault.text}")
        if fault_counts(fault, fail_on):
            _failure(test, "fault", fault.text)
    for one in record.tests:
        test = _test(suite, "distribution", one.name)
        if not one.passed:
            _failure(test, "distribution", f"p = {one.p_value:.2g}, below {one.false_alarm:.2g}")
    for drafts in record.drafts:
        test = _test(suite, "acceptance", drafts.name)
        if drafts.is_below_card:
            _failure(test, "acceptance", f"{drafts.length[0]:.2f} tokens a pass, the card says {drafts.card}")
    test = _test(suite, "audit", "complete")
    if not record.is_complete:
        _failure(test, "incomplete", str(record.stopped))
    for suite in root:
        suite.set("tests", str(len(suite)))
        suite.set("failures", str(sum(test.find("failure") is not None for test in suite)))
        suite.set("errors", "0")
    for name in ("tests", "failures", "errors"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


# Words and rows of all reports


def title(record: Record, fail_on: FailOn) -> str:
    """The outcome in a few words."""
    names = " against ".join(dict.fromkeys(about.get("url", name) for name, about in record.sides.items()))
    if not record.is_complete:
        return f"{names}: not complete: {record.stopped}"
    return f"{names}: {'failed' if record.failures(fail_on) else 'passed'}"


def about_side(about: dict[str, Any]) -> str:
    """What is known of a side, in one line."""
    return ", ".join(f"{key} {value}" for key, value in about.items() if value is not None)


def settings_of(record: Record) -> str:
    """The settings of an audit, in one line."""
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in record.settings.items() if value is not None)


def comparison_rows(record: Record) -> list[list[str]]:
    """A row of counts for each comparison."""
    return [[one.name, *(str(one.counts[verdict]) for verdict in Verdict)] for one in record.comparisons]


def test_rows(record: Record) -> list[list[str]]:
    """A row for each test of distributions."""
    return [
        [
            f"{'' if test.passed else 'FAILED: '}{test.name}",
            str(test.samples),
            f"{test.p_value:.2g}",
            f"{test.false_alarm:.2g}",
            f"{test.least_shift:.0%}",
        ]
        for test in record.tests
    ]


def speed_rows(record: Record) -> list[list[str]]:
    """A row for each server that was timed."""
    return [
        [one.name, spread(one.tokens_per_s, ".1f"), spread(one.first_s, ".0f", 1e3), spread(one.ratio, ".2f")]
        for one in record.speeds
    ]


def draft_rows(record: Record) -> list[list[str]]:
    """A row for each server whose metrics tell of drafts."""
    return [
        [
            f"{'BELOW THE CARD: ' if one.is_below_card else ''}{one.name}",
            "–" if one.drafted is None else str(one.drafted),
            str(one.accepted),
            f"{'' if one.is_exact else 'at least '}{spread(one.length, '.2f')}",
            "–" if one.card is None else f"{one.card:.2f}",
        ]
        for one in record.drafts
    ]


def spread(value: tuple[float, float | None, float | None] | None, form: str, unit: float = 1.0) -> str:
    """A number with its interval, if it has one."""
    if value is None:
        return "–"
    middle, low, high = value
    told = format(middle * unit, form)
    return told if low is None or high is None else f"{told} ({low * unit:{form}} to {high * unit:{form}})"


def context(difference: Difference) -> list[str]:
    """Where two answers part, in three lines, with what cannot be seen written out."""
    before, first, second = (repr(text)[1:-1] for text in (difference.before, difference.first, difference.second))
    where = f"{difference.unit} {difference.position + 1}, after: "
    return [f"{where}…{before}", f"first:  {first or '(end)'}", f"second: {second or '(end)'}"]


# Helpers


def _shown(record: Record) -> list[tuple[str, Case, Difference | None]]:
    """The worst differences first."""
    found = [(one.name, case, case.worst.difference) for one in record.comparisons for case in one.cases]
    order = list(Verdict)
    bad = [entry for entry in found if entry[1].worst.verdict is not Verdict.IDENTICAL]
    return sorted(bad, key=lambda entry: -order.index(entry[1].worst.verdict))[:_SHOWN]


def _tables(record: Record) -> list[tuple[list[str], list[list[str]]]]:
    """Heads and rows of the tables that are not empty."""
    found = [
        (["answers", "identical", "near-tie", "different", "failed"], comparison_rows(record)),
        (["test of the distribution", "samples", "p", "fails below", "it notices a shift of"], test_rows(record)),
        (["speed, from one client", "tokens a second", "first token, ms", "against the first"], speed_rows(record)),
        (["drafts", "drafted", "accepted", "tokens a pass", "card"], draft_rows(record)),
    ]
    return [(heads, rows) for heads, rows in found if rows]


def _comparison(one: Comparison) -> dict[str, Any]:
    return {
        "name": one.name,
        "first": one.first,
        "second": one.second,
        "is_own": one.is_own,
        "counts": {verdict.value: count for verdict, count in one.counts.items()},
        "drift": one.drift,
        "cases": [
            {
                "prompt": case.prompt,
                "counts": {verdict.value: count for verdict, count in case.counts.items()},
                "verdict": case.worst.verdict.value,
                "reason": case.worst.reason,
                "difference": None if case.worst.difference is None else vars(case.worst.difference),
                "drift": case.drift,
            }
            for case in one.cases
        ],
    }


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    shown = [heads, ["---"] + ["---:"] * (len(heads) - 1), *([_cell(cell) for cell in row] for row in rows)]
    return [f"| {' | '.join(row)} |" for row in shown]


def _cell(text: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"([\\`*_\[\]<>|#~&])", r"\\\1", " ".join(_CONTROLS.sub("�", text).split()))


def _suite(root: ElementTree.Element, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(root, "testsuite", name=_plain(name))


def _test(suite: ElementTree.Element, kind: str, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname=_plain(f"paceline.{kind}"), name=_plain(name), time="0")


def _failure(test: ElementTree.Element, kind: str, text: str) -> None:
    ElementTree.SubElement(test, "failure", type=kind, message=_plain(text.splitlines()[0])).text = _plain(text)


def _plain(text: str) -> str:
    return _CONTROLS.sub("�", text)


def _encodable(value: Any) -> Any:
    """The same value, without halves of surrogate pairs."""
    if isinstance(value, dict):
        return {_encodable(key): _encodable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(one) for one in value]
    return _HALVES.sub("�", value) if isinstance(value, str) else value


_ENVIRONMENT = Environment(
    loader=PackageLoader("paceline.audit", ""), autoescape=True, trim_blocks=True, lstrip_blocks=True
)
_ENVIRONMENT.globals |= {"context": context, "zip": zip}
