"""README's table and docs/results.md hold the figures of the records in bench/results/, and nothing else."""

import re

import pytest

from bench import results
from paceline.errors import ConfigError
from paceline.measure.record import read_records

FILES = [results.README, results.PAGE]


@pytest.fixture
def copies(tmp_path, monkeypatch):
    """README.md and docs/results.md, to be changed."""
    for name, path in (("README", results.README), ("PAGE", results.PAGE)):
        (tmp_path / path.name).write_text(path.read_text())
        monkeypatch.setattr(results, name, tmp_path / path.name)


def test_the_pages_are_what_the_records_say(capsys):
    assert results.main(["--check"]) == 0, capsys.readouterr().out


def cells(text: str) -> list[re.Match[str]]:
    """The numbers in tables and between the marks."""
    part = text[text.find(results.BEGIN) :] if results.BEGIN in text else text
    shift = len(text) - len(part)
    end = part.find(results.END) if results.BEGIN in text else len(part)
    return [one for one in re.compile(r"\d+\.\d+").finditer(text, shift, shift + end)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
@pytest.mark.parametrize("place", [0, 7, -1])
def test_a_changed_number_is_found(path, place, copies, capsys):
    mutant = results.README if path.name == "README.md" else results.PAGE
    text = mutant.read_text()
    one = cells(text)[place]
    mutant.write_text(text[: one.start()] + str(float(one[0]) + 1) + text[one.end() :])
    assert results.main(["--check"]) == 1
    assert mutant.name in capsys.readouterr().out
    assert results.main([]) == 0
    assert mutant.read_text() == text


def test_a_changed_record_is_found(tmp_path, monkeypatch, copies):
    records = read_records(results.RECORDS)
    monkeypatch.setattr(results, "RECORDS", tmp_path)
    for record in records:
        row = [99.0 if isinstance(cell, float) else cell for cell in record.rows[0]]
        record.model_copy(update={"rows": [row, *record.rows[1:]]}).save(tmp_path)
    assert results.main(["--check"]) == 1


def test_a_table_without_a_heading_is_refused():
    record = read_records(results.RECORDS)[0].model_copy(update={"table": "other"})
    with pytest.raises(ConfigError, match="other"):
        results.page([record])


def test_the_page_of_results_is_short():
    assert results.PAGE.read_text().count("\n") <= 255


def test_every_record_says_where_and_how_it_was_made():
    for record in read_records(results.RECORDS):
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", record.date), record.file
        assert re.match(r"[0-9a-f]{7}", record.commit), record.file
        assert record.versions, record.file
