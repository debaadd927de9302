"""The index of a corpus against a search of all documents, what it refuses, and `paceline index`."""

import gzip
import json
import os
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from paceline import Coupled, Fixed, Suffix
from paceline.core.interfaces import DraftBudget
from paceline.core.request import SamplingParams
from paceline.engine.loop import SpeculativeDecoder
from paceline.errors import ConfigError, IncompatibleModels
from paceline.hf.fingerprint import hash_vocabulary
from paceline.methods.suffix import corpus as corpus_index
from paceline.methods.suffix.automaton import MAX_CONTEXT
from paceline.methods.suffix.corpus import CorpusIndex, write_index
from paceline.target import ModelRunner, wrap_model
from tests.cli.helpers import answer, paceline, refusal, save
from tests.helpers import admit, loaded, oracle, prompt, result, run, runner, sequence, tokenizer
from tests.tiny import tiny_model

BUDGET = DraftBudget(4, 4)
PARAMS = SamplingParams(max_tokens=24)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save(tmp_path_factory.mktemp("tiny"), tiny_model("llama"))


def written(folder: Path, documents: list[list[int]], vocabulary: str = "") -> Path:
    write_index(folder, documents, vocabulary, lambda *_: None)
    return folder


def corpus(seed: int) -> list[list[int]]:
    """Random documents over few tokens with a long repeat, some of one token, and one that is there twice."""
    chance = Random(seed)
    made = [[chance.randrange(2 + seed % 3) for _ in range(chance.randrange(1, 40))] for _ in range(5)]
    return [*made, made[0], [1] * 70, [*range(90)], [3]]


def places(documents: list[list[int]], end: list[int]) -> list[tuple[int, int]]:
    """The oracle: document and index behind each occurrence."""
    return [
        (which, i + len(end))
        for which, one in enumerate(documents)
        for i in range(len(one) - len(end) + 1)
        if one[i : i + len(end)] == end
    ]


def followers(documents: list[list[int]], end: list[int]) -> Counter[int]:
    return Counter(documents[one][i] for one, i in places(documents, end) if i < len(documents[one]))


@pytest.mark.parametrize("seed", range(4))
def test_contexts_and_counts_are_those_of_a_search(tmp_path, seed):
    documents, chance = corpus(seed), Random(100 + seed)
    index = CorpusIndex(written(tmp_path / "index", documents))
    texts = [[chance.randrange(4) for _ in range(12)] for _ in range(30)]
    texts += [one[:cut] for one in documents for cut in (1, 7, 33, 66, len(one))] + [[96], [5] * 3, []]
    matched = 0
    for text in texts:
        found = index.context(text)
        lengths = [n for n in range(1, min(MAX_CONTEXT, len(text)) + 1) if places(documents, text[-n:])]
        expected = followers(documents, text[-lengths[-1] :]) if lengths else Counter[int]()
        assert found.length == (lengths[-1] if expected else 0)
        assert not index.context(text, found.length + 1).length
        if not expected:
            continue
        matched += 1
        total, most = index.following(found)
        assert (total, dict(most)) == (expected.total(), dict(expected.most_common(8)))
        path = text[-found.length :]
        for _ in range(3):
            if most:
                path, found = [*path, most[-1][0]], index.step(found, most[-1][0])
                total, most = index.following(found)
                assert (total, dict(most)) == (followers(documents, path).total(), dict(followers(documents, path)))
    assert matched > 20


def test_many_occurrences_are_sampled_evenly(tmp_path):
    index = CorpusIndex(written(tmp_path / "index", [[7, 1, 2] * 2000 + [7, 9, 2] * 6000]))
    total, most = index.following(index.context([7]))
    assert total <= 1024
    assert dict(most)[9] / total == pytest.approx(0.75, abs=0.01)


def test_the_corpus_drafts_where_it_matches_more(tmp_path):
    drafter = Suffix(written(tmp_path / "index", [[5, 6, 7, 8, 9, 10, 11]]))
    for text, drafted, hint in (
        ([1, 2, 3, 1, 2], [3, 1, 2, 3], 2),  # not in the corpus
        ([40, 6, 7, 8], [9, 10, 11], 8 + 3),  # until the document ends
        ([7, 8, 30, 7, 8], [30, 7, 8, 30], 2),  # as long a match in the text itself
        ([8, 30, 7, 8], [9, 10, 11], 8 + 2),
        ([50], [], -1),
    ):
        seq = sequence(loaded(), text, PARAMS, slot=0)
        made = drafter.propose([seq], [BUDGET])
        assert (made.tree.token_ids[0, 1:].tolist(), made.hints) == (drafted, (hint,))
        drafter.release([0])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_answer_is_the_plain_one(tmp_path, temperature):
    params = SamplingParams(temperature=temperature, max_tokens=24)
    prompts = [prompt(6, seed) for seed in range(3)]
    expected = [oracle(loaded(), one, params) for one in prompts]
    drafter = Suffix(str(written(tmp_path / "index", [one.token_ids for one in expected[:2]])))
    drafter._corpus.check_tokenizer = lambda target: None  # pyright: ignore[reportOptionalMemberAccess]
    seqs = run(runner(loaded()), drafter, [sequence(loaded(), one, params) for one in prompts])
    assert [result(seq) for seq in seqs] == [result(one) for one in expected]
    assert sum(one.num_accepted for one in seqs[0].rounds) > 12, "the corpus holds this answer"


def damage(folder: Path, how: str) -> None:
    about = json.loads((folder / "index.json").read_text())
    if how in ("tokens.bin", "suffixes.bin"):
        whole = (folder / how).read_bytes()
        (folder / how).write_bytes(whole[:-4])
    elif how == "half written":
        size = (folder / "suffixes.bin").stat().st_size
        with (folder / "suffixes.bin").open("r+b") as file:
            file.truncate(size // 8 * 4)
            file.truncate(size)  # zeros, as after a copy that was cut short
    elif how == "places beyond the tokens":
        whole = (folder / "suffixes.bin").read_bytes()
        (folder / "suffixes.bin").write_bytes(whole[:-4] + b"\xff\xff\xff\x7f")
    elif how == "other tokens":
        whole = (folder / "tokens.bin").read_bytes()
        (folder / "tokens.bin").write_bytes(whole[4:] + whole[:4])
    elif how == "missing":
        (folder / "suffixes.bin").unlink()
    elif how == "version":
        (folder / "index.json").write_text(json.dumps(about | {"version": 2}))
    elif how == "counts":
        (folder / "index.json").write_text(json.dumps(about | {"num_tokens": 0, "num_documents": 0}))
    elif how == "json":
        (folder / "index.json").write_text('{"kind": "paceline')
    else:
        (folder / "index.json").unlink()


CONTENTS = ["half written", "places beyond the tokens", "other tokens"]
FILES = ["tokens.bin", "suffixes.bin", "missing", "version", "counts", "json", "no index.json"]


@pytest.mark.parametrize("how", FILES + CONTENTS)
def test_a_damaged_index_is_refused(tmp_path, how):
    folder = written(tmp_path / "index", corpus(0))
    Suffix(folder)
    damage(folder, how)
    with pytest.raises(ConfigError, match="index"):
        Suffix(folder)


def cut(file: Path) -> None:
    os.truncate(file, 4)  # read behind its end, a mapped file kills the process


CHANGES = {
    "cut": cut,
    "removed": Path.unlink,
    "other content": lambda file: file.write_bytes(b"\xff\xff\xff\x00" * (file.stat().st_size // 4)),
    "replaced": lambda file: (file.with_name("new").write_bytes(b"\x00" * 99), file.with_name("new").replace(file)),
}


@pytest.mark.parametrize("name", ["tokens.bin", "suffixes.bin"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_in_the_middle_of_an_answer(tmp_path, change, name, caplog):
    """The answer goes on with what the text itself has."""
    target = loaded()
    plain = oracle(target, prompt(9), PARAMS)
    drafter = Suffix(written(tmp_path / "index", [plain.token_ids], hash_vocabulary(tokenizer())))
    drafter._corpus.check_tokenizer = lambda target: None
    decoder, seq = SpeculativeDecoder(runner(target), drafter, Coupled(), Fixed(2)), sequence(target, prompt(9), PARAMS)
    admit(decoder, seq)
    while not seq.is_finished:
        decoder.step([seq])
        if len(seq.rounds) == 3:
            assert seq.rounds[-1].num_accepted
            CHANGES[change](tmp_path / "index" / name)
    decoder.release(seq)
    assert result(seq) == result(plain)
    assert caplog.text.count("goes on without its corpus") == 1


def test_another_tokenizer_is_refused(tmp_path):
    target = ModelRunner(wrap_model(tiny_model("llama"), tokenizer()), 1)
    Suffix(written(tmp_path / "same", [[1, 2]], hash_vocabulary(tokenizer()))).bind(target, Coupled())
    other = Suffix(written(tmp_path / "other", [[1, 2]], hash_vocabulary(tokenizer(shift=1))))
    with pytest.raises(IncompatibleModels, match="another tokenizer"):
        other.bind(target, Coupled())


def test_nothing_half_written_stays(tmp_path):
    def stop(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_index(tmp_path / "index", corpus(0), "", stop)
    with pytest.raises(ConfigError, match="empty"):
        written(tmp_path / "index", [[]])
    assert not list(tmp_path.iterdir())
    written(tmp_path / "index", [[1]])
    with pytest.raises(ConfigError, match="exists already"):
        written(tmp_path / "index", [[1]])


def test_nothing_of_a_killed_build_is_taken_for_an_index(tmp_path, monkeypatch):
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(corpus_index, "write_text", lambda *_: os._exit(9))  # the last file
        written(tmp_path / "index", corpus(0))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    (left,) = tmp_path.iterdir()
    assert {one.name for one in left.iterdir()} == {"tokens.bin", "suffixes.bin"}
    for folder in (tmp_path / "index", left):
        with pytest.raises(ConfigError, match="no corpus index"):
            Suffix(folder)
    Suffix(written(tmp_path / "index", corpus(0)))


def test_index_on_the_command_line(tmp_path, model):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "one.py").write_text("w5 w9 w11\nw12")
    (tmp_path / "code" / "empty.py").write_text("")
    (tmp_path / "code" / "latin.py").write_bytes(b"# caf\xe9")
    (tmp_path / "code" / "other.txt").write_text("w90")
    rows = [
        {"text": "w20 w21"},
        {"prompt": "w22"},
        {"messages": [{"role": "user", "content": "w23"}, {"role": "assistant", "content": "w24 w25"}]},
    ]
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    given = [str(tmp_path / "rows.jsonl.gz"), str(tmp_path / "code"), "--suffix", ".py", "--model", model]
    got = answer("index", *given, "--out", str(tmp_path / "index"))
    assert {key: got[key] for key in ("files", "documents", "tokens")} == {"files": 4, "documents": 4, "tokens": 9}
    assert len(got["left_out"]) == 1
    assert "latin.py' is not text" in got["left_out"][0]
    index = CorpusIndex(got["folder"])
    assert index.following(index.context([11]))[1] == [(12, 1)]
    asked = ("generate", model, "--prompt", "w5 w9", "--max-tokens", "8")
    drafted = answer(*asked, "--drafter", f"suffix:{tmp_path / 'index'}", "-k", "4")
    assert drafted["token_ids"] == answer(*asked)["token_ids"]
    told = " ".join(paceline("index", *given, "--out", str(tmp_path / "two")).stderr.split())
    assert "suffix:" in told
    assert "1 of 4 files left out" in told


def test_index_refuses_in_one_line(tmp_path, model):
    bad = {
        "empty.txt": (b"", "corpus is empty"),
        "binary.txt": (b"w5\x00w6", "zero bytes"),
        "latin.txt": (b"caf\xe9", "is not text"),
        "cut.jsonl": (b'{"text": "w5"}\n{"text": "w', "line 2"),
        "cut.jsonl.gz": (gzip.compress(b'{"text": "w5"}\n')[:-9], "cannot be read"),
        "keys.jsonl": (b'{"words": "w5"}\n', "line 1"),
        "folder": (None, "--suffix"),
        "missing": (None, "missing"),
    }
    (tmp_path / "folder").mkdir()
    for name, (content, message) in bad.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        assert message in refusal("index", str(tmp_path / name), "--out", str(tmp_path / "index"), "--model", model)
    code = (str(tmp_path / "folder"), "--suffix", ".py", "--out", str(tmp_path / "index"), "--model", model)
    assert "end in .py" in refusal("index", *code)
    assert not (tmp_path / "index").exists()
    assert "no corpus index" in refusal("generate", model, "--prompt", "w5", "--drafter", f"suffix:{tmp_path}")
