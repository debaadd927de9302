"""Verdicts of the self-test, kept in the cache: a model that has passed is not compared with plain transformers again.

A verdict is for a model, see `hf.fingerprint`, in this process: its config and dtype, the kernels, the versions of
Paceline and of the libraries. A file that says anything else is ignored.
"""

import hashlib
import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
import transformers

from .. import __version__
from ..hf.described import DescribedModel
from ..kernels.build import cache_folder, load
from ..quant.blocks import BlockWeights
from ..system.files import to_json, write_text

_SMALLEST = 1 << 22  # numbers of the embeddings; smaller models are compared in no time
_CODE = Path(__file__).parents[1]


def has_passed(model: DescribedModel, fingerprint: str) -> bool:
    """Whether there is a verdict for this model."""
    if not _is_kept(model):
        return False
    facts = _facts(model, fingerprint)
    with suppress(OSError, ValueError):
        return _place(facts).read_text(encoding="utf-8") == facts
    return False


def keep(model: DescribedModel, fingerprint: str) -> None:
    """Note that a model has passed, where the cache can be written."""
    if not _is_kept(model):
        return
    facts = _facts(model, fingerprint)
    with suppress(OSError):
        _place(facts).parent.mkdir(parents=True, exist_ok=True)
        write_text(_place(facts), facts)


def forget() -> None:
    """Remove all verdicts, so that every model is tested anew."""
    shutil.rmtree(_folder(), ignore_errors=True)


def _is_kept(model: DescribedModel) -> bool:
    """False for small models."""
    return model.config.vocab_size * model.config.hidden_size >= _SMALLEST


def _folder() -> Path:
    return cache_folder("self_tests")


def _place(facts: str) -> Path:
    return _folder() / f"{hashlib.sha256(facts.encode()).hexdigest()[:32]}.json"


def _facts(model: DescribedModel, fingerprint: str) -> str:
    versions = {"paceline": f"{__version__} {_code()}", "torch": torch.__version__}
    versions |= {"transformers": transformers.__version__}
    config = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}
    forms = sorted({module.form.name for module in model.modules() if isinstance(module, BlockWeights)})
    facts = {"passed": fingerprint, "dtype": str(model.dtype), "forms": forms, "kernels": f"{load()} {model.device}"}
    return to_json({**facts, "versions": versions, "config": config}) + "\n"


@cache
def _code() -> str:
    """A hash of the sizes and times of the package's files."""
    files = sorted(path for path in _CODE.rglob("*") if path.suffix in (".py", ".cpp", ".h", ".so"))
    told = [(str(path.relative_to(_CODE)), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:32]
