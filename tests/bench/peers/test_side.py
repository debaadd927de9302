"""Peers among the sides of a benchmark, and the command that brings them."""

import json

import pytest

from bench.peers.__main__ import main, parse
from bench.peers.base import Peer, PeerAnswer, PeerFailed
from bench.peers.side import PeerSide
from paceline.measure.run import OPEN_PEERS, PLAIN
from paceline.measure.summary import summarise


class Echo(Peer):
    """Says the same tokens whatever it is asked, until it dies."""

    name, modes = "echo", ("plain", "lookup")

    def __init__(self, calls: int = 99):
        self.left, self.heard = calls, []

    def start(self): ...

    def run(self, mode, token_ids, max_tokens, temperature):
        self.left -= 1
        if self.left < 0:
            raise PeerFailed("it died")
        self.heard.append((mode, token_ids, max_tokens))
        return PeerAnswer([3] * max_tokens, max_tokens - 1, "w3", 0.5, 1.0, None)

    def close(self): ...

    def describe(self):
        return {"version": "1"}


def test_peers_take_their_turns(engine, measure, questions):
    peer = Echo()
    run = measure(engine(), questions, [PeerSide(peer, mode, frozenset({2})) for mode in peer.modes])
    asked = {(mode, tuple(ids)) for mode, ids, most in peer.heard if most == 12}
    ours = {tuple(one.ask.token_ids) for one in run.answers if one.side == PLAIN}
    assert asked == {(mode, ids) for mode in peer.modes for ids in ours}
    found = summarise(run, ["lookup"], {"other": "not installed"})
    assert [one["side"] for one in found["peers"]] == ["echo:plain", "echo:lookup"]
    one = found["peers"][0]
    assert (one["tokens_per_s"], one["identical_share"]) == (11.0, 0.0)  # its clock starts after its first token
    assert one["tokens_per_s_with_prefill"] == 12 / 1.5
    assert one["over_plain"]["speedup"] == pytest.approx(11.0 / found["plain_tokens_per_s"], rel=1e-9)
    assert one["over_speculative"]["lookup"]["speedup"] == pytest.approx(11.0 / found["speculative_tokens_per_s"])
    assert found["missing_peers"] == {"other": "not installed"}


def test_a_peer_that_dies_is_named_and_the_run_goes_on(engine, measure, questions):
    run = measure(engine(), questions, [PeerSide(Echo(calls=2), "plain", frozenset({2}))])
    assert run.complete
    assert run.failed == {"echo:plain": "it died."}
    found = summarise(run, ["lookup"], {})
    assert found["peers"][0]["prompts"] == 1
    assert found["failed_peers"] == run.failed
    assert found["prompts"] == 4


def test_the_command_keeps_what_is_missing(model, tmp_path, capsys):
    absent, token = str(tmp_path / "python"), OPEN_PEERS.set(OPEN_PEERS.get())
    options = ["-d", "lookup", "--num-prompts", "1", "--max-tokens", "8", "--out", str(tmp_path / "r")]
    with pytest.raises(SystemExit) as ended:
        main([model, "--peer", f"transformers={absent}", *options])
    OPEN_PEERS.reset(token)
    assert not ended.value.code
    assert "without transformers" in capsys.readouterr().out
    assert absent in json.loads((tmp_path / "r" / "summary.json").read_text())["missing_peers"]["transformers"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["m"], "there is no --peer"),
        (["m", "--peer", "ollama=x"], "choose from transformers"),
        (["m", "--peer", "vllm", "--peer", "vllm=x"], "given twice"),
        (["m", "--peer", "vllm", "--peer-model", "x"], "NAME=PATH"),
        (["m", "--peer", "vllm", "--peer-draft-model", "openvino=x"], "there is no --peer openvino"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_other_options_go_to_the_benchmark():
    given, others = parse(["m", "--peer", "vllm", "--num-speculative-tokens", "3", "-d", "lookup", "--batch", "2"])
    assert (given.peer, given.num_speculative_tokens) == (["vllm"], 3)
    assert others == ["m", "-d", "lookup", "--batch", "2", "--num-speculative-tokens", "3"]
