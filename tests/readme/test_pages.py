"""What the pages show is tried: each command line is read by its command, and the Python blocks of each page run."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.main import get_command

import paceline
from paceline.cli.app import app
from paceline.target import LoadedModel
from paceline.train.stages import Stages
from tests import lora
from tests.cascade.common import PROMPTS, large, made_up, small
from tests.cli.helpers import paceline as run_command
from tests.real_models import default_model
from tests.server.helpers import listening

ROOT = Path(__file__).parents[2]
PAGES = {
    str(page.relative_to(ROOT)): page.read_text()
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "models/README.md")
}
COMMANDS = get_command(app)


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```(?:{kind})\n(.*?)^```", PAGES[page], re.S | re.M)


def command_lines(page: str, program: str) -> list[list[str]]:
    """The words of each command line, without what is said beside it."""
    lines = [line for block in blocks(page, "text|bash") for line in block.splitlines()]
    cut = [re.split(r"\s+#\s|\s{3,}(?!-)", line)[0] for line in lines if line.startswith(program)]
    return [shlex.split(line) for line in cut]


SHOWN = [(page, words) for page in PAGES for words in command_lines(page, "paceline ")]


@pytest.mark.parametrize(("page", "words"), SHOWN, ids=lambda one: one if isinstance(one, str) else " ".join(one))
def test_a_command_line_is_understood(page, words, tmp_path, monkeypatch):
    _, name, *rest = words
    if name.startswith("-"):
        assert any(name in option.opts for option in COMMANDS.params)
    else:
        COMMANDS.commands[name].make_context(name, rest)  # a wrong option or value raises
    if name == "train":  # its keys are options too
        settings = [block for block in (*blocks(page, "yaml"), *blocks("docs/heads.md", "yaml")) if "out:" in block]
        (tmp_path / "run.yaml").write_text(settings[0])
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("paceline.cli.train._follow", checked)
        done = run_command(*words[1:])
        assert done.exit_code == 0, done.output


def target(name: str) -> LoadedModel:
    return paceline.LLM(name).loaded


def checked(run: Stages, stage: str, screen: object) -> dict[str, object]:
    """In place of a stage: what is checked before it."""
    run.recipe.check(run.recipe.plan(run.method, run.config, target(run.config.model)))
    return {}


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_scripts_within_a_text_exist(page):
    for name in re.findall(r"`paceline ([a-z][a-z-]*)", PAGES[page]):
        assert name in COMMANDS.commands, name
    for name in re.findall(r"\bpython (?:-m )?((?:bench|examples|tests)[\w./]*)", PAGES[page]):
        file = ROOT / (name if name.endswith(".py") else name.replace(".", "/"))
        assert any(one.exists() for one in (file, file.with_suffix(".py"), file / "__main__.py")), name


def test_a_wrong_line_is_found():
    with pytest.raises(Exception, match="No such option"):
        COMMANDS.commands["generate"].make_context("generate", ["MODEL", "--max-new-tokens", "3"])


JSON = [line for page in PAGES for block in blocks(page, "json") for line in block.splitlines()]


@pytest.mark.parametrize("line", JSON)
def test_a_drafter_in_json_needs_no_file_of_ones_own(line):
    """Nothing but the default model, or the packaged mixture, and the packaged heads."""
    model = "tiny-mixture" if "experts" in line else "smollm2-135m"
    paceline.LLM(model, speculative_config=json.loads(line), max_num_seqs=1)


INSTEAD = [
    (r"max_tokens=\d+", "max_tokens=8"),
    (r"max_new_tokens=\d+", "max_new_tokens=8"),
    (r"\./my-vlm", "tiny-vlm-small"),
]
"""What a test runs in place of what a page shows; README.md has tests of its own."""


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python") and page != "README.md"])
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """In one process, as a reader would try them."""
    folder = default_model()
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (64, 48), "orange").save("cat.jpg")
    made_up(0.5).save("calib.json")
    for name in ("sql", "poems"):
        pair = torch.ones(2, 576), torch.zeros(576, 2)
        lora.write(
            tmp_path / "runs" / name,
            {"model.layers.0.self_attn.q_proj": pair},
            r=2,
            lora_alpha=2,
            layers_to_transform=0,
        )
    known = {"small": small(), "large": large(), "prompt": PROMPTS[0], "Cascade": paceline.Cascade}
    with listening() as (url, _, _):
        for code in blocks(page, "python"):
            if "from openai" in code:
                code = code.replace("http://localhost:8000", url).replace("smollm2-135m", "tiny")
                code = code.replace("seed=1", "seed=1, max_tokens=8")
            code = code.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(folder))
            for pattern, other in INSTEAD:
                code = re.sub(pattern, other, code)
            exec(code, known)
    if page == "CONTRIBUTING.md":
        llm = paceline.LLM("smollm2-135m", drafter=known["Repeat"]())
        (want,) = llm.plain().generate("one two", paceline.SamplingParams(max_tokens=8))
        assert llm.generate("one two", paceline.SamplingParams(max_tokens=8))[0].token_ids == want.token_ids
