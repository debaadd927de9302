"""Records: what a table says of itself is kept with it, and damaged ones are refused."""

import json

import pytest

from paceline.errors import ConfigError
from paceline.measure.record import measured_on, read_records, record_of

ABOUT = {"isa": "avx2", "cores": 2, "cpu": "AMD EPYC", "gpu": None, "paceline": "0.1", "torch": "2.13.0"}
ABOUT |= {"transformers": "5.23.0", "git_commit": "5cd19dd0a1b2", "git_dirty": True, "time": "2026-11-28T10:00:00"}
TABLE = {"table": "drafters", "title": "Speed-ups", "model": "smollm2-135m", "columns": {"drafter": "", "all": "x"}}


def made(**changes):
    table = {**TABLE, "rows": [["lookup", 1.3], ["none", None]], **changes}
    return record_of(ABOUT, "two Zen 3 cores", "make bench", **table)


def test_what_is_written_is_read(tmp_path):
    record = made()
    assert record.save(tmp_path).name == "drafters-two-zen-3-cores.json"
    assert read_records(tmp_path) == [record]
    assert (record.commit, record.date, record.machine.isa) == ("5cd19dd and changes", "2026-11-28", "avx2")
    assert record.values["lookup"]["all"] == 1.3


def test_every_fact_of_a_machine_is_known():
    assert measured_on().keys() >= {*ABOUT}


def test_a_row_has_a_cell_for_each_column():
    with pytest.raises(ValueError, match="1 cells of 2 columns"):
        made(rows=[["lookup"]])


@pytest.mark.parametrize(
    ("change", "told"), [({"rows": 3}, "rows"), ({"colour": "red"}, "colour"), ({"table": "other"}, "another record")]
)
def test_a_damaged_record_is_refused(tmp_path, change, told):
    path = made().save(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=told):
        read_records(tmp_path)
