"""Kernels with planted faults, which tests must see."""

import importlib.util
from pathlib import Path
from types import ModuleType


def with_fault(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """A copy of a module of `kernels.gpu` in which `new` stands in the place of `old`."""
    source = Path(str(module.__file__)).read_text()
    assert source.count(old) == 1, old
    path = folder / "faulty.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(f"{module.__package__}.faulty", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
