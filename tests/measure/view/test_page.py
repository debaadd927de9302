"""The page: whole in one file, safe whatever the tokens hold, and the same text as the answer."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from importlib import resources

import pytest
from markupsafe import Markup

from paceline.errors import ConfigError
from paceline.measure.page import ENVIRONMENT, chosen, page
from paceline.measure.results import open_results
from tests.measure.view.folders import NASTY, PROMPT, make_round, make_summary, nasty_answer, write_folder

VOID = {"meta", "br", "img", "link", "input", "rect", "path"}


class Reader(HTMLParser):
    """What a browser would make of the page: its elements, and the text of the spans of each answer."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict]] = []
        self.open: list[tuple[str, dict]] = []
        self.spans: list[tuple[str, str]] = []
        self.scripts: list[tuple[dict, str]] = []
        self.policy = ""
        self.feed(text)
        self.close()
        assert not self.open, "every element is closed"

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append((tag, given))
        if tag == "meta" and given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"]
        if self._in_text() and tag == "span":
            self.spans.append((given["class"], ""))
        if tag == "script":
            self.scripts.append((given, ""))
        if tag not in VOID:
            self.open.append((tag, given))

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open and self.open[-1][0] == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif self._in_text() and self.spans:
            self.spans[-1] = (self.spans[-1][0], self.spans[-1][1] + data)

    def _in_text(self):
        return any(given.get("class") == "text" for _, given in self.open)


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "made")


@pytest.fixture
def read(folder):
    return Reader(page(open_results(folder)))


def test_nothing_is_loaded(read):
    """No element loads, and the policy forbids what could: a page from someone else's results is only text."""
    loading = {"src", "srcset", "data", "poster", "action", "formaction", "background", "xlink:href"}
    assert not [tag for tag, _ in read.tags if tag in ("link", "img", "iframe", "object", "embed", "base", "form")]
    for tag, given in read.tags:
        assert not loading & given.keys(), (tag, given)
        assert not [name for name in given if name.startswith("on")], (tag, given)
        assert given.get("href", "#").startswith("#")
    style = "".join((resources.files("paceline.measure") / f"{name}.css").read_text() for name in ("colours", "page"))
    assert "url(" not in style
    assert "@import" not in style
    assert "default-src 'none'" in read.policy


def test_no_address_but_in_texts(folder):
    text = page(open_results(folder)).replace(PROMPT.split()[-1], "")
    assert "://" not in text


def test_the_policy_allows_our_script_and_no_other(read):
    data, ours = read.scripts
    digest = base64.b64encode(hashlib.sha256(ours[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in read.policy
    assert data[0]["type"] == "application/json"


def test_spans_are_the_answer(read):
    assert [text for _, text in read.spans] == list(NASTY)
    assert [name.split()[0] for name, _ in read.spans] == nasty_answer()["origins"]
    assert [name.endswith("empty") for name, _ in read.spans] == [text == "" for text in NASTY]


def test_data_is_what_was_written(read):
    (one,) = json.loads(read.scripts[0][1])
    given = nasty_answer()
    assert [r["texts"] for r in one["rounds"]] == [r["pieces"] for r in given["rounds"]]
    assert [r["parents"] for r in one["rounds"]] == [r["parents"] for r in given["rounds"]]
    assert one["rounds"][0]["ms"] == [1, 20, 1]
    assert sum(r["num_emitted"] for r in one["rounds"]) == len(one["ids"]) == len(one["origins"])


@pytest.mark.parametrize("text", ["</script>", "<!--<script>", "<b>", "\u2028"])
def test_json_cannot_leave_its_script(text):
    made = ENVIRONMENT.from_string("{{ value|tojson }}").render(value=[text])
    assert "<" not in made
    assert json.loads(made) == [text]


def test_unescaped_pieces_would_be_noticed(folder, monkeypatch):
    """The mutant: a page whose tokens are pasted as they are."""
    monkeypatch.setattr("paceline.measure.page.escape", lambda text: text)
    with pytest.raises(AssertionError):
        test_spans_are_the_answer(Reader(page(open_results(folder))))


def test_unescaped_data_would_be_noticed(folder, monkeypatch):
    monkeypatch.setitem(ENVIRONMENT.filters, "tojson", lambda value: Markup(json.dumps(value)))
    monkeypatch.setattr(ENVIRONMENT, "cache", None)  # of compiled templates
    with pytest.raises((AssertionError, ValueError)):
        test_data_is_what_was_written(Reader(page(open_results(folder))))


def test_header_and_facts(folder):
    text = page(open_results(folder))
    assert "mod&lt;el&gt;" in text
    assert "1.90x <small>1.70 to 2.20</small>" in text
    assert "2 identical" in text
    assert "<b>2.00x</b> of plain decoding" in text
    assert "identical to plain" in text
    assert "1 taller cut off" in text  # a round of 401 ms among some of 22


def test_peers_stand_in_the_header(tmp_path):
    peer = {"side": "llama.cpp:plain", "over_plain": {"speedup": 1.25}, "tokens_per_s": 50.0}
    text = page(open_results(write_folder(tmp_path / "peers", make_summary(peers=[peer]))))
    assert '<th scope="row">llama.cpp:plain</th><td>1.25x</td>' in text


def test_ids_stand_in_for_missing_texts(tmp_path):
    bare = nasty_answer(pieces=[], rounds=[make_round(parents=(-1, 0), path=(1,), emitted=13)])
    results = open_results(write_folder(tmp_path / "bare", answers=[bare]))
    (one,) = chosen(results.answers())
    assert one.texts[:2] == ("[100]", "[101]")
    assert one.rounds[0].texts == ("[10]", "[11]")
    assert "[112]" in page(results)


def test_results_without_rounds_are_refused(tmp_path):
    peer = nasty_answer(side="peer:plain", rounds=[], token_ids=[], origins=[], sources=[], pieces=[])
    results = open_results(write_folder(tmp_path / "peer", make_summary(), [peer]))
    with pytest.raises(ConfigError, match="no answer of Paceline"):
        page(results)


def test_repeats_are_shown_once(tmp_path):
    results = open_results(write_folder(tmp_path / "twice", answers=[nasty_answer(), nasty_answer(repeat=1)]))
    assert len(chosen(results.answers())) == 1


@pytest.mark.parametrize("broken", [{"rounds": [make_round() | {"parents": [-1, 2, 1]}]}, {"origins": ["plain"]}])
def test_a_broken_answer_is_named(tmp_path, broken):
    bad = nasty_answer(**broken)
    with pytest.raises(ConfigError, match=r"line 1 of .*answers\.jsonl"):
        open_results(write_folder(tmp_path / "bad", answers=[bad])).answers()


def rules(style: str, width: int) -> str:
    """The rules for screens of this width, without those for all."""
    blocks = re.findall(r"@media ([^{]+)\{((?:[^{}]*\{[^{}]*\})+)\s*\}", style)
    return "".join(
        body for asked, body in blocks if any(width <= int(one) for one in re.findall(r"max-width: (\d+)", asked))
    )


def test_a_phone_pins_nothing_by_itself_and_less_than_a_third_of_it_when_asked():
    """In a browser: `tests/live/page.py`."""
    phone = rules((resources.files("paceline.measure") / "page.css").read_text(), 390)
    assert "#round:not(.is-held) { position: static;" in phone
    assert "nav { position: static;" in phone
    (most,) = re.findall(r"#round\.is-held \{ max-height: (\d+)vh", phone)
    assert int(most) < 33


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_script_is_well_formed():
    with resources.as_file(resources.files("paceline.measure") / "page.js") as file:
        subprocess.run(["node", "--check", str(file)], check=True, timeout=60)
