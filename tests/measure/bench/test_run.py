"""The run is fair, keeps what it measured, and calls a planted bug a bug."""

from dataclasses import replace

import pytest
import torch

from paceline import LLM, Fixed, PromptLookup
from paceline.measure.run import PLAIN, BenchOptions, BenchRun, EngineSide, Side, TimedAnswer, fitting, flips
from paceline.measure.suites import Question
from paceline.measure.summary import speedup, summarise
from paceline.verify import Ratio
from tests.adversaries import AcceptsAll
from tests.cli.helpers import save
from tests.tiny import UNDESCRIBED, tiny_model


class Stops(Side):
    """Answers nothing and is interrupted at its n-th call."""

    def __init__(self, calls: int):
        super().__init__("stops")
        self.left = calls

    def answer(self, asks, options):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return [TimedAnswer(ask, self.name, [1], 1, "", 1.0, 0.0, 1.0) for ask in asks]


def groups(pattern: str) -> list[list[Question]]:
    return [[Question(str(i), name, ("x",))] for i, name in enumerate(pattern)]


def is_fair(order) -> bool:
    """Each category starts on either side equally often, and a machine that slows down steadily favours neither."""
    for pattern in ("abababab", "abcabcabcabc", "aaaa", "abcdef" * 4):
        flipped = order(groups(pattern))
        clock, seconds = 0.0, {False: [], True: []}
        for is_flipped in flipped:
            for is_speculative in (True, False) if is_flipped else (False, True):
                seconds[is_speculative].append(1.0 + 0.01 * clock)
                clock += 1
        costs = [[(10, s) for s in seconds[side]] for side in (False, True)]
        starts = {name: [f for f, other in zip(flipped, pattern, strict=True) if other == name] for name in pattern}
        if any(2 * sum(one) != len(one) for one in starts.values()):
            return False
        if abs(speedup(*costs)["speedup"] - 1) > 1e-9:
            return False
    return True


def test_turns_alternate_within_each_category():
    assert is_fair(flips)
    assert flips(groups("ab"), 1) == [not one for one in flips(groups("ab"), 0)]
    assert not is_fair(lambda groups: [False] * len(groups))  # mutant: plain always first
    assert not is_fair(lambda groups: [i % 2 == 1 for i in range(len(groups))])  # mutant: a category always alike


@pytest.mark.parametrize("batch", [1, 3])
def test_both_sides_answer_everything(engine, measure, questions, batch):
    run = measure(engine(batch=batch), questions, batch=batch, repeat=2)
    assert run.complete
    keys = [(one.ask.index, one.ask.repeat, one.side) for one in run.answers]
    assert sorted(keys) == sorted((i, r, s) for i in range(4) for r in range(2) for s in (PLAIN, "lookup"))
    assert {one.verdict for one in run.answers if one.side == "lookup"} == {"identical"}
    for one in run.answers:
        decoding = [r for r in one.rounds if not r.with_prompt]
        assert len(one.token_ids) == sum(r.num_emitted for r in one.rounds) == one.length
        assert one.num_tokens == sum(r.num_emitted for r in decoding) < one.length
        # The time of a shared round is divided; only what no round records, such as learning, comes on top.
        own = sum(r.seconds / r.batch for r in one.rounds)
        assert own <= one.seconds < 3 * own + 0.05
        assert one.passes == pytest.approx(sum(1 / r.batch for r in decoding))
    assert max(r.batch for one in run.answers for r in one.rounds) == batch
    assert len(run.bandwidths) == 3


def test_summary(engine, measure, questions):
    run = measure(engine(), questions, max_tokens=24)
    found = summarise(run, ["lookup"], {})
    plain, fast = ([one for one in run.answers if one.side == side] for side in (PLAIN, "lookup"))
    speeds = [sum(a.num_tokens for a in side) / sum(a.seconds for a in side) for side in (plain, fast)]
    assert found["plain_tokens_per_s"] == pytest.approx(speeds[0])
    assert found["speedup"] == pytest.approx(speeds[1] / speeds[0])
    assert found["speedup_low"] is found["speedup_high"] is None  # of two prompts
    assert found["verdicts"] == {"identical": 4, "near_tie": 0, "bug": 0}
    assert found["categories"].keys() == {"a", "b"}
    assert sum(one["tokens"] for one in found["categories"].values()) == found["tokens"]
    passes = sum(one.passes for one in fast)
    assert found["mean_acceptance_length"] == pytest.approx(sum(one.num_tokens for one in fast) / passes)
    accepted = sum(one.origins.count("drafted") for one in fast)
    assert found["sources"][fast[0].rounds[0].source]["accepted"] == accepted > 0
    by_position = zip(found["acceptance_by_position"], found["rounds_by_position"], strict=True)
    assert sum(share * rounds for share, rounds in by_position) == pytest.approx(
        sum(r.num_accepted for one in fast for r in one.rounds)
    )
    split = found["ms_per_round"]
    assert split["draft"] + split["verify"] + split["rest"] == pytest.approx(split["total"])
    floor_s = found["weight_bytes"] / 1e9
    assert found["floor_fraction"] == pytest.approx(1e3 * floor_s / found["plain_ms_per_pass"]["total"])
    assert found["runs"][0]["speedup"] == found["speedup"]


def test_a_planted_bug_is_called_a_bug(engine, measure, questions):
    run = measure(engine(AcceptsAll()), questions)
    wrong = [one.ask.question.id for one in run.answers if one.verdict == "bug"]
    assert wrong
    found = summarise(run, ["lookup"], {})
    assert found["verdicts"]["bug"] == len(wrong)
    assert [one["id"] for one in found["differences"] if one["verdict"] == "bug"] == wrong


@pytest.mark.parametrize(
    ("name", "numerics"), [("llama", "invariant"), (UNDESCRIBED, "invariant"), (UNDESCRIBED, "fast")]
)
def test_a_tie_is_a_bug_where_bits_count(measure, questions, tmp_path, name, numerics):
    """Verdicts are those of `check`: with invariant numerics nothing is a near-tie."""
    model = tiny_model(name, max_position_embeddings=512)
    with torch.no_grad():
        model.lm_head.weight[48:96] = model.lm_head.weight[:48]  # tokens in pairs, twins
    llm = LLM(save(tmp_path, model), drafter=PromptLookup(), policy=Fixed(4), numerics=numerics)
    plain = measure(llm, questions[:1]).answers[0]
    place = next(index for index, token in enumerate(plain.token_ids) if token < 48)
    twin = [*plain.token_ids[:place], plain.token_ids[place] + 48, *plain.token_ids[place + 1 :]]
    told = EngineSide("lookup", llm).judge(plain, replace(plain, token_ids=twin), BenchOptions(12))
    assert told.verdict == ("near_tie" if numerics == "fast" else "bug")


def test_a_promise_of_the_law_alone_is_not_compared_when_sampling(engine, measure, questions):
    sampled = measure(engine(Ratio()), questions, temperature=1.0)
    assert {one.verdict for one in sampled.answers} == {None}
    assert summarise(sampled, ["lookup"], {})["not_compared"] == 4
    greedy = measure(engine(Ratio()), questions)
    assert {one.verdict for one in greedy.answers if one.side == "lookup"} == {"identical"}


def test_a_conversation_goes_on_from_the_plain_answer(engine, measure):
    run = measure(engine(AcceptsAll()), [Question("0", "a", ("w5 w9 w5 w9", "w7 w8"))])
    first, second = ([one for one in run.answers if one.ask.turn == turn] for turn in (0, 1))
    plain = next(one for one in first if one.side == PLAIN)
    assert any(one.token_ids != plain.token_ids for one in first)  # the other side said something else
    for one in second:
        assert one.ask.messages[1] == {"role": "assistant", "content": plain.text}


def test_what_does_not_fit_is_left_out_and_counted(engine, measure):
    llm = engine(max_model_len=24)
    questions = [Question("0", "a", ("w5 " * 30,)), Question("1", "a", ("w5 w9", "w7 " * 20, "w8"))]
    kept, left_out = fitting(llm, questions)
    assert ([one.id for one in kept], left_out) == (["1"], 1)
    run = measure(llm, kept, repeat=2)
    assert run.too_long == 2
    assert {one.ask.turn for one in run.answers} == {0}


def test_an_interrupt_keeps_whole_pairs(engine, measure, questions):
    llm, kept = engine(), []
    sides = [EngineSide("lookup", llm), Stops(1 + 2)]  # after the warm-up and two prompts
    run = BenchRun(EngineSide(PLAIN, llm.plain()), sides, BenchOptions(12), kept.extend)
    with pytest.raises(KeyboardInterrupt):
        run.measure(questions)
    assert not run.complete
    assert kept == run.answers
    sides = {index: {one.side for one in run.answers if one.ask.index == index} for index in range(4)}
    assert sides == {0: {PLAIN, "lookup", "stops"}, 1: {PLAIN, "lookup", "stops"}, 2: set(), 3: set()}
