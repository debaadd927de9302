"""What a start imports, each in a process of its own."""

import subprocess
import sys

import pytest

NEVER = {
    *("datasets", "fastapi", "llguidance", "matplotlib", "pandas", "scipy", "sklearn", "tensorboard", "tensorflow"),
    *("torchaudio", "torchvision", "transformers.trainer", "transformers.generation.utils", "uvicorn"),
}
HEAVY = NEVER | {
    *("accelerate", "filelock", "gguf", "httpx", "huggingface_hub", "jinja2", "numpy", "PIL", "psutil", "requests"),
    *("safetensors", "sympy", "tokenizers", "torch", "tqdm", "transformers", "yaml"),
}
HELP = "from paceline.cli import main\ntry: main([{!r}])\nexcept SystemExit as done: assert not done.code"


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        ("import paceline", HEAVY | {"pydantic", "rich", "typer"}),
        (HELP.format("--version"), HEAVY | {"rich.markdown", "typer.rich_utils"}),
        (HELP.format("--help"), HEAVY | {"rich.markdown", "typer.rich_utils"}),
        ("import paceline.core.round, paceline.core.nodes", HEAVY),
        ("import gc, paceline; paceline.LLM; assert gc.isenabled()", NEVER | {"rich", "typer", "paceline.train"}),
    ],
    ids=["import", "version", "help", "show", "llm"],
)
def test_nothing_heavy_is_imported(code, forbidden):
    code += f"\nimport sys; print(sorted({forbidden} & set(sys.modules)))"
    out = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert out.splitlines()[-1] == "[]"
