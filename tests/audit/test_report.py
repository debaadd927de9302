"""The reports: whatever a server sends, they are valid and show it."""

import json
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from paceline.audit.record import Case, Comparison, Drafts, Fault, Record, SampledTest, Speed
from paceline.audit.report import as_json, check_files, junit, markdown, page, write_report
from paceline.audit.verdicts import Difference, Judgement, Verdict
from paceline.errors import ConfigError
from paceline.system.files import to_json

EVIL = '<script>alert("x")</script> | `*_[a](b)\x00\x1b[31m\ufffe\n\u2028 & "quoted"'


def record(text: str = EVIL, verdict: Verdict = Verdict.DIFFERENT) -> Record:
    difference = Difference(3, "token", text, text, "", (0.5, None))
    case = Case(0, {verdict: 1, Verdict.IDENTICAL: 1}, Judgement(verdict, text, difference), 0.1)
    return Record(
        prompts=[text],
        sides={text: {"url": text, "model": text, "engine": None}},
        settings={"max_tokens": 3, "card": None},
        comparisons=[Comparison(text, "a", "b", True, (case,))],
        faults=[Fault(text, text), Fault("b", "seed", is_unstable=True)],
        tests=[SampledTest(text, 100, 6, 1e-9, 1e-4, 0.2), SampledTest("fine", 100, 6, 0.5, 1e-4, 0.2)],
        speeds=[Speed(text, (10.0, 9.0, 11.0), None, (1.1, None, None))],
        drafts=[Drafts(text, None, 10, 10, (2.0, 1.9, 2.1), 2.5)],
        remarks=[text],
        stopped=None,
    )


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.open = list[str](), list[str]()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("meta",):
            self.open.append(tag)
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_is_escaped_and_whole():
    text = page(record())
    read = Page()
    read.feed(text)
    assert not read.open
    assert "script" not in read.tags
    assert "default-src 'none'" in text
    assert not any(word in text for word in ("src=", "http://", "https://"))
    assert "&lt;script&gt;" in text
    assert "light-dark" in text


def test_junit_is_valid():
    root = ElementTree.fromstring(junit(record()))
    assert root.tag == "testsuites"
    tests = root.findall("./testsuite/testcase")
    assert int(root.get("tests")) == len(tests) == sum(int(suite.get("tests")) for suite in root)
    assert int(root.get("failures")) == len(root.findall(".//failure")) == 4
    assert all(test.get("name") and test.get("classname") for test in tests)
    assert "token 4" in root.find("./testsuite/testcase/failure").text


@pytest.mark.parametrize(
    ("fail_on", "own", "failures"), [("different", True, 3), ("unstable", False, 4), ("unstable", True, 5),
                                     ("near-tie", False, 5)],
)  # fmt: skip
def test_failures_of_near_ties(fail_on, own, failures):
    found = record("x", Verdict.NEAR_TIE)
    found.comparisons = [replace(found.comparisons[0], is_own=own)]
    assert len(found.failures(fail_on)) == failures
    assert len(ElementTree.fromstring(junit(found, fail_on)).findall(".//failure")) == failures


def test_markdown_shows_text_as_it_is():
    lines = markdown(record()).splitlines()
    assert lines[0].startswith("# \\<script\\>")
    assert not any("\x00" in line or "\x1b" in line for line in lines)
    rows = [line for line in lines if line.startswith("| ")]
    assert {row.replace("\\|", "").count("|") for row in rows[:3]} == {6}
    assert "    token 4, after: …" in "\n".join(lines)


def test_json_is_whole():
    found = json.loads(json.dumps(as_json(record())))
    assert not found["passed"]
    assert found["comparisons"][0]["cases"][0]["difference"]["position"] == 3
    assert found["drafts"][0]["below_card"]
    assert len(found["failures"]) == 4


def test_files_by_suffix(tmp_path):
    for suffix, begin in {".md": "# ", ".html": "<!doctype html>", ".XML": "<?xml"}.items():
        file = tmp_path / "more" / f"report{suffix}"
        check_files([file])
        write_report(record("x"), file)
        assert file.read_text().startswith(begin)
        check_files([file])  # its own may be replaced
    with pytest.raises(ConfigError, match=r"\.md or \.html or \.xml"):
        check_files([tmp_path / "report.pdf"])


def test_files_that_cannot_be_written(tmp_path):
    (file := tmp_path / "notes.md").write_text("my notes")
    (tmp_path / "folder.md").mkdir()
    for path in (file, file / "report.md", tmp_path / "folder.md"):
        with pytest.raises(ConfigError, match=r"notes\.md|folder\.md"):
            check_files([path])


def test_half_a_surrogate_pair(tmp_path):
    found = record("half \ud83d of a pair")
    for suffix in (".md", ".html", ".xml"):
        write_report(found, tmp_path / f"report{suffix}")
    told = json.loads(to_json(as_json(found)).encode())
    assert told["remarks"] == ["half � of a pair"]


def test_a_length_that_is_a_bound():
    found = record("x")
    found.drafts = [found.drafts[0]._replace(card=None, is_exact=False)]
    assert "| at least 2.00 (1.90 to 2.10) |" in markdown(found)


def test_tables_that_are_empty_are_left_out():
    assert "|" not in markdown(Record())
    assert "<table" not in page(Record())


def test_an_unfinished_audit_does_not_pass():
    found = Record()
    assert not as_json(found)["passed"]
    assert "not complete" in markdown(found)
    assert "not complete" in page(found)
    assert len(ElementTree.fromstring(junit(found)).findall(".//failure")) == 1
