"""`paceline chat`: its answers, its commands, and how a terminal shows and stops them."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline import LLM, SamplingParams
from tests.cli.helpers import answer, paceline, refusal, save
from tests.tiny import tiny_model
from tests.vision.contract import SMALL
from tests.vision.families import plain_answer, save_made, user

SPACED = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
LONG = " ".join(f"w{i}" for i in range(10, 40))


def said(model: str, *lines: str, more: tuple[str, ...] = ()) -> dict:
    few = ("--max-tokens", "8", "--ignore-eos", "--chat-template", SPACED)
    return answer("chat", model, *few, *more, stdin="\n".join(lines))


def contents(told: dict) -> list[str]:
    """The messages of the user and the system; answers are dots."""
    return ["." if one["role"] == "assistant" else one["content"] for one in told["messages"]]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8}])
def test_answers_are_those_of_plain_decoding_and_reuse_the_prefix(model, options):
    more = ("--temp", str(options.get("temperature", 0)), "--seed", "3")
    told = said(model, LONG, LONG, "w9", more=more)
    assert (told["model"], told["drafter"]) == (model, "lookup")
    llm, chat = LLM(model, seed=3), []
    params = SamplingParams(max_tokens=8, ignore_eos=True, **options)
    for text, got in zip((LONG, LONG, "w9"), told["answers"], strict=True):
        chat.append({"role": "user", "content": text})
        (expected,) = llm.chat(chat, params, chat_template=SPACED)
        assert got["token_ids"] == expected.token_ids
        assert got["num_prompt_tokens"] == len(expected.prompt_token_ids)
        chat.append({"role": "assistant", "content": expected.text})
    assert told["messages"] == chat
    cached = [one["num_cached_tokens"] for one in told["answers"]]
    assert cached == [0, 32, 64]  # pages of 16 tokens


def test_commands_change_the_chat(model, tmp_path):
    file = str(tmp_path / "chat.json")
    told = said(model, "w5", "/system w7 w8", "w6 \\", "w9", "", f"/save {file}", "/undo", more=("-sys", "w4"))
    assert contents(told) == ["w7 w8", "w5", "."]
    assert json.loads(Path(file).read_text())["messages"][3] == {"role": "user", "content": "w6 \nw9"}
    assert contents(said(model, "w5", "w6", "/clear", "w9", more=("-p", "w8", "--system", "w4"))) == ["w4", "w9", "."]
    told = said(model, f"/load {file}", "/retry", "/system", f"/save {file}", "/bye", "w5")
    assert contents(told) == ["w5", ".", "w6 \nw9", "."]
    assert told["answers"][0]["text"] == told["messages"][-1]["content"]
    Path(file).write_text('{"messages": [{"role": "user", "content": "w5"}]}')
    assert contents(said(model, f"/load {file}")) == ["w5", "."]


def test_people_see_answers_on_stdout_and_the_rest_on_stderr(model):
    few = ("-m", model, "-n", "16", "--ignore-eos", "--chat-template", SPACED, "-c", "96")
    told = paceline("chat", *few, stdin=f"{LONG}\nw8 w8\n/stats\n/help\n")
    assert told.exit_code == 0, told.output
    assert told.stdout == "".join(
        one["text"] + "\n" for one in said(model, LONG, "w8 w8", more=("-n", "16"))["answers"]
    )
    for words in (
        "drafter lookup",
        "context 96 tokens (--max-model-len); memory: weights ",
        "KV cache ",
        "The answer is cut at --max-tokens 16.",
        " tok/s, ",
        " tokens a pass",
        " of 48 prompt tokens from the prefix cache; context 64 of 96 tokens",
        "/load FILE Go on with a saved chat.",
    ):
        assert words in " ".join(told.stderr.split())


def test_a_context_that_fills_up_loses_nothing_unasked(model):
    few = ("chat", model, "--ignore-eos", "--chat-template", SPACED, "-c", "64")
    told = paceline(*few, stdin=f"{LONG}\nw8\n")
    assert told.exit_code == 1
    assert "The answer is cut, since the context is full: /undo or /clear" in told.stderr
    assert "the chat fills the context. Got: 65 tokens" in told.stderr
    told = said(model, LONG, "w8", "w9", "w5 w6", more=("-c", "64", "--drop-oldest"))
    assert contents(told) == ["w8", ".", "w9", ".", "w5 w6", "."]
    assert "Forgot the oldest turn (1)," in paceline(*few, "--drop-oldest", stdin=f"{LONG}\nw8\n").stderr
    assert "fills the context" in paceline(*few, "--drop-oldest", stdin=f"{LONG} {LONG} {LONG}\n").stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/sav x", "there is no command /sav. Expected: one that /help lists. Fix: did you mean 'save'?"),
        ("/save", "/save takes FILE. Got: nothing"),
        ("/undo 3", "/undo takes nothing. Got: 3"),
        ("/retry", "there is no message yet"),
        ("/save x.json", "there is no message yet"),
        ("/stats", "no complete answer"),
        ("/image cat.png", "is a text model"),
        ("/load none.json", "cannot be read"),
        ("/load text.json", "holds no chat"),
        ("/load odd.json", "a message has no role"),
        ("w5\n/save odd.json", "this command did not write it"),
        (b"w5 \xff", "the standard input is not text"),
    ],
)
def test_what_a_script_is_refused(model, line, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.json").write_text('{"prompt": "w5"}')
    Path("odd.json").write_text('{"turns": [], "messages": [{"content": "w5"}]}')
    if "odd" in words or "write it" in words:
        Path("odd.json").write_text("{}")
    told = paceline("chat", model, "-n", "2", stdin=line)
    assert told.exit_code == 1
    assert words in " ".join(told.stderr.split())


def test_what_is_refused_before_a_chat(model, tmp_path):
    assert "there is no model" in refusal("chat", code=2)
    assert "there are two models" in refusal("chat", model, "-m", model, code=2)
    bare = Path(save(tmp_path / "bare", tiny_model("llama")))
    for left in bare.glob("chat_template*"):
        left.unlink()
    assert "has no chat template" in paceline("chat", str(bare), stdin="w5").stderr


def test_images_go_with_the_next_message(tmp_path, monkeypatch):
    folder = save_made(tmp_path / "vlm")
    SMALL.save(tmp_path / "small.png")
    monkeypatch.chdir(tmp_path)
    few = ("--max-tokens", "6", "--ignore-eos", "--numerics", "fast")
    told = answer("chat", folder, *few, stdin="/image small.png\nwhich?\n/save chat.json")
    assert told["answers"][0]["token_ids"] == plain_answer("llava", [user(SMALL, "which?")], 6)
    part = {"type": "image", "image": str(tmp_path / "small.png")}
    assert told["messages"][0]["content"] == [part, {"type": "text", "text": "which?"}]
    again = answer("chat", folder, *few, stdin="/load chat.json\n/retry")
    assert again["messages"] == told["messages"]


class Terminal:
    """The command in a terminal of its own. What it shows is read up to an expected text."""

    def __init__(self, *arguments: str, code: str = ""):
        (self.ours, theirs), self.shown = os.openpty(), ""
        command = [sys.executable, "-c", f"{code}\nfrom paceline.cli import main\nmain()", *arguments]
        environment = {**os.environ, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        os.close(theirs)

    def until(self, text: str) -> None:
        """Wait until the text is shown; what comes after it is kept for the next call."""
        while text not in self.shown:
            assert select.select([self.ours], [], [], 60)[0], self.shown[-400:]
            self.shown += os.read(self.ours, 4096).decode(errors="replace")
        self.shown = self.shown.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def interrupt(self) -> None:
        time.sleep(0.3)  # Python sees a signal between a prompt and its `read` only after the line
        self.process.send_signal(signal.SIGINT)

    def stop(self) -> None:
        self.interrupt()
        self.until("Stopped.")
        self.until("> ")

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *args: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)


@pytest.mark.usefixtures("is_heard")
@pytest.mark.parametrize("has_readline", [True, pytest.param(False, marks=pytest.mark.more)])
def test_ctrl_c_stops_an_answer_and_not_the_chat(model, tmp_path, has_readline):
    code = "" if has_readline else "import sys; sys.modules['readline'] = None"
    few = ("--ignore-eos", "-n", "9000", "-d", "lookup", "-k", "3")
    with Terminal("chat", model, *few, code=code) as ours:
        ours.until("> ")
        ours.type("w5 w9 w5 w9\n")
        ours.until("\x1b[32m")  # a drafted token
        ours.stop()
        ours.type("\x1b[200~w6\nw7\x1b[201~\n" if has_readline else "w6\nw7\n")  # a paste
        ours.until("\x1b[32m")
        ours.stop()
        ours.type(f"/save {tmp_path / 'chat.json'}\n")
        ours.until("4 messages in")
        ours.until("> ")
        ours.stop()
        ours.interrupt()
        assert ours.process.wait(timeout=60) == 0
    messages = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert [one["content"] for one in messages if one["role"] == "user"] == ["w5 w9 w5 w9", "w6\nw7"]
    assert all(one["content"] for one in messages)
