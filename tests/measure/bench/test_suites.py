"""Suites are read as they are published, chosen evenly, and refused with the line that is wrong."""

import gzip
import hashlib
import json
from functools import partial

import pytest

from paceline.errors import ConfigError
from paceline.measure import suites
from paceline.measure.prompts import EXAMPLES
from paceline.measure.suites import BUILT_IN, SUITES, Question, choose, hash_questions, read_suite
from paceline.system.web import fetch
from tests.system.web import serving


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(json.dumps(row) for row in rows) + "\n\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


SPEC_BENCH = [
    {"question_id": 82, "category": "writing", "turns": ["Draft an email.", "Now critique it."]},
    {"question_id": 90, "category": "math", "turns": ["1 + 1?", "Twice that?"]},
    {"question_id": 161, "category": "translation", "turns": ["Translate: Guten Tag."]},
]
ROWS = {
    "spec_bench": ("question.jsonl", SPEC_BENCH, ["mt_bench", "mt_bench", "translation"]),
    "mt_bench": ("question.jsonl", SPEC_BENCH[:2], ["writing", "math"]),
    "humaneval": ("HumanEval.jsonl.gz", [{"task_id": "HumanEval/0", "prompt": "def f():\n"}], ["humaneval"]),
    "gsm8k": ("test.jsonl", [{"question": "1 + 1?", "answer": "#### 2"}], ["gsm8k"]),
    "mbpp": ("test.jsonl", [{"text": "Write f.", "task_id": 11, "code": "..."}], ["mbpp"]),
    "mmspec": ("test.jsonl", [{"turns": ["Where?"], "category": "Music", "topic": "hard"}], ["hard"]),
}


@pytest.mark.parametrize("suite", ROWS)
def test_published_formats(tmp_path, suite):
    name, rows, categories = ROWS[suite]
    file = write(tmp_path / "data" / suite / name, rows)
    questions = read_suite(suite, tmp_path / "data")
    assert [one.category for one in questions] == categories
    assert questions == read_suite(suite, file.parent) == read_suite(suite, file)  # the suite's own folder, its file
    assert (questions[0].chat is None) == (suite == "humaneval")  # a prompt is continued, a question is asked


def test_a_suite_is_downloaded_only_when_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    content = json.dumps({"question": "1 + 1?"}).encode()
    with serving({"/test.jsonl": content, "/other.jsonl": b"changed"}) as address:
        monkeypatch.setattr(suites, "fetch", partial(fetch, allow_private=True))
        known = SUITES["gsm8k"]._replace(url=f"{address}/test.jsonl", sha256=hashlib.sha256(content).hexdigest())
        monkeypatch.setitem(SUITES, "gsm8k", known)
        with pytest.raises(ConfigError, match=r"add --download to fetch http.*grade-school-math"):
            read_suite("gsm8k")
        assert not (tmp_path / "cache").exists(), "nothing is fetched silently"
        monkeypatch.setitem(SUITES, "gsm8k", known._replace(url=f"{address}/other.jsonl"))
        with pytest.raises(ConfigError, match="is not the file that was published"):
            read_suite("gsm8k", download=True)
        monkeypatch.setitem(SUITES, "gsm8k", known)
        (one,) = read_suite("gsm8k", download=True)
        assert one.turns == ("1 + 1?",)
    assert read_suite("gsm8k") == [one], "without a network, once it is here"
    with pytest.raises(ConfigError, match=r"MMSpec.*--data"):
        read_suite("mmspec", download=True)


def test_turns_are_a_conversation(tmp_path):
    write(tmp_path / "question.jsonl", SPEC_BENCH)
    one = read_suite("spec_bench", tmp_path)[0]
    assert (one.id, one.topic) == ("82", "writing")
    assert one.messages([]) == [{"role": "user", "content": "Draft an email."}]
    assert one.messages(["Dear all,"]) == [
        {"role": "user", "content": "Draft an email."},
        {"role": "assistant", "content": "Dear all,"},
        {"role": "user", "content": "Now critique it."},
    ]


def test_plain_lines(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\u2028there"}]
    rows = ["just text", {"prompt": "p", "id": 7, "category": "code"}, {"messages": chat}]
    bare, coded, asked = read_suite(str(write(tmp_path / "mine.jsonl", rows)))
    assert (bare.turns, bare.chat, bare.category, bare.id) == (("just text",), None, "mine", "1")
    assert (coded.category, coded.id) == ("code", "7")
    assert asked.messages([]) == chat


def test_plain_text_is_gone_on_from(tmp_path):
    (tmp_path / "mine.txt").write_text("one line\n\n{another\n")
    lines = read_suite(str(tmp_path / "mine.txt"))
    assert [(one.turns, one.chat, one.id, one.category) for one in lines] == [
        (("one line",), None, "1", "mine"),
        (("{another",), None, "3", "mine"),
    ]


def test_built_in():
    assert [one.turns[0] for one in read_suite(BUILT_IN)] == [example.prompt for example in EXAMPLES]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{bad", "not valid JSON"),
        ("[1]", "not a JSON object"),
        ('{"answer": 1}', "no prompt"),
        ('{"turns": []}', "'turns' is no prompt"),
        ('{"turns": ["a", 3]}', "'turns' is no prompt"),
        ('{"prompt": " "}', "'prompt' is no prompt"),
        ('{"messages": [{"role": "user"}]}', "'messages' is no chat"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "cannot be measured"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, told):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=told) as caught:
        read_suite(str(path))
    assert "bad.jsonl, line 2" in str(caught.value)


def test_packed_prompts_that_are_too_large_or_damaged_are_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "own.jsonl.gz", [{"question": "x" * 60}])
    monkeypatch.setattr("paceline.measure.prompts.MAX_BYTES", path.stat().st_size + 20)
    with pytest.raises(ConfigError, match=r"too large unpacked.*at most \d+ bytes.*split the file"):
        read_suite(str(path))
    monkeypatch.undo()
    assert len(read_suite(str(path))) == 1
    packed = path.read_bytes()
    for damaged in (packed[:-4], packed[:12] + b"\xff" + packed[13:]):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match="cannot be read"):
            read_suite(str(path))


def test_refusals(tmp_path):
    with pytest.raises(ConfigError, match=r"did you mean 'spec_bench'\?"):
        read_suite("spec-bnch")
    with pytest.raises(ConfigError, match="there is no file"):
        read_suite("absent.jsonl")
    with pytest.raises(ConfigError, match=r"hemingkx/Spec-Bench.*--data"):
        read_suite("spec_bench")
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match=r"spec_bench/question\.jsonl.*Spec-Bench project"):
            read_suite("spec_bench", folder)
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "no.jsonl.gz").write_bytes(b"not gzip")
    for name, told in (("empty.jsonl", "has no prompts"), ("no.jsonl.gz", "cannot be read")):
        with pytest.raises(ConfigError, match=told):
            read_suite(str(tmp_path / name))


QUESTIONS = [Question(f"{name}{i}", name, ("x",)) for name, n in (("a", 10), ("b", 2), ("c", 5)) for i in range(n)]


def is_balanced(choice) -> bool:
    ids = [one.id for one in choice(QUESTIONS, 9)]
    return [name[0] for name in ids] == list("abcabcacac"[:9]) and len(set(ids)) == 9


def test_choice_is_balanced_deterministic_and_spread():
    assert is_balanced(choose)
    assert choose(QUESTIONS, 9) == choose(QUESTIONS, 9)
    assert [one.id for one in choose(QUESTIONS, 6) if one.category == "a"] == ["a2", "a7"]
    assert len(choose(QUESTIONS, 99)) == len(choose(QUESTIONS)) == 17
    assert [one.id for one in choose(QUESTIONS, 2)] == ["a5", "b1"]
    assert choose([], 3) == []
    assert not is_balanced(lambda questions, count: questions[:count])  # mutant: the first ones
    assert not is_balanced(lambda questions, count: sorted(choose(questions, count), key=lambda one: one.id))


def test_hash_tells_prompts_and_their_order_apart():
    hashes = {hash_questions(some) for some in (QUESTIONS, QUESTIONS[::-1], QUESTIONS[1:], [])}
    assert len(hashes) == 4
    assert hash_questions(QUESTIONS) == hash_questions(list(QUESTIONS))
