"""A package of its own adds a trained method by one entry point: it is trained, saved, read, and drafts as ours do."""

import json

import pytest
import torch

from paceline import LLM, Fixed, SamplingParams
from paceline.config import parse
from paceline.errors import ConfigError, NotExportable
from paceline.measure.tune import candidates_of
from paceline.methods import table
from paceline.methods.heads.exchange import export_head
from paceline.methods.heads.folder import load_head
from paceline.methods.heads.info import head_info
from tests.cli.helpers import answer, paceline, save
from tests.tiny import tiny_model

SETTINGS = ("train.max_tokens=64", "train.held_out=0", "head.draft_vocab_size=60", "prepare.max_tokens=8",
            "eval.limit=1", "eval.max_tokens=6", "eval.depth=1", "dtype=float32")  # fmt: skip


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """Its distribution, installed, and a head that was trained on a tiny model."""
    base = tmp_path_factory.mktemp("outside")
    site = base / "site" / "next_but_one-1.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: next-but-one\nVersion: 1\n")
    (site / "entry_points.txt").write_text("[paceline.drafters]\nnext_but_one = tests.methods.outside:METHOD\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(base / "site")
        table._installed.cache_clear()
        save(base / "model", tiny_model("llama"))
        lines = [json.dumps({"prompt": " ".join(f"w{5 + (3 * i + j) % 90}" for j in range(4))}) for i in range(8)]
        (base / "prompts.jsonl").write_text("\n".join(lines))
        settings = (*SETTINGS, f"prompts=[{base / 'prompts.jsonl'}]")
        made = answer("train", "next_but_one", "-m", str(base / "model"), "-o", str(base / "run"), *settings)
        assert made["train"]["path"] == str(base / "run" / "head")
        assert made["eval"]["trials"][0]["result"]["mean_acceptance_length"] >= 1
        yield base / "run" / "head"
    table._installed.cache_clear()


def test_it_is_read_and_drafts(head):
    assert head_info(head).method == parse(f"head:{head}").method == "next_but_one"
    llm = LLM(
        str(head.parents[1] / "model"), drafter=parse(f"head:{head}").build()[0], policy=Fixed(1), dtype="float32"
    )
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    result = llm.generate([[5, 6, 7]], params)[0]
    assert result.token_ids == llm.plain().generate([[5, 6, 7]], params)[0].token_ids
    assert sum(one.num_drafted for one in result.outputs[0].rounds) > 5
    assert torch.count_nonzero(load_head(head).fc.weight)
    assert "next but one, one layer over the last hidden state" in (head / "README.md").read_text()


def test_it_is_named_where_ours_are(head):
    assert {"drafter": "head:PATH_OR_NAME", "method": "next_but_one"}.items() <= answer("models")["drafters"][
        -1
    ].items()
    assert "next_but_one" in paceline("train", "--help").stdout
    assert [one.method for one in candidates_of([f"head:{head}"])] == ["next_but_one"]
    with pytest.raises(ConfigError, match="next_but_one"):
        parse({"method": "next_but_too"})
    with pytest.raises(NotExportable, match="next but one"):
        export_head(head, "vllm", head.parent / "out")
