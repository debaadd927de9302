"""What a run cannot do is reported before the first answer is written, and no file is left."""

import json
import os
import shutil
import sys

import pytest

from paceline.errors import ConfigError, IncompatibleModels
from paceline.train.config import read_config
from paceline.train.stages import Stages
from tests.cli.helpers import refusal, save
from tests.tiny import tiny_model
from tests.train.toy import with_one_engine

LINES = {  # files of one line
    "bad": '{"prompt": ',
    "surrogate": '{"prompt": "\\ud800"}',
    "deep": '{"prompt": ' + "[" * 1000 + "]" * 1000 + "}",
    "digits": '{"prompt": ' + "1" * 5000 + "}",
    "no-messages": '{"messages": []}',
    "no-content": '{"messages": [{"role": "user"}]}',
    "no-message": '{"messages": ["w5"]}',
    "number": "3",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("refused")
    save(base / "model", tiny_model("llama"))
    save(base / "granite", tiny_model("granite"))
    save(base / "wide", tiny_model("llama", vocab_size=101), [f"t{i}" for i in range(97)])
    shutil.copytree(base / "model", base / "strict")
    (base / "strict/chat_template.jinja").write_text("{{ raise_exception('System role not supported') }}")
    rows = [{"prompt": f"w{5 + i} w{7 + i}", "source": "s"} for i in range(4)]
    (base / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, line in LINES.items():
        (base / f"{name}.jsonl").write_text(line + "\n")
    os.mkfifo(base / "fifo")
    return base


def stages(base, out, method, words):
    given = [f"model={base / 'model'}", f"prompts=[{base / 'prompts.jsonl'}]", f"out={out}", "dtype=float32"]
    return with_one_engine(Stages(method, read_config(None, [*given, *words.replace("BASE", str(base)).split()])))


REFUSED = [
    ("eagle3", "head.num_attention_heads=5", "5 heads of 8 over 2"),
    ("eagle3", "head.draft_vocab_size=0", "head: draft_vocab_size"),
    ("eagle3", "head.draft_vocab_size=-1", "head: draft_vocab_size"),
    ("eagle3", "head.intermediate_size=0", "head: intermediate_size"),
    ("eagle3", "head.intermediate_size=2000000000", "EagleConfig.intermediate_size"),
    ("eagle3", "head.states=[9]", "no state of the target"),
    ("eagle3", "head.size=3", "head: unknown key 'size'"),
    ("eagle3", "head.seed=99999999999999999999", "head: seed"),
    ("eagle3", "train.loss.ce_weight=0", "train.loss.regress and train.loss.ce_weight are 0"),
    ("eagle3", "train.loss.steps=0", "train.loss: steps"),
    ("eagle3", "train.loss.noise=.nan", "train.loss: noise"),
    ("eagle", "head.states=[1]", "last state alone"),
    ("eagle", "train.loss.name=mse", "train.loss: name"),
    ("eagle", "train.loss.decay=1.5", "train.loss: decay"),
    ("eagle", "model=BASE/granite", "more than output rows times states"),
    ("medusa", "head.num_heads=100000", "head: num_heads"),
    ("medusa", "head.intermediate_size=3", "unknown key 'intermediate_size'"),
    ("blockwise", "head.num_layers=3", "unknown key 'num_layers'"),
    ("blockwise", "head.intermediate_size=2000000000", "BlockwiseConfig.intermediate_size"),
    ("dflash", "head.states=[9]", "no state of the target"),
    ("dflash", "head.block_size=1", "head: block_size"),
    ("dflash", "head.mask_token_id=100000", "mask_token_id is no token of the target"),
    ("dflash", "train.loss.anchors=0", "train.loss: anchors"),
    ("mtp", "head.states=[1]", "mtp heads read the last state alone"),
    ("space", "head.rank=-1", "head: rank"),
    ("space", "head.linears=[nope]", "no linear layer"),
    ("space", "head.lora=false", "gated adapter consists"),
    ("space", "head.mode=full head.rank=0", "rank 0 train nothing"),
    ("space", "train.loss.rows=1", "train.loss.rows is too small"),
    ("space", "train.loss.vocab_size=0", "train.loss: vocab_size"),
    ("space", "model=BASE/granite", "head.transition_rank=0"),
    ("qat", "head.bits=5", "head: bits"),
    *((method, "train.prompts=true", "only heads") for method in ("space", "qat", "distill")),
    ("qat", "head.linears=[nope]", "no linear layer"),
    ("qat", "head.group_size=256", "no linear layer fits"),
    ("qat", "start=somewhere", "begins from the target's weights"),
    ("qat", "train.loss.window=0", "train.loss: window"),
    ("distill", "head.num_layers=9", "head.num_layers is out of range"),
    ("distill", "head.model=BASE/model head.num_layers=1", "names a model and a number"),
    ("distill", "head.model=BASE/none", "no model at"),
    ("distill", "head.model=nosuch/x", "no model at.*hf download nosuch/x"),
    ("eagle", "model=nosuch/x", "no model at.*hf download nosuch/x"),
    ("eagle", "model=BASE/strict", "System role not supported"),
    ("distill", "model=BASE/strict head.num_layers=1", "System role not supported"),
    ("eagle", "eval.prompts=[BASE/fifo]", "regular file"),
    ("eagle", "eval.prompts=[BASE/deep.jsonl]", "JSON"),
    ("distill", "head.model=BASE/wide", "other sizes"),
    ("distill", "train.loss.on_policy=0.5 train.loss.name=token", "are not labels"),
    ("distill", "head.vision=own", "reads text alone"),
    ("eagle", "start=BASE/none", "no head at"),
    ("eagle", "eval.prompts=[BASE/none.jsonl]", "cannot be read"),
    ("eagle", "eval.prompts=[BASE/bad.jsonl]", "JSON"),
    ("eagle", "eval.prompts=[BASE/no-messages.jsonl]", "prompt|text|messages"),
    ("eagle", "eval.prompts=[BASE/no-content.jsonl]", "text|content"),
    ("eagle", "eval.prompts=[BASE/no-message.jsonl]", "text|message"),
    ("eagle", "eval.drafter.tree=nope", "tree"),
    ("eagle", "eval.drafter.x=0", "takes no 'x'"),
    ("eagle", "eval.depth=10 eval.nodes=3", "num_draft_nodes is below"),
    ("eagle", "train.tensorboard=true", "pip install tensorboard"),
    ("eagle", "prompts=[]", "no prompts"),
    ("eagle", "prompts=[BASE/none]", "cannot be read"),
    ("eagle", "prompts=[BASE/fifo]", "regular file"),
    ("eagle", "prompts=[/dev/zero]", "regular file"),
    *(("eagle", f"prompts=[BASE/{name}.jsonl]", "JSON") for name in ("bad", "surrogate", "deep", "digits")),
    *(("eagle", f"prompts=[BASE/{name}.jsonl]", "no chat") for name in ("no-messages", "no-message", "no-content")),
    ("eagle", "prompts=[BASE/number.jsonl]", "not a JSON object"),
    ("eagle", "prepare.mix.b=1", "no prompt comes from 'b'"),
    ("eagle", "prepare.prompt_tokens=1", "no prompt to answer"),
    ("eagle", "model=BASE/none", "no model at"),
    ("eagle", "device=nonsense", "unknown device"),
    ("eagle", "dtype=float7", "unknown dtype"),
    ("nonsense", "seed=0", "unknown"),
]


@pytest.mark.parametrize(("method", "words", "got"), REFUSED, ids=lambda value: str(value)[:40])
@pytest.mark.timeout(60)
def test_a_run_is_refused_before_anything_is_written(method, words, got, base, tmp_path, monkeypatch):
    if "tensorboard" in words:
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises((ConfigError, IncompatibleModels), match=got):
        list(stages(base, tmp_path / "out", method, words).run("prepare"))
    assert not (tmp_path / "out").exists()


def test_a_library_that_training_will_need_is_missed_at_once(base, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ConfigError, match=r"needs accelerate.*paceline\[train\]"):
        list(stages(base, tmp_path / "out", "eagle", "").run("prepare"))
    assert not (tmp_path / "out").exists()


def test_the_command_tells_in_one_line_and_takes_paths_as_they_are(base, tmp_path):
    common = (f"prompts=[{base / 'prompts.jsonl'}]", "train.limit=-1", "--target", str(base / "model"))
    for name in ("out", "2020-01-01", "a: b", "[x]", "1"):
        assert "train.limit" in refusal("train", "eagle", *common, "--out", str(tmp_path / name))
        assert "train.limit" in refusal("train", "eagle", *common, "--out", name)
    assert not list(tmp_path.iterdir())
