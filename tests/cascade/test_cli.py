"""`paceline calibrate` and `paceline show --cascade`."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from paceline.cascade import Cascade, Reason
from paceline.cascade.report import Case, ReportExample, find_examples, kinds_of, page, prompt_html, tokens
from paceline.eval.results import token_texts
from paceline.system.files import claimed
from tests.cascade.common import PARAMS, PROMPTS, large, made_up, perturbed, small
from tests.cli.helpers import answer, paceline, refusal, save
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("unchecked_types")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("pair")
    return save(folder / "small", perturbed(0.002)), save(folder / "large", tiny_model("llama"))


@pytest.fixture
def prompts(tmp_path) -> str:
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": " ".join(f"w{token}" for token in ids if token > 3)} for ids in PROMPTS[:16]]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_help_has_an_example():
    assert "Example:" in paceline("calibrate", "--help").stdout


def test_calibrate_then_show(models, prompts, tmp_path):
    out = str(tmp_path / "calib.json")
    options = ("--prompts", prompts, "--max-disagreement", "0.2", "--out", out, "--short-limit", "8")
    told = paceline("calibrate", *models, *options, "--numerics", "fast")
    assert told.exit_code == 0, told.output
    assert "Promised: at most 20% of all prompts" in told.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calib.json", "calib.svg", "prompts.jsonl"]
    got = answer("calibrate", *models, *options, "--numerics", "fast", "--num-prompts", "14", "--short-limit", "1")
    assert got["prompts"] == 14
    assert (got["max_disagreement"], got["confidence"], got["signal"]) == (0.2, 0.95, "min_prob")
    assert got["differ"] == 0 <= got["coverage"] <= got["ended"] / 14, "of 14 not one may differ"
    assert Path(got["picture"]).exists()
    shown = answer("show", "--html", "--cascade", out, "--prompts", prompts, "--num-prompts", "2", "--max-tokens", "12")
    assert Path(shown["page"]) == tmp_path / "calib.html"
    assert shown["cases"].keys() == {case.value for case in Case}
    assert any(index is not None for index in shown["cases"].values())
    Path(shown["page"]).write_text("<html>mine</html>")
    again = ("show", "--html", "--cascade", out, "--prompts", prompts)
    assert "did not write it" in refusal(*again)
    Path(shown["page"]).unlink()
    other = refusal("show", "--html", "--cascade", out, "-p", prompts, "--small", models[1])
    assert "another small model" in other


def test_refusals_come_before_loading(models, prompts, tmp_path):
    assert "add 283 prompts" in refusal("calibrate", *models, "--prompts", prompts, "-o", str(tmp_path / "c.json"))
    most = ("--prompts", prompts, "--max-disagreement", "0.2")
    assert "unknown signal" in refusal("calibrate", *models, *most, "--signal", "guess", code=2)
    assert "is a .json file" in refusal("calibrate", *models, *most, "--out", str(tmp_path / "c.txt"))
    (tmp_path / "mine.json").write_text("{}")
    assert "did not write" in refusal("calibrate", *models, *most, "--out", str(tmp_path / "mine.json"))
    (tmp_path / "c.svg").write_text("<svg/>")
    assert "c.svg" in refusal("calibrate", *models, *most, "--out", str(tmp_path / "c.json"))
    with claimed(tmp_path / "d.json"):
        assert "another run" in refusal("calibrate", *models, *most, "--out", str(tmp_path / "d.json"))
    assert "--cascade takes --html" in refusal("show", "--cascade", "x.json", code=2)
    assert "nothing to show" in refusal("show", code=2)
    assert "go with --cascade" in refusal("show", str(tmp_path), "--prompts", prompts, code=2)


class _Reader(HTMLParser):
    """What a page shows, and everything in it that could reach outside."""

    def __init__(self, text: str):
        super().__init__()
        self.text, self.spans, self.outside = "", list[tuple[str, str]](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag in ("script", "link", "iframe", "object"):
            self.outside.append(tag)
        self.outside += [
            value for key, value in attrs if key in ("src", "href", "srcset") and not value.startswith("data:")
        ]
        if tag == "span":
            self.spans.append((given.get("class", ""), given.get("title", "")))

    def handle_data(self, data):
        self.text += data


def all_four():
    cascade = Cascade(small(), large(), made_up(0.009), allow_lossy=True, audit_share=0.0)
    return cascade, find_examples(cascade, PROMPTS, PARAMS)


def test_the_four_cases_on_one_page():
    cascade, found = all_four()
    assert all(found.values()), found
    assert found[Case.CORRECTED].output.small.token_ids != found[Case.CORRECTED].output.token_ids
    assert found[Case.AGREED].output.small.token_ids == found[Case.AGREED].output.token_ids
    assert found[Case.ALONE].output.reason is Reason.CONFIDENT
    text = page(cascade, found, 300)
    seen = _Reader(text)
    assert not seen.outside
    assert not re.search(r"url\(|@import", text)
    kinds = {name for name, _ in seen.spans}
    assert {"small", "drafted", "recovered", "rejected"} <= kinds
    assert all(title for _, title in seen.spans), "readable without colour"
    for one in found.values():
        assert "".join(token_texts(large().tokenizer, one.output.token_ids, False)) in seen.text
        assert len(kinds_of(one.output)) == len(one.output.token_ids)
    assert "never called" in text
    empty = page(cascade, {**found, Case.LONG: None}, 300)
    assert "None of 300 prompts" in empty


def test_nothing_in_a_prompt_or_an_answer_becomes_markup():
    nasty = "<script>alert(1)</script>&\"'"
    assert tokens([nasty], ["drafted"]).count("<") == 2
    cascade, found = all_four()
    one = found[Case.ALONE]
    text = page(cascade, {Case.ALONE: ReportExample(0, nasty, one.output)}, 1)
    assert "<script" not in text
    assert nasty in _Reader(text).text


def test_images_are_inside_the_page():
    from PIL import Image

    chat = [{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (8, 8), "red")},
                                         {"type": "text", "text": "?"}]}]  # fmt: skip
    told = prompt_html(chat)
    assert told.startswith('<img alt="image 1 of the prompt" src="data:image/png;base64,')
    assert not _Reader(told).outside
    assert prompt_html("a < b") == "<pre>a &lt; b</pre>\n"


def test_a_model_that_lies_elsewhere_can_be_named(models, prompts, tmp_path):
    out = tmp_path / "calib.json"
    made_up(0.4).save(out)
    assert "does not say where" in refusal("show", "--html", "--cascade", str(out), "--prompts", prompts)
