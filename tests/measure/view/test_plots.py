"""The images: what they show is what the results hold, and what is missing is told."""

import json
import sys

import pytest

pytest.importorskip("matplotlib")

from paceline.errors import ConfigError
from paceline.measure import plots
from paceline.measure.plots import NoData, draw
from paceline.measure.results import open_results
from tests.measure.view.folders import make_summary, nasty_answer, write_folder

PASSES = {"pass_times": {"1": 0.01, "8": 0.016, "2": 0.01}, "floor_s": 0.004}


@pytest.fixture
def results(tmp_path):
    return [open_results(write_folder(tmp_path / "made", make_summary(**PASSES)))]


def test_speedup_bars_and_intervals(results):
    figure = plots.speedup_by_category(results)
    (axes,) = figure.axes
    assert [round(bar.get_width(), 3) for bar in axes.patches] == [2.5, 0.9, 1.9]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["math", "chat", "all"]
    spans = [list(line.get_xdata()) for line in axes.lines]
    assert spans == [[2.0, 3.0], [1.7, 2.2], [1.0, 1.0]]  # no interval for chat; then the line of plain decoding
    assert "A CPU, 1 thread · 2026-01-02" in figure.legends[0].get_title().get_text()


def test_acceptance_has_its_counts(results):
    (axes,) = plots.acceptance_by_position(results).axes
    assert list(axes.lines[0].get_ydata()) == [0.8, 0.5, 0.2]
    assert [one.get_text() for one in axes.texts][:3] == ["40", "20", "10"]


def test_pass_times_are_relative_and_sorted(results):
    (axes,) = plots.pass_times(results).axes
    assert list(axes.lines[0].get_xdata()) == [1, 2, 8]
    assert list(axes.lines[0].get_ydata()) == pytest.approx([1.0, 1.0, 1.6])
    assert list(axes.lines[1].get_ydata()) == pytest.approx([0.4, 0.4])


def test_a_doctor_file_gives_pass_times(tmp_path):
    file = tmp_path / "doctor.json"
    file.write_text(json.dumps({"model": "m", "bandwidth": 1e10, **PASSES}))
    files, left_out = draw([open_results(file)], tmp_path / "out")
    assert [one.name for one in files] == ["pass_times.png", "pass_times.svg"]
    assert set(left_out) == set(plots.FIGURES) - {"pass_times"}


def test_batches_join_into_lines(tmp_path):
    runs = [{**make_summary()["runs"][0], "batch": batch, "speedup": 2 / batch} for batch in (4, 1)]
    found = [open_results(write_folder(tmp_path / str(n), make_summary(runs=[run]))) for n, run in enumerate(runs)]
    figure = plots.speedup_by_batch(found)
    assert list(figure.axes[0].lines[0].get_xdata()) == [1, 4]
    with pytest.raises(NoData, match="two batch sizes"):
        plots.speedup_by_batch(found[:1])


def test_draw_writes_both_formats_the_same_each_time(results, tmp_path):
    files, left_out = draw(results, tmp_path / "a")
    again, _ = draw(results, tmp_path / "b")
    assert {one.suffix for one in files} == {".png", ".svg"}
    assert list(left_out) == ["speedup_by_batch"]
    for one, other in zip(files, again, strict=True):
        assert one.read_bytes() == other.read_bytes()
        head = one.read_bytes()[:8]
        assert head.startswith(b"\x89PNG" if one.suffix == ".png" else b"<?xml")


def test_no_screen_is_asked_for(results):
    plots.speedup_by_category(results)
    assert "matplotlib.pyplot" not in sys.modules  # which would choose a backend by the display


def test_empty_results_are_refused(tmp_path):
    plain = nasty_answer(side="plain")
    folder = write_folder(tmp_path / "none", {"model": "m"}, [plain])
    with pytest.raises(ConfigError, match="no run has a speed-up"):
        draw([open_results(folder)], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_matplotlib_missing_names_the_extra(results, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"paceline\[plots\]"):
        draw(results, tmp_path / "out")


@pytest.mark.parametrize("content", ["", "[]", "{", '{"runs": [1]}', '{"pass_times": {"x": 1}}'])
def test_broken_summaries_are_named(tmp_path, content):
    (tmp_path / "summary.json").write_text(content)
    with pytest.raises(ConfigError, match=r"summary\.json' cannot be read"):
        open_results(tmp_path)
