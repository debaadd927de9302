"""`paceline serve --learn`: which drafter learns, what requests may keep to themselves, and the numbers at /metrics."""

import asyncio
import json
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from paceline import LLM, Choose, Fixed, PromptLookup
from paceline.config import parse
from paceline.errors import ConfigError
from paceline.learn.drafter import Learned
from paceline.learn.folder import LearnFolder
from paceline.learn.spec import learning
from paceline.server.protocol import ChatRequest
from paceline.train.prepare import read_answers
from tests.cli.helpers import paceline, save
from tests.learn.helpers import QUICK, until
from tests.server.helpers import ASK, server, tiny_llm
from tests.server.test_metrics import read
from tests.tiny import tiny_model

RESPONSE = {"model": "tiny", "input": "ab ab", "max_output_tokens": 24, "seed": 3}
BODIES = [
    ("chat/completions", ASK),
    ("chat/completions", {**ASK, "store": True}),
    ("completions", {"model": "tiny", "prompt": "ab ab", "max_tokens": 24, "store": None}),
    ("responses", RESPONSE),
]


def records_what_it_may(folder) -> bool:
    """Whether a server records answers unless a request says `store: false`."""
    drafter = Learned(None, folder, QUICK, trains=False)
    members = [PromptLookup(), drafter]
    llm = LLM(tiny_llm().loaded, drafter=Choose(members), policy=Fixed(4), max_num_seqs=2)

    async def ask():
        async with server(llm) as client:
            for private in (True, False):
                for path, body in BODIES:
                    answer = await client.post(f"/v1/{path}", json={**body, "store": False} if private else body)
                    assert answer.status_code == (400 if body.get("store") and path == "responses" else 200)
            await asyncio.to_thread(until, lambda: drafter.learner.recorder.answers >= len(BODIES))
            return read((await client.get("/metrics")).text)

    numbers = asyncio.run(ask())
    drafter.close()
    count = sum(len(read_answers(part)) for part in LearnFolder(folder).parts())
    assert len(BODIES) <= numbers["paceline:learn_answers_total",] <= count  # the mutant may still write some
    assert numbers["paceline:learn_stopped",] == 0
    return count == len(BODIES)


def test_requests_may_keep_their_answers_to_themselves(tmp_path, monkeypatch):
    assert records_what_it_may(tmp_path / "a")
    params = ChatRequest.params

    def forgets(self, *args, **options):
        self.store = None
        return params(self, *args, **options)

    monkeypatch.setattr(ChatRequest, "params", forgets)
    assert not records_what_it_may(tmp_path / "mutant")


def test_which_drafter_learns():
    def parts(name: str) -> list[str]:
        return [part.name for part in learning(parse(name), "DIR", 64).drafter.parts]

    assert parts("lookup") == ["lookup", "learned"]
    assert parts("head:smollm2-135m-eagle") == ["head:smollm2-135m-eagle"]
    config = learning(parse("lookup+head:smollm2-135m-dflash"), "DIR", 64)
    lookup, learned = config.drafter.parts
    assert (lookup.method, learned.method, learned.head.method) == ("ngram", "learned", "dflash")
    assert config.as_dict()["drafters"][1]["folder"] == "DIR"
    assert parts("head:smollm2-135m-space") == ["head:smollm2-135m-space", "learned"]
    with pytest.raises(ConfigError, match="plain decoding learns nothing"):
        learning(parse("none"), "DIR", 64)


def processes_with(word: str) -> list[str]:
    """The command lines of running processes that name it."""
    lines = list[str]()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            lines.append(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in lines if word in line]


def test_keys_that_share_a_head_are_named(tmp_path):
    """Once, before anything slow."""
    (tmp_path / "other").write_text("")
    model = save(tmp_path / "tiny", tiny_model("llama"))
    both = ("--api-key", "a", "--api-key", "b")
    for keys in (both, both[:2]):
        result = paceline("serve", model, "--port", "0", "--learn", str(tmp_path), *keys)
        assert result.exit_code == 1
        assert "is not a folder of a drafter that learns" in result.stderr
        assert result.stderr.count("All API keys share the head") == (keys is both)


@pytest.mark.more
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="reads /proc")
def test_ctrl_c_leaves_no_process(tmp_path):
    model = save(tmp_path / "tiny", tiny_model("llama"))
    options = ["--json", "--port", "0", "--learn", str(tmp_path / "learn")]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    server = subprocess.Popen([sys.executable, "-m", "paceline", "serve", model, *options], stdout=subprocess.PIPE)
    signal.signal(signal.SIGINT, before)
    told = json.loads(server.stdout.readline())
    assert told["drafter"].endswith("lookup+learned")
    assert [line for line in processes_with(str(tmp_path)) if "paceline.learn.trainer" in line]
    server.send_signal(signal.SIGINT)
    assert server.wait(60) == 0
    assert not processes_with(str(tmp_path))
