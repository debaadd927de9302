"""Answers on disk: the target's own, whole or absent, and the same ones however often the writing was cut short."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.request import SamplingParams
from paceline.errors import ConfigError
from paceline.measure.prompts import PromptLine
from paceline.train.config import PrepareSection
from paceline.train.prepare import TrainPrompt, ordered, prepare, read_answers
from tests.helpers import NO_EOS, loaded, oracle, prompt, runner
from tests.train.toy import write_answers


def lines(folder):
    return sorted((replace(a, folder=Path(), states=None) for a in read_answers(folder)), key=lambda a: a.index)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return lines(write_answers(tmp_path_factory.mktemp("whole"), count=40))


def test_answers_are_the_targets(whole):
    for one in whole[::7]:
        params = SamplingParams(temperature=one.temperature, max_tokens=12)
        assert list(one.answer_ids) == oracle(loaded(), list(one.prompt_ids), params, one.seed).output_ids
        assert list(one.prompt_ids) == prompt(3 + 5 * one.index % 17, seed=100 + one.index)
    assert {one.temperature for one in whole} == {0.0, 1.0}


def test_cut_short_and_run_again(whole, tmp_path):
    write_answers(tmp_path, count=40, limit_rounds=100)
    part = len(read_answers(tmp_path))
    assert 0 < part < 40
    with (tmp_path / "answers.jsonl").open("a") as file:
        file.write('{"index": 39, "sour')  # killed while writing
    write_answers(tmp_path, count=40)
    assert lines(tmp_path) == whole


def test_parts_make_the_whole(whole, tmp_path):
    for index in range(2):
        write_answers(tmp_path / str(index), count=40, part=(index, 2))
    both = [one.prompt_ids for index in range(2) for one in lines(tmp_path / str(index))]
    assert sorted(both) == sorted(one.prompt_ids for one in whole)


def test_progress(tmp_path):
    config = PrepareSection(limit=3, max_tokens=4)
    prompts = [TrainPrompt("", prompt(4, seed=i)) for i in range(3)]
    steps = list(prepare(runner(loaded()), prompts, NO_EOS, config, tmp_path))
    assert sum(tokens for tokens, _ in steps) == 12
    assert steps[-1][1] == 3
    assert [count for _, count in prepare(runner(loaded()), prompts, NO_EOS, config, tmp_path)] == [3]


def test_other_prompts_or_another_way_are_refused(tmp_path):
    write_answers(tmp_path, count=4)
    with pytest.raises(ConfigError, match=r"other settings(.|\n)*seed: 1(.|\n)*seed: 0"):
        write_answers(tmp_path, count=4, seed=1)
    config = PrepareSection(limit=4, max_tokens=12)
    with pytest.raises(ConfigError, match="other prompts"):
        list(prepare(runner(loaded()), [TrainPrompt("a", prompt(5, seed=0))], NO_EOS, config, tmp_path, (1, 2)))


def test_order_and_mix():
    rows = [PromptLine("", i, {"source": source}) for source in "ab" for i in range(50)]
    config = PrepareSection(limit=40, mix={"a": 0.75, "b": 0.25}, seed=1)
    taken = ordered(rows, config)
    assert taken == ordered(rows, config)
    assert 24 <= sum(row.row["source"] == "a" for row in taken) <= 36
    assert ordered(rows, PrepareSection(limit=60, mix=config.mix, seed=1))[:40] == taken, "a higher limit only adds"
    assert len(ordered(rows, PrepareSection(limit=1000))) == 100
    with pytest.raises(ConfigError, match=r"no prompt comes from 'c'.*among a, b"):
        ordered(rows, PrepareSection(mix={"c": 1.0}))
