"""`paceline plot` and `paceline show`."""

import subprocess
import sys
import webbrowser
from pathlib import Path

import pytest

from tests.cli.helpers import answer, paceline, refusal
from tests.measure.view.folders import NASTY, write_folder


@pytest.fixture
def folder(tmp_path) -> str:
    return str(write_folder(tmp_path / "made"))


def test_plot_tells_files_and_what_is_left_out(folder, tmp_path):
    pytest.importorskip("matplotlib")
    got = answer("plot", folder, "--format", "svg", "--out", str(tmp_path / "p"))
    assert {"pass_times", "speedup_by_batch"} == got["left_out"].keys()
    assert sorted(got["files"]) == sorted(str(file) for file in (tmp_path / "p").iterdir())
    assert all(file.endswith(".svg") for file in got["files"])


def test_plots_go_to_the_folder_by_default(folder, tmp_path):
    pytest.importorskip("matplotlib")
    result = paceline("plot", folder, "-f", "png")
    assert result.exit_code == 0
    assert "left out pass_times" in result.stderr
    assert str(tmp_path / "made" / "plots" / "speedup_by_category.png") in result.stdout


def test_show_prints_one_answer(folder):
    result = paceline("show", folder)
    assert result.exit_code == 0
    assert "".join(NASTY).expandtabs() in result.stdout.expandtabs()
    assert "drafted and accepted 10" in result.stdout
    got = answer("show", folder, "--answer", "1")
    assert (got["pieces"], got["drafter"], got["answers"]) == (list(NASTY), "tree", 1)


def test_show_writes_and_opens_the_page(folder, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or True)
    monkeypatch.setenv("DISPLAY", ":0")
    got = answer("show", folder, "--html", "--open")
    file = tmp_path / "made" / "answers.html"
    assert got == {"page": str(file), "answers": 1, "bytes": file.stat().st_size}
    assert opened == [file.as_uri()]
    monkeypatch.delenv("DISPLAY")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert "open the file yourself" in paceline("show", folder, "--html", "--open").stderr
    assert len(opened) == 1, "a browser in a terminal would wait for its keys"


def test_files_and_folders_that_are_the_other(folder):
    pytest.importorskip("matplotlib")
    assert "cannot be replaced. Got: a folder." in refusal("show", folder, "--html", "--out", folder)
    assert "a file in the place of the folder" in refusal("plot", folder, "--out", f"{folder}/summary.json")


@pytest.mark.parametrize(
    ("command", "file"),
    [
        (("show", "--html", "--out", "{folder}/summary.json"), "summary.json"),
        (("show", "--html"), "answers.html"),
        (("plot", "--out", "{folder}"), "speedup_by_category.svg"),
    ],
)
def test_only_their_own_files_are_replaced(folder, command, file):
    if command[0] == "plot":
        pytest.importorskip("matplotlib")
    arguments = [command[0], folder, *(one.format(folder=folder) for one in command[1:])]
    place = Path(folder) / file
    before = place.read_text() if place.exists() else "<html>mine</html>"
    place.write_text(before)
    assert "did not write it" in refusal(*arguments)
    assert place.read_text() == before
    if file != "summary.json":
        place.unlink()
        names = {paceline(*arguments).exit_code for _ in range(2)}
        assert names == {0}
        assert place.read_text() != before


def test_refusals(folder, tmp_path):
    assert "there is no such result" in refusal("show", str(tmp_path / "nowhere"))
    assert "this is no result folder" in refusal("plot", str(tmp_path))
    assert "Expected: 1 to 1" in refusal("show", folder, "--answer", "2")
    assert "add --html" in refusal("show", folder, "--open", code=2)
    assert "either --html or --answer" in refusal("show", folder, "--html", "--answer", "1", code=2)


def test_showing_does_not_wait_for_torch(folder):
    """Reading results loads no model library, so that it is instant."""
    code = "import sys; from paceline.cli import main\n"
    code += f"try: main(['show', {folder!r}, '--html'])\nexcept SystemExit as done: assert not done.code\n"
    code += "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
