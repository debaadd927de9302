"""`check` tells ties from bugs: real engines pass, and every planted fault is called a bug."""

import gzip
import json
from collections import Counter
from dataclasses import replace

import pytest
import torch

from paceline import LLM, Coupled, Fixed, PromptLookup, Ratio, SamplingParams, Typical
from paceline.check import check
from paceline.checks.law_test import chi_square, law_test
from paceline.checks.measure import measure
from paceline.checks.prompt_files import read_prompts
from paceline.checks.verdict import Divergence, Measured, Verdict, classify, first_difference
from paceline.core.interfaces import Verifier
from paceline.core.outputs import TargetOutput, VerifyOutput
from paceline.core.request import Sequence
from paceline.errors import ConfigError
from paceline.runner import ModelRunner
from paceline.runner.layout import PassLayout
from tests.adversaries import Scripted
from tests.tiny import tiny_model

PROMPTS = [[5, 9, 31, 7, 5, 9, 31], [3, 3, 3, 3, 3], [64, 22, 64, 22, 64]]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Models this small only lose time to a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class AcceptsAll(Verifier):
    """Claims to be exact and keeps every drafted token."""

    name, lossless, exact = "accepts-all", True, True

    def verify(self, draft, law, seeds, positions):
        rows, nodes = draft.tree.token_ids.shape
        path = torch.arange(1, nodes).expand(rows, -1)
        is_bonus = torch.ones(rows, dtype=torch.bool)
        return VerifyOutput(path, torch.full((rows,), nodes - 1), law.scores[:, -1].argmax(-1), is_bonus)


def engine(verifier=None, dtype=torch.float32):
    model = tiny_model("llama", dtype=dtype)
    return LLM(model, drafter=PromptLookup(), policy=Fixed(4), verifier=verifier, numerics="fast")


def run(llm, **options):
    return check(llm, PROMPTS, max_tokens=24, with_law_test=False, **options)


@pytest.mark.parametrize(
    ("gap", "noise", "rounding", "expected"),
    [
        (0.1, 0.05, 1.0, Verdict.NEAR_TIE),  # just closed by both sides
        (0.0, 0.125, 1.0, Verdict.NEAR_TIE),
        (0.11, 0.05, 1.0, Verdict.BUG),
        (0.0, 0.0, 1.0, Verdict.BUG),  # nothing moved, so nothing but a bug can have decided
        (1.0, 2.0, 0.5, Verdict.BUG),  # too large for rounding: a faulty pass must not excuse itself
        (float("inf"), 0.1, 1.0, Verdict.BUG),
        (0.1, float("nan"), 1.0, Verdict.BUG),
        (-0.3, 0.1, 1.0, Verdict.BUG),  # plain decoding did not take its own best token
    ],
)
def test_classify(gap, noise, rounding, expected):
    assert classify(Divergence(3, 1, 2), Measured(gap, noise, rounding))[0] is expected


def test_classify_without_two_tokens():
    assert classify(None, None)[0] is Verdict.IDENTICAL
    assert classify(Divergence(3, None, 2), None)[0] is Verdict.BUG


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == Divergence(1, 2, 4)
    assert first_difference([1, 2], [1, 2, 3]) == Divergence(2, None, 3)
    assert first_difference([1, 2], [1]) == Divergence(1, 2, None)


def test_a_right_engine_passes():
    report = run(engine())
    assert report.verdicts == {"identical": 6, "near_tie": 0, "bug": 0}
    assert report.passed
    assert report.mean_acceptance_length > 1
    assert (report.exact, report.lossless, report.numerics) == (True, True, "fast")


def test_bfloat16_has_no_bugs():
    assert run(engine(dtype=torch.bfloat16)).verdicts["bug"] == 0


def test_a_verifier_that_accepts_everything_is_a_bug():
    report = run(engine(AcceptsAll()))
    assert report.verdicts["bug"] >= 4
    assert not report.passed
    bug = next(c for c in report.comparisons if c.verdict is Verdict.BUG)
    assert bug.position is not None
    assert {"gap", "noise", "position", "plain_token", "speculative_token"} <= bug.as_dict().keys()


def test_shifted_positions_in_wide_passes_are_a_bug(monkeypatch):
    llm = engine()
    right = PassLayout.position_ids.func

    def shifted(layout):
        wide = layout.tree is not None and layout.num_nodes > 1
        return right(layout) + torch.arange(layout.num_nodes) if wide else right(layout)

    prop = property(shifted)
    monkeypatch.setattr(PassLayout, "position_ids", prop)
    assert run(llm).verdicts["bug"] >= 2


def test_wrong_rows_kept_are_a_bug(monkeypatch):
    llm = engine()
    right = llm.runner.cache.commit
    monkeypatch.setattr(llm.runner.cache, "commit", lambda slot, nodes: right(slot, [n + 1 for n in nodes]))
    assert run(llm).verdicts["bug"] >= 1


def test_a_tie_within_rounding_is_a_near_tie(monkeypatch):
    """Tokens in pairs of equal weights; wide passes round the second of each pair up by the last bit."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight[48:96] = model.lm_head.weight[:48]
    llm = LLM(model, drafter=PromptLookup(), policy=Fixed(4), numerics="fast")
    right = ModelRunner.forward

    def rounds_up(self, slots, tree):
        logits = right(self, slots, tree).logits.clone()
        logits[..., 48:96] = logits[..., :48]
        if tree.num_nodes > 1:
            logits[..., 48:96] += logits.abs().max() * 2e-7
        return TargetOutput(logits)

    monkeypatch.setattr(ModelRunner, "forward", rounds_up)
    report = run(llm, temperatures=[0.0])
    assert report.verdicts["near_tie"] >= 1
    assert report.verdicts["bug"] == 0
    tie = next(c.measured for c in report.comparisons if c.verdict is Verdict.NEAR_TIE)
    assert tie.gap == 0
    assert 0 < tie.noise <= tie.rounding


class Trees(Scripted):
    """Right tokens among wrong siblings, read off plain answers as they are asked for."""

    def __init__(self, plain, script):
        super().__init__({}, script, branching=True)
        self.plain = plain

    def right(self, seq, count):
        key = tuple(seq.prompt_ids)
        if key not in self.future:
            params = replace(seq.params, seed=seq.seed, max_tokens=40, ignore_eos=True)
            self.future[key] = [*key, *self.plain.generate([list(key)], params)[0].token_ids]
        return super().right(seq, count)


def tree_engine(dtype=torch.float32):
    model = tiny_model("llama", dtype=dtype)
    return LLM(model, drafter=Trees(LLM(model, numerics="fast"), [None, 1, 2]), policy=Fixed(4, 12), numerics="fast")


def test_trees_are_measured_on_their_own_passes(monkeypatch):
    """The divergence is replayed on the trees of the rounds: the same passes, node by node."""
    llm = tree_engine()
    answer = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=20, seed=0))[0].outputs[0]
    assert any(len(set(r.parents)) < len(r.parents) and r.num_accepted > 1 for r in answer.rounds)
    seen = []
    right = ModelRunner.forward
    monkeypatch.setattr(ModelRunner, "forward", lambda self, s, tree: seen.append(tree) or right(self, s, tree))
    ids, token = answer.token_ids, llm.loaded.vocab_size - 1
    seq = Sequence(PROMPTS[0], SamplingParams(), 0, frozenset(), 256, token_ids=[*PROMPTS[0], *ids])
    for position in (0, 2, 7, 19):
        seen.clear()
        measured = measure(llm, seq, answer.rounds, Divergence(position, ids[position], token))
        assert 0 <= measured.noise <= measured.rounding
        assert measured.gap > 0
        replayed = [tuple(tree.parents[0].tolist()) for tree in seen[position + 1 :]]
        alone = [r.parents for r in answer.rounds if not r.with_prompt]  # the first is read with the prompt
        assert replayed == alone[: len(replayed)]


def test_branching_engines_pass_and_their_faults_are_bugs(monkeypatch):
    assert run(tree_engine()).verdicts == {"identical": 6, "near_tie": 0, "bug": 0}
    assert run(tree_engine(torch.bfloat16)).verdicts["bug"] == 0
    llm = tree_engine()
    right = llm.runner.cache.commit
    monkeypatch.setattr(llm.runner.cache, "commit", lambda slot, nodes: right(slot, list(range(1, len(nodes) + 1))))
    assert run(llm).verdicts["bug"] >= 1


def test_siblings_that_see_each_other_are_a_bug(monkeypatch):
    llm = tree_engine()
    right = PassLayout._visible

    def leaking(layout, row, window):
        mask, start = right(layout, row, window), layout.starts[row]
        if layout.tree is not None and not layout.tree.is_chain:
            mask[2:, start + 1] = True
        return mask

    monkeypatch.setattr(PassLayout, "_visible", leaking)
    assert run(llm).verdicts["bug"] >= 1


def test_other_tokens_are_no_bug_where_only_the_law_is_promised():
    report = run(engine(Ratio()))
    assert report.skipped == [0.8]
    assert report.verdicts == {"identical": 3, "near_tie": 0, "bug": 0}


def test_nothing_to_check():
    with pytest.raises(ConfigError):
        check(engine(), [])
    with pytest.raises(ConfigError):
        run(engine(), temperatures=[])


@pytest.mark.parametrize("verifier", [Coupled(), Ratio()])
def test_lossless_verifiers_pass_the_law_test(verifier):
    found = law_test(verifier, samples=600)
    assert found.passed
    assert found.num_different == (0 if verifier.exact else None)
    assert found.mean_acceptance_length > 1.2


@pytest.mark.parametrize("verifier", [AcceptsAll(), Typical(allow_lossy=True)])
def test_other_verifiers_fail_it(verifier):
    assert not law_test(verifier, samples=600).passed


def test_the_law_test_leaves_the_users_random_state_alone():
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    law_test(Coupled(), samples=1)
    assert torch.equal(before, torch.random.get_rng_state())


def test_chi_square():
    law = [0.5, 0.25, 0.2, 0.05]
    assert chi_square(Counter({0: 500, 1: 250, 2: 200, 3: 50}), law) == pytest.approx(1.0)
    assert chi_square(Counter({0: 350, 1: 400, 2: 200, 3: 50}), law) < 1e-6
    assert chi_square(Counter({0: 520, 1: 240, 2: 190, 3: 50}), law) > 0.1


ROWS = [
    ({"question_id": 1, "turns": ["first", "second"]}, [{"role": "user", "content": "first"}]),
    ({"task_id": "x/0", "prompt": "def f():"}, "def f():"),
    ({"question": "1 + 1?", "answer": "2"}, [{"role": "user", "content": "1 + 1?"}]),
    ({"messages": [{"role": "user", "content": "hi"}]}, [{"role": "user", "content": "hi"}]),
    ("just text", "just text"),
]


@pytest.mark.parametrize("zipped", [False, True])
def test_prompt_files(tmp_path, zipped):
    text = "\n".join(json.dumps(row) for row, _ in ROWS) + "\n\n"
    path = tmp_path / ("p.jsonl.gz" if zipped else "p.jsonl")
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    assert read_prompts(path) == [prompt for _, prompt in ROWS]
    assert len(read_prompts(path, 2)) == 2
    plain = tmp_path / "p.txt"
    plain.write_text("one line\n{another\n")
    assert read_prompts(plain) == ["one line", "{another"]


@pytest.mark.parametrize("content", ["", "{bad", "[1]", '{"text": 1}', '{"turns": []}'])
def test_files_without_prompts(tmp_path, content):
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"p\.jsonl"):
        read_prompts(path)
    (tmp_path / "q.jsonl.gz").write_bytes(b"not gzip")
    for missing in ("absent.jsonl", "q.jsonl.gz"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_prompts(tmp_path / missing)
