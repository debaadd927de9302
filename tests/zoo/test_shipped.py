"""The trained heads of this checkout: one is recommended for a target, and pages and picture name its drafter."""

import json
import re
from pathlib import Path

import paceline_zoo
import pytest

from paceline.config import parse
from paceline.zoo.packaged import packaged_heads

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def heads():
    return [head for head in packaged_heads() if head.folder.parent == paceline_zoo.FOLDER]


def test_one_head_is_recommended_for_smollm2(heads):
    best = [head for head in heads if head.is_default]
    assert {head.name for head in best} == set(paceline_zoo.DEFAULTS)
    assert [head.target_name for head in best] == ["smollm2-135m"]
    assert len({head.fingerprint for head in best}) == len(best)


def test_the_drafter_of_the_demo_has_the_recommended_head(heads):
    for head in heads:
        if head.is_default:
            assert head.demo == paceline_zoo.DEFAULTS[head.name]
            assert f"head:{head.name}" in parse(head.demo).name.split("+")


def test_training_owns_neither(heads):
    """Records are written anew by each training."""
    for head in heads:
        assert not {"default", "demo"} & json.loads((head.folder / "training.json").read_text()).keys()


@pytest.mark.parametrize("page", ["docs/assets/demo.svg", "docs/quickstart.md", "docs/heads.md", "docs/drafters.md"])
def test_pages_show_the_recommended_drafter(page):
    """In a picture, text is cut into pieces, and spaces are others."""
    shown = re.sub(r"<[^>]*>", "", (ROOT / page).read_text())
    assert any(drafter in shown or f"head:{name}" in shown for name, drafter in paceline_zoo.DEFAULTS.items())


def test_the_changelog_names_the_method_of_the_demo(heads):
    (best,) = (head for head in heads if head.is_default)
    (line,) = re.findall(r"`paceline demo` drafts with (.*)", (ROOT / "CHANGELOG.md").read_text())
    assert best.method in line.lower().replace("-", "")
