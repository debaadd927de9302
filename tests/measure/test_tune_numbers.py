"""The pure part: what pays, what a draft may cost, which length was usual. Worked by hand."""

import pytest

from paceline.config import parse
from paceline.core.round import Round
from paceline.errors import ConfigError
from paceline.measure.machine import PassCosts, about_drafts, tokens_per_round
from paceline.measure.tune import (
    BreakEven,
    Candidate,
    Gain,
    about_costs,
    about_gains,
    acceptance,
    best_of,
    break_even,
    candidate_of,
    candidates_of,
    tune_report,
    usual_depth,
)

FLAT = PassCosts(1, 1.0, {1: 0.010, 5: 0.012, 17: 0.018})  # 0.5 ms a row


def rounds(*pairs: tuple[int, int]) -> list[Round]:
    """Rounds of (drafted, accepted)."""
    return [Round("lookup", drafted, accepted, accepted + 1) for drafted, accepted in pairs]


def candidate(name="lookup", gain=(1.5, 1.2, 1.8), prompts=9, **given) -> Candidate:
    config = parse(name, policy="cost_model")
    return Candidate(config, Gain(*gain, prompts), given.pop("categories", {}), 10.0, 15.0, 2.0, 0.5, {}, **given)


def test_a_category_in_which_nothing_was_timed_is_left_out():
    told = {"speedup": 1.5, "speedup_low": 1.2, "speedup_high": 1.8, "prompts": 3}
    none = {"speedup": None, "speedup_low": None, "speedup_high": None, "prompts": 1}
    whole = {**told, "plain_tokens_per_s": 10.0, "speculative_tokens_per_s": 15.0, "mean_acceptance_length": 2.0}
    whole |= {
        "categories": {"long": told, "one token": none},
        "verdicts": {"bug": 0, "near_tie": 0},
        "no_draft_reasons": {},
    }
    assert candidate_of(parse("lookup"), whole, [], None).categories.keys() == {"long"}
    with pytest.raises(ConfigError, match="nothing could be timed"):
        candidate_of(parse("lookup"), {**whole, **none}, [], None)


def test_acceptance_counts_what_was_judged():
    assert acceptance(rounds((4, 1), (4, 4), (0, 0))) == pytest.approx(5 / 6)
    assert acceptance(rounds((0, 0))) is None


def test_usual_depth_weighs_by_tokens():
    many_short, one_long = [(1, 0)] * 3, [(8, 8)]
    assert usual_depth(rounds(*many_short, *one_long)) == 8  # 3 tokens against 9
    assert usual_depth(rounds((3, 0), (2, 0))) == 2
    assert usual_depth(rounds((0, 0))) == 0


def is_even(num_tokens: int, token_s: float) -> bool:
    return abs(FLAT.speedup(num_tokens, 0.8, token_s) - 1) < 1e-9


def test_break_even_is_where_drafting_neither_wins_nor_loses():
    even = break_even("model", 0.8, 0.001, FLAT)
    assert even.growth == pytest.approx(FLAT.at(even.num_tokens + 1) / 0.010)
    assert is_even(even.num_tokens, even.dearest_s)
    free_rows = (tokens_per_round(even.num_tokens, 0.8) - 1) * FLAT.seconds[1] / even.num_tokens
    assert not is_even(even.num_tokens, free_rows)  # a mutant that checks drafts for nothing is noticed
    best = FLAT.speedup(even.num_tokens, 0.8, 0.001)
    assert all(FLAT.speedup(n, 0.8, 0.001) <= best for n in range(1, 17))
    assert break_even("model", 0.8, 0.02, FLAT).num_tokens == 1  # too dear at any length: then least is lost


def test_only_sure_gains_pay():
    assert Gain(1.02, 1.01, 1.03, 9).pays
    assert not Gain(1.02, None, None, 3).pays  # too few prompts for so small a gain
    assert Gain(1.2, None, None, 1).pays
    assert (str(Gain(1.2, None, None, 1)), str(Gain(1.2, 1.1, 1.3, 5))) == ("1.20x", "1.20x (1.10–1.30)")
    assert not Gain(1.3, 0.95, 1.6, 9).pays


def test_the_best_is_fast_sure_and_exact():
    slow, fast = candidate(gain=(1.2, 1.1, 1.3)), candidate("self-int4", gain=(1.5, 1.2, 1.8))
    unsure = candidate(gain=(3.0, 0.9, 5.0))
    assert best_of([slow, fast, unsure]) is fast
    assert best_of([slow, candidate(gain=(2.0, 1.9, 2.1), num_bugs=1)]) is slow
    assert best_of([unsure]) is None


def test_candidates():
    by_default = ["lookup", "suffix", "recycling", "self-int4"]
    assert [one.name for one in candidates_of(None)] == [*by_default, "suffix+recycling+self-int4"]
    assert [one.name for one in candidates_of(["lookup"])] == ["lookup"]
    heads = ["head:smollm2-135m-eagle", "head:smollm2-135m-medusa", "mtp"]
    *_, eagle, medusa, mtp, together = [one.name for one in candidates_of(None, heads)]
    assert [eagle, medusa, mtp] == heads
    assert together == "suffix+recycling+self-int4+head:smollm2-135m-eagle"
    assert [one.name for one in candidates_of(["lookup", "suffix"])] == ["lookup", "suffix"]
    assert candidates_of(["lookup", "suffix:c", "model:a"])[-1].name == "suffix:c+model:a"
    three = candidates_of(["lookup", "model:a", "self-int4"])
    assert three[-1].name == "lookup+model:a+self-int4"
    assert [one.name for one in candidates_of(["lookup", "lookup+model:a"])] == ["lookup", "lookup+model:a"]
    assert {one.policy for one in three} == {"cost_model"}
    for given, told in ((["none"], "leave it out"), (["lookup", "lookup"], "twice"), (["lokup"], "did you mean")):
        with pytest.raises(ConfigError, match=told):
            candidates_of(given)


def test_gains_in_words():
    found = {
        "summarization": Gain(2.1, 1.8, 2.4, 9),
        "writing": Gain(0.99, 0.97, 1.01, 9),
        "qa": Gain(1.1, 0.9, 1.3, 9),
    }
    told = about_gains(candidate(categories=found))
    assert told == (
        "lookup pays: 1.50x (1.20–1.80); by category: summarization 2.10x (1.80–2.40), qa 1.10x (0.90–1.30), "
        "writing 0.99x (0.97–1.01)."
    )
    assert about_gains(candidate(gain=(0.97, 0.9, 1.0))) == "lookup does not surely pay: 0.97x (0.90–1.00)."


def test_costs_in_words():
    dear = BreakEven("self-int4", 4, 0.83, 0.0091, 1.2, 0.0032)
    assert about_costs("self-int4", dear, 0.25) == (
        "self-int4 drafted in 25% of the rounds: a drafted token costs 9.1 ms, and pays below 3.2 ms "
        "(acceptance 0.83, T(5)/T(1) = 1.20)."
    )
    assert "would not pay" in about_costs("x", BreakEven("self-int4", 1, 0.1, 0.001, 1.4, -0.003), 1.0)


def test_what_a_draft_would_have_to_cost():
    # 5 tokens at 0.8: E = 3.689, T(6) = 12.5 ms: (36.89 - 12.5) / 5 = 4.88 ms
    told = about_drafts(FLAT)
    assert "below 4.88 ms a drafted token (49% of a plain step) with 5 tokens at a time" in told
    assert "not even if it took no time" in about_drafts(PassCosts(1, 1.0, {1: 0.01, 2: 0.02, 17: 0.17}))


def test_words_begin_with_the_choice_and_name_faults():
    one = candidate(num_bugs=2, breakeven=(BreakEven("lookup", 4, 0.9, 1e-5, 1.2, 0.01),))
    told = tune_report([one], None, "m", ["remark"])
    assert told[:2] == ["Choice for m: none. No drafter is surely faster than plain decoding here.", "remark"]
    assert any("2 of its answers differ" in line for line in told)
    assert tune_report([one], one, "m")[0].startswith("Choice for m: lookup, 1.50x as fast")
    assert any("never drafted" in line for line in tune_report([candidate()], None, "m"))
