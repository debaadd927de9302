"""The page at /: it loads nothing from elsewhere and runs its own script alone; what it makes of Markdown is text."""

import asyncio
import json
import re
import shutil
import subprocess
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pytest

from paceline.server.page import SCRIPTS
from tests.server.helpers import server, tiny_llm

FOLDER = resources.files("paceline.server.page")
SPACE = "http://www.w3.org/2000/svg"  # a name, which nothing loads
NODE = shutil.which("node")
# What could make markup, or a program, of a text; and what could send something elsewhere.
FORBIDDEN = r"""innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|createContextualFragment|\beval\b
|\bFunction\(|import\(|setAttribute\("(?!aria-|role)|sendBeacon|WebSocket|EventSource|XMLHttpRequest|Worker|fetch\((?!path,)"""


def get():
    async def ask():
        async with server() as client:
            return await client.get("/"), (await client.get("/v1/models")).json()["data"][0]

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def answer():
    return get()[0]


def parts(text: str) -> tuple[str, str]:
    """Its style and its script."""
    (style,), (script,) = (re.findall(f"<{tag}>(.*?)</{tag}>", text, re.S) for tag in ("style", "script"))
    return style, script


def test_the_policy_allows_its_own_style_and_script_alone(answer):
    rules = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    for name, text in zip(("style-src", "script-src"), parts(answer.text), strict=True):
        assert rules[name] == f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert (rules["connect-src"], rules["img-src"]) == ("'self'", "data:")
    assert rules["require-trusted-types-for"] == "'script'", "so that a forgotten innerHTML would raise"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_makes_no_markup_of_texts(name):
    text = (FOLDER / f"{name}.js").read_text()
    assert not re.search(FORBIDDEN.replace("\n", ""), text)
    assert text.count("\n") <= 400


@pytest.mark.parametrize(
    "mutant", ["x.innerHTML = y", "new Function(x)", 'x.setAttribute("onclick", y)', 'fetch("https://a")', "eval(x)"]
)
def test_a_script_that_does_would_be_noticed(mutant):
    assert re.search(FORBIDDEN.replace("\n", ""), mutant)


def test_every_script_is_part_of_the_page(answer):
    files = {file.name for file in FOLDER.iterdir() if file.name.endswith(".js")}
    assert files == {f"{name}.js" for name in SCRIPTS}
    assert all((FOLDER / name).read_text() in parts(answer.text)[1] for name in files)


def test_it_loads_nothing_from_elsewhere(answer):
    text = answer.text.replace(SPACE, "")
    assert "{{" not in text
    assert ".drafted {" in text
    assert not re.search(r"https?://|<img|<iframe|url\(|@import| on[a-z]+=", text)
    assert set(re.findall(r'<link [^>]*href="(\w+:)', text)) == {"data:"}


class Names(HTMLParser):
    """Ids, and the controls without a name for those who cannot see them."""

    def __init__(self, text: str):
        super().__init__()
        self.ids, self.bare, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids += [given["id"]] if "id" in given else []
        if tag in ("button", "input", "select", "textarea") and "aria-label" not in given and "hidden" not in given:
            self.bare.append([tag, given, "label" in self.open])
        self.open += [tag] if tag in ("label", "button") else []

    def handle_endtag(self, tag):
        if tag in ("label", "button"):
            self.open.remove(tag)

    def handle_data(self, data):
        if "button" in self.open and data.strip() and self.bare:
            self.bare[-1][2] = True


def test_ids_are_unique_and_controls_have_names(answer):
    names = Names(answer.text.partition("<script>")[0])
    assert len(names.ids) == len(set(names.ids))
    assert [given for tag, given, is_named in names.bare if not is_named and given.get("id") != "yes"] == []
    used = set(re.findall(r'\$\("([\w-]+)"\)', parts(answer.text)[1]))
    assert used <= {*names.ids}, "elements that the script looks for"


def test_models_tell_the_page_what_they_can_do():
    model = get()[1]
    assert model["drafters"] == list(tiny_llm().drafters)
    assert model["input_modalities"] == ["text"]


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_the_script_is_well_formed(answer, tmp_path):
    (tmp_path / "page.js").write_text(parts(answer.text)[1])
    subprocess.run([NODE, "--check", tmp_path / "page.js"], check=True, timeout=60)


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_markdown():
    here = Path(__file__).parent
    done = subprocess.run([NODE, here / "markdown.mjs", str(FOLDER)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["failed"] == []
    assert told["passed"] > 200
