"""The documentation names every drafter, policy and public name, and links only to what exists."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from bench.method_tables import renewed
from paceline import methods as drafters
from paceline import policy
from paceline.core.interfaces import Drafter, DraftPolicy
from paceline.hf.vision import FAMILIES

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def named_rows(text: str) -> set[str]:
    """All names in code font in the table rows of a page."""
    return {name for row in re.findall(r"^\|.*\|$", text, re.M) for name in re.findall(r"`([^`]+)`", row)}


def test_every_public_name_is_on_the_api_page():
    listed = re.findall(r"^::: paceline\.(\w+)$", (DOCS / "api.md").read_text(), re.M)
    missing = {name for name in paceline.__all__ if name != "PacelineError"} - set(listed)
    assert not missing
    assert len(listed) == len(set(listed))


def test_every_public_name_can_be_imported():
    assert all(getattr(paceline, name) for name in paceline.__all__)


@pytest.mark.parametrize(("module", "kind"), [(drafters, Drafter), (policy, DraftPolicy)])
def test_every_drafter_and_policy_is_in_a_table(module, kind):
    classes = [one for name in module.__all__ if isinstance(one := getattr(module, name), type)]
    names = {one.__name__ for one in classes if issubclass(one, kind) and one is not kind}
    assert names
    assert names <= named_rows((DOCS / "drafters.md").read_text())


def test_every_family_with_a_row_is_in_the_table_of_images():
    table = (DOCS / "vision.md").read_text().partition("| family (`model_type`)")[2].partition("\n\n")[0]
    assert set(FAMILIES) <= set(re.findall(r"\w+", table))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_tables_of_methods_are_those_of_the_package(page):
    text = page.read_text()
    assert text == renewed(text), "run: python -m bench.method_tables"


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as mkdocs names them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_between_pages_lead_somewhere(page):
    for target, _, place in re.findall(r"\]\((?!http)([^)#]*)(#([^)]*))?\)", page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not place or file.suffix != ".md" or place in anchors(file), f"{target}#{place}"


def test_the_files_of_the_methods_exist():
    """The tables of docs/how_it_works.md, whose paths are below paceline/."""
    rows = named_rows((DOCS / "how_it_works.md").read_text())
    files = {name for name in rows if name.endswith((".py", "/")) and not name.startswith("paceline/")}
    assert len(files) > 15
    assert not [name for name in files if not (DOCS.parent / "paceline" / name).exists()]


def test_every_page_is_in_the_menu():
    menu = (DOCS.parent / "mkdocs.yml").read_text()
    assert not [page.name for page in PAGES if f": {page.relative_to(DOCS)}\n" not in menu]


TYPED = ["README.md", "docs/coming_from.md", "docs/quickstart.md"]


def write_code(folder: Path) -> None:
    """The code of each page as a module, and one that is wrong."""
    for page in TYPED:
        code = re.findall(r"```python\n(.*?)```", (DOCS.parent / page).read_text(), re.S)
        ours = [block for block in code if "from transformers" not in block]  # which has no types of its own
        (folder / f"{Path(page).stem}.py").write_text("\n".join(ours))
    (folder / "mutant.py").write_text("from paceline import SamplingParams\nSamplingParams(max_new_tokens=3)\n")


@pytest.mark.slow  # a minute: mypy reads torch and transformers
def test_code_of_the_first_pages_passes_mypy(tmp_path):
    """As `test_code_of_the_first_pages_type_checks`, by the other type checker."""
    write_code(tmp_path)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "."]
    path = {**os.environ, "MYPYPATH": str(DOCS.parent)}
    done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if ": error:" in line]
    mutants = [line for line in found if line.startswith("mutant")]
    assert any("max_new_tokens" in one for one in mutants)
    assert found == mutants


@pytest.mark.more
def test_code_of_the_first_pages_type_checks(tmp_path):
    """As a user with a strict type checker sees it: public names have types, and calls fit them."""
    write_code(tmp_path)
    for library in ("torch", "transformers"):  # whose sources take a minute to read
        (tmp_path / "typings" / library).mkdir(parents=True)
        stub = "# pyright: basic\nfrom typing import Any\ndef __getattr__(name: str) -> Any: ...\n"
        (tmp_path / "typings" / library / "__init__.pyi").write_text(stub)
    settings = {"typeCheckingMode": "strict", "extraPaths": [str(DOCS.parent)], "reportUnusedExpression": False}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [f"{Path(one['file']).stem}: {one['message']}" for one in json.loads(done.stdout)["generalDiagnostics"]]
    mutants = [one for one in found if one.startswith("mutant")]
    assert any("max_new_tokens" in one for one in mutants)
    assert found == mutants
