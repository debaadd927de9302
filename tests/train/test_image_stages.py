"""A run on prompts with images, from their file to a draft that is used; what is kept of an image, and refused."""

import json
from dataclasses import replace

import pytest

from paceline import LLM, SamplingParams, SelfQuantized
from paceline.errors import ConfigError
from paceline.methods.draft_model.drafter import DraftModel
from paceline.methods.eagle.drafter import Eagle
from paceline.methods.heads.folder import read_record
from paceline.target import load_model
from paceline.train.config import read_config
from paceline.train.data import Answers
from paceline.train.prepare import read_answers
from paceline.train.recipe import Batch
from paceline.train.stages import Done, Stages
from tests.train.toy import finished
from tests.vision.families import make_image, save_made

RUN = """
model: {base}/model
prompts: [{base}/data/prompts.jsonl]
out: {out}
dtype: float32
prepare: {{max_tokens: 5, limit: 8, prompt_tokens: 200, temperatures: [0]}}
train: {{max_tokens: 300, epochs: 1, held_out: 0.3, loss: {{window: 2}}}}
eval: {{prompts: [{base}/texts.jsonl], limit: 1, max_tokens: 2, temperatures: [0]}}
"""
METHODS = {
    "qat": ["head.bits=3"],
    "distill": ["head.num_layers=1", "head.vision=shared"],
    "eagle": ["train.loss={name: ce}"],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model that reads images, and prompts beside their images, some of the same words."""
    base = tmp_path_factory.mktemp("pictured")
    save_made(base / "model")
    (base / "data" / "images").mkdir(parents=True)
    rows: list[dict] = [{"prompt": "hello"}, {"prompt": "and you"}]
    for index in range(6):
        make_image(index).save(base / "data" / "images" / f"{index}.png")
        parts = [{"type": "image", "image": f"images/{index}.png"}, {"type": "text", "text": "what is it?"}]
        rows.append({"messages": [{"role": "user", "content": parts}], "source": "drawn"})
    (base / "data" / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (base / "texts.jsonl").write_text(json.dumps({"prompt": "hello"}) + "\n")
    return base


def stages(base, out, method, *more) -> Stages:
    (base / "run.yaml").write_text(RUN.format(base=base, out=out))
    return Stages(method, read_config(base / "run.yaml", [*METHODS.get(method, []), *more]))


@pytest.fixture(scope="module", params=METHODS)
def made(base, tmp_path_factory, request):
    """A run of each method."""
    out = tmp_path_factory.mktemp(request.param)
    run = stages(base, out, request.param)
    return request.param, out, run, finished(run, "prepare", "train", "eval")


def test_answers_are_those_about_the_image(base, made):
    _, out, run, _ = made
    lines = read_answers(out / "answers-0")
    pictured = [line for line in lines if line.images]
    assert (len(lines), len(pictured)) == (8, 6)
    params = SamplingParams(max_tokens=5)
    for line in pictured:
        assert line.messages[0]["content"][0]["image"].startswith(str(base / "data" / "images"))
        assert tuple(run.llm.generate(line.messages, params)[0].token_ids) == line.answer_ids
    assert len({line.prompt_ids for line in pictured}) == 1, "the words are the same"
    assert len({line.answer_ids for line in pictured}) > 1, "the answers are not"
    assert len({one.place for one in Answers.read(out / "answers-0").all}) == 8, "images are held out one by one"


def test_running_again_changes_nothing(base, made):
    method, out, _, _ = made
    before = (out / "answers-0" / "answers.jsonl").read_text()
    again = stages(base, out, method)
    assert [event.result["answers"] for event in again.run("prepare") if isinstance(event, Done)] == [8]
    assert (out / "answers-0" / "answers.jsonl").read_text() == before


def test_the_draft_is_written_and_used(base, made):
    method, out, _, done = made
    assert [one.path.name for one in done] == ["answers-0", "head" if method == "eagle" else "draft", "eval.json"]
    if method == "eagle":
        drafter = Eagle(out / "head")
    else:
        assert 0 < read_record(out / "draft")["training"]["held-out 1 - TV"] <= 1
    if method == "qat":
        drafter = SelfQuantized(weights=out / "draft")
    elif method == "distill":
        drafter = DraftModel(str(out / "draft"), vision="shared")
        assert load_model(str(out / "draft")).vision is not None
        assert "image-text-to-text" in (out / "draft" / "README.md").read_text()
    llm = LLM(str(base / "model"), dtype="float32", drafter=drafter)
    chat = read_answers(out / "answers-0")[-1].messages
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    drafted, plain = llm.generate(chat, params)[0], llm.plain().generate(chat, params)[0]
    assert drafted.token_ids == plain.token_ids


def test_a_text_draft_learns_to_draft_for_a_target_that_sees(base, made, tmp_path):
    method, out, _, _ = made
    if method != "distill":
        return
    run = stages(base, tmp_path, method, "head.vision=none", f"answers=[{out / 'answers-0'}]")
    assert [event.path.name for event in run.run("train") if isinstance(event, Done)] == ["draft"]
    assert load_model(str(tmp_path / "draft")).vision is None
    llm = LLM(str(base / "model"), dtype="float32", drafter=DraftModel(str(tmp_path / "draft"), vision="none"))
    assert llm.generate(read_answers(out / "answers-0")[-1].messages, SamplingParams(max_tokens=4))[0].token_ids


def test_states_are_those_of_a_target_that_looked(base, made):
    """From the last state before each answer token follows that token, though all prompts have the same words."""
    method, out, run, _ = made
    if method != "eagle":
        return
    rows, last, data = run.target.output_rows(), run.target.num_layers, Answers.read(out / "answers-0")
    pictured = [i for i, one in enumerate(data.all) if one.chat is not None]

    def foretold(batch: Batch) -> float:
        got = (batch.states[last].float() @ rows.T)[:, :-1].argmax(-1)
        return float((got == batch.token_ids[:, 1:])[batch.is_answer[:, 1:]].float().mean())

    batch = data.batch(pictured, [last], 300)
    assert foretold(batch) == 1.0
    words = replace(batch, states={last: batch.states[last][[0] * len(pictured)]})
    assert foretold(words) < 1.0, "the test sees the states of another image"


@pytest.mark.parametrize("other", ["medusa", "blockwise", "mtp"])
def test_other_heads_learn_from_the_same_states(base, made, tmp_path, other):
    method, out, _, _ = made
    if method != "eagle":
        return
    run = stages(base, tmp_path, other, f"answers=[{out / 'answers-0'}]", "train.loss={}")
    assert [event.path.name for event in finished(run, "train")] == ["head"]


@pytest.mark.parametrize("other", ["eagle3", "dflash"])
def test_three_states_of_a_pictured_prompt(base, made, tmp_path, other):
    if made[0] != "eagle":
        return
    run = stages(base, tmp_path, other, "train.loss={}", "head.states=[0,1,2]")
    assert finished(run, "prepare", "train")
    assert (tmp_path / "head" / "config.json").exists()


def test_what_cannot_be_read_is_refused(base, made, tmp_path):
    method, out, _, _ = made
    if method != "qat":
        return
    with pytest.raises(ConfigError, match="does not learn from images") as caught:
        list(stages(base, tmp_path, "eagle", "prepare.states=online").run("prepare"))
    assert "prepare.states=store" in str(caught.value)
    with pytest.raises(ConfigError, match="does not learn from images") as caught:
        list(stages(base, tmp_path, "space", "train.loss={}").run("prepare"))
    assert "without them" in str(caught.value)
    with pytest.raises(ConfigError, match="does not read images"):
        list(stages(base, tmp_path, "eagle", "train.loss={name: ce}", f"answers=[{out / 'answers-0'}]").run("train"))
    lines = ['{"messages": []}', '{"messages": [{"role": "user"}]}', '{"image": "images/0.png"}']
    for line in lines:
        (tmp_path / "wrong.jsonl").write_text(line + "\n")
        with pytest.raises(ConfigError, match=r"wrong.jsonl, line 1"):
            list(stages(base, tmp_path, "qat", f"prompts=[{tmp_path / 'wrong.jsonl'}]").run("prepare"))
