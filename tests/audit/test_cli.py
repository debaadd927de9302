"""`paceline check URL`: its exit codes, its reports, Ctrl-C, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
import time
from xml.etree import ElementTree

import pytest

from paceline.errors import CacheFull
from tests.cli.conftest import is_heard  # noqa: F401  a fixture
from tests.cli.helpers import answer, paceline, refusal
from tests.server.helpers import choosing_llm, listening
from tests.tiny import tiny_model

from .fake import serving

QUICK = ("--num-prompts", "2", "--max-tokens", "6", "--repeats", "1", "--timings", "0", "-t", "0")


def test_a_server_that_passes(tmp_path):
    files = [tmp_path / f"audit{suffix}" for suffix in (".md", ".html", ".xml")]
    with serving() as (url, _):
        result = paceline("check", url, *QUICK, *(word for file in files for word in ("--report", str(file))))
    assert result.exit_code == 0, result.output
    assert "passed" in result.stdout
    assert all(str(file) in result.stdout for file in files)
    assert ElementTree.parse(files[2]).getroot().get("failures") == "0"


def test_a_difference_is_shown_and_fails():
    with serving(drafts=2) as (url, _):
        result = paceline("check", url, *QUICK)
        assert result.exit_code == 1
        assert "token 3, after:" in result.stdout
        assert "2 different of 2 answers" in result.stdout
        told = answer("check", url, *QUICK, code=1)
    assert (told["passed"], told["complete"]) == (False, True)
    assert told["comparisons"][-1]["counts"]["different"] == 2


def test_fail_on():
    with serving(flat=True, drafts=2) as (url, _):
        assert paceline("check", url, *QUICK).exit_code == 0
        assert paceline("check", url, *QUICK, "--fail-on", "near-tie").exit_code == 1


def test_key_comes_from_the_environment_and_is_never_told(tmp_path):
    report = tmp_path / "audit.md"
    with serving(key="sk-secret") as (url, _):
        words = ("check", url, *QUICK, "--report", str(report))
        result = paceline(*words, env={"OPENAI_API_KEY": "sk-secret"})
        assert result.exit_code == 0, result.output
        assert "sk-secret" not in result.output + report.read_text()
        result = paceline(*words, env={"OPENAI_API_KEY": "sk-wrong"})
    assert result.exit_code == 2
    assert "sk-wrong" not in result.output
    assert "--api-key" in result.stderr


def test_key_of_one_server_does_not_reach_another():
    with serving(key="sk-secret") as (url, _), serving(key="sk-secret") as (other, fake):
        assert "refuses the key" in refusal("check", url, other, *QUICK, "--api-key", "sk-secret", code=2)
        assert not fake.asked
        assert paceline("check", url, other, *QUICK, *("--api-key", "sk-secret") * 2).exit_code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("http://127.0.0.1:1",), "no server answers"),
        (("http://127.0.0.1:1", "x", "--against", "y"), "give the other side once"),
        (("http://127.0.0.1:1", "--raw", "--chat"), "not both"),
        (("http://127.0.0.1:1", "--drafter", "lookup"), "leave out the drafter"),
        (("http://127.0.0.1:1", "--report", "a.pdf"), "of no such kind"),
        (("http://127.0.0.1:1", "-t", "0.5", "-t", "1"), "one --temperature above 0"),
        (("http://127.0.0.1:1", "--prompts", "missing.jsonl"), "missing.jsonl"),
        (("http://127.0.0.1:1", "--card", "missing.json"), "missing.json"),
        (("http://user:secret@host",), "holds a name or a key"),
        (("smollm2-135m", "http://127.0.0.1:1"), "needs a URL as the first"),
        (("smollm2-135m", "--report", "a.md", "--repeats", "3"), "--repeats, --report"),
    ],
)
def test_refusals(words, said):
    told = refusal("check", *words, code=2)
    assert said in told
    assert "secret" not in told


def test_cards(tmp_path):
    card = tmp_path / "card.json"
    card.write_text('{"mean_acceptance_length": 3.5}')
    with serving() as (url, _):
        result = paceline("check", url, *QUICK, "--card", str(card))
        assert result.exit_code == 1
        assert "below the 3.50 of the card" in result.stdout
        card.write_text('{"mean_acceptance_length": "3"}')
        assert "mean_acceptance_length" in refusal("check", url, *QUICK, "--card", str(card), code=2)


def test_raw_prompts(tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\n")
    with serving() as (url, fake):
        assert paceline("check", url, *QUICK, "--prompts", str(prompts)).exit_code == 0
        assert {body.get("prompt") for body in fake.asked} == {"one", "two"}
        assert paceline("check", url, *QUICK, "--prompts", str(prompts), "--chat").exit_code == 0
        assert "messages" in fake.asked[-1]
        assert paceline("check", url, *QUICK, "--raw").exit_code == 0
        assert isinstance(fake.asked[-1]["prompt"], str)


def test_reports_that_cannot_be_written(tmp_path, monkeypatch):
    (notes := tmp_path / "notes.md").write_text("my notes")
    with serving() as (url, fake):
        assert "did not write it" in refusal("check", url, *QUICK, "--report", str(notes), code=2)
        assert not fake.asked

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("paceline.audit.report.write_report", full)
        result = paceline("check", url, *QUICK, "--report", str(tmp_path / "new.md"))
    assert result.exit_code
    assert "passed" in result.stdout


def test_an_error_of_another_kind_keeps_what_was_found(tmp_path, monkeypatch):
    def full(*_):
        raise CacheFull("no room")

    monkeypatch.setattr("paceline.audit.audit.Audit._speed", full)
    report = tmp_path / "audit.md"
    with serving() as (url, _):
        words = ("check", url, *QUICK, "--timings", "1", "--report", str(report))
        result = paceline(*words)
    assert result.exit_code
    assert "with drafts, again: 2 identical" in result.stdout
    assert "not complete: no room" in report.read_text()


@pytest.mark.more
@pytest.mark.usefixtures("is_heard")
def test_ctrl_c_keeps_what_was_found(tmp_path):
    report = tmp_path / "audit.xml"
    with serving(broken=dict.fromkeys(range(4, 1000), "drips")) as (url, fake):
        words = ("check", url, *QUICK, "--report", str(report), "--json")
        run = subprocess.Popen([sys.executable, "-m", "paceline", *words], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, env=os.environ)  # fmt: skip
        while len(fake.asked) < 5:
            assert run.poll() is None
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=240)
    assert run.returncode == 130, err
    told = json.loads(out)
    assert told["stopped"] == "stopped by Ctrl-C"
    assert "Traceback" not in err
    assert ElementTree.parse(report).find(".//failure").text == "stopped by Ctrl-C"


@pytest.mark.timeout(600)
def test_own_server_passes_against_itself_and_a_local_model(tmp_path):
    """The real server, with a tiny model; the same weights here."""
    llm = choosing_llm()
    tiny_model("llama", max_position_embeddings=2048).save_pretrained(tmp_path)
    llm.tokenizer.save_pretrained(tmp_path)
    common = ("--num-prompts", "2", "--max-tokens", "8", "--repeats", "1", "--samples", "10")
    with listening(llm) as (url, *_):
        told = answer("check", url, *common, "--timings", "1", "-t", "0")
        assert told["passed"]
        assert [side["engine"] for side in told["sides"].values()] == ["Paceline", "Paceline"]
        assert told["drafts"][0]["passes"] > 0
        told = answer(
            "check",
            url,
            str(tmp_path),
            *common,
            "--timings",
            "0",
            "--dtype",
            "float32",
        )
    assert told["passed"], told["failures"]
    assert any("against the law of" in test["name"] for test in told["tests"])
