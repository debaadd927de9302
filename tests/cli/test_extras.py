"""What works without the packages of the extras, and what is said before any work where one is needed."""

import subprocess
import sys

import pytest

BARE = """
import sys
EXTRAS = {"accelerate", "fastapi", "llguidance", "matplotlib", "peft", "tensorboard", "uvicorn"}

class Without:
    '''A finder of modules that does not find those of the extras.'''

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in EXTRAS else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(one) for one in sys.meta_path]
from pathlib import Path
from tests.cli.helpers import paceline

model, folder = sys.argv[1], Path(sys.argv[2])
prompts = folder / "p.jsonl"
prompts.write_text("".join('{"prompt": "w%d w9 w%d"}\\n' % (5 + i, 6 + i) for i in range(16)))
few = ("--num-prompts", "1", "--max-tokens", "3")
for words in (
    ("models",),
    ("generate", model, "-p", "w5 w9", "--max-tokens", "3"),
    ("demo", model, *few),
    ("check", model, *few, "--no-distribution-test"),
    ("bench", model, *few, "--out", str(folder / "result")),
    ("show", str(folder / "result"), "--html", "--out", str(folder / "page.html")),
    ("tune", model, *few, "-d", "lookup", "--out", str(folder / "tuned.json")),
    ("calibrate", model, model, "--prompts", str(prompts), "--max-disagreement", "0.2", "--short-limit", "4",
     "--out", str(folder / "c.json")),
):
    done = paceline(*words)
    assert done.exit_code == 0, (words, done.output)
assert not (folder / "c.svg").exists()
assert "paceline[plots]" in paceline("plot", str(folder / "result")).stderr
assert "pip install 'paceline[serve]'" in paceline("serve", model).stderr
for method in ("eagle", "qat"):
    told = paceline("train", method, "--target", model, "--out", str(folder / "run"), f"prompts={prompts}")
    assert told.exit_code == 1 and "pip install 'paceline[train]'" in told.stderr, told.output
assert not (folder / "run").exists(), "answers were written before the missing package was noticed"
assert not EXTRAS & {name.partition(".")[0] for name in sys.modules}
"""


@pytest.mark.more
def test_commands_without_the_extras(model, tmp_path):
    """In one process of its own, since this one has imported them."""
    done = subprocess.run(
        [sys.executable, "-c", BARE, model, str(tmp_path)], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
