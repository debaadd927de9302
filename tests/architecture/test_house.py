"""The house rules, read off the source: imports point one way, files stay small, foreign modules stay untouched."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "paceline"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# A package may import those of a lower rank, and its own.
RANK = {
    "errors": -1,
    "integrations.vllm_options": -2,
    "integrations.other_names": -1,
    "integrations.vllm_drafters": 7,
    "integrations.custom_generate": 10,
    "schema": 0,
    "kernels": 0,
    "core": 1,
    "system": 1,
    "quant": 2,
    "attention": 2,
    "hf": 3,
    "zoo": 4,
    "verify": 2.5,
    "policy": 6.5,
    "sampling": 2,
    "methods": 6,
    "methods.recipe": 11.5,
    "target": 5.5,
    "engine": 7,
    "config": 7,
    "tuned": 8,
    "llm": 9,
    "async_llm": 10,
    "measure": 10,
    "train": 11,
    "cascade": 11,
    "learn": 11.7,
    "audit": 11,
    "server": 12,
    "cli": 13,
    "__main__": 14,
}


def room(module: str) -> str | None:
    """The package of `RANK` that a module below paceline belongs to: the longest name that it begins with."""
    parts = module.split(".")
    if parts[0] == "methods" and parts[-1] == "recipe":
        return "methods.recipe"
    return next((name for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in RANK), None)


def imported_modules(path: Path, tree: ast.AST) -> set[str]:
    """Modules and names below paceline that a file imports, wherever in the file it does."""
    package = ("paceline", *path.relative_to(PACKAGE).parent.parts)
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join((*base, *([node.module] if node.module else [])))
            names = [alias.name for alias in node.names]
            place = ROOT.joinpath(*stem.split("."))
            found |= {
                f"{stem}.{name}" if (place / f"{name}.py").exists() or stem == "paceline" else stem for name in names
            }
    return {name.removeprefix("paceline.") for name in found if name.startswith("paceline.")}


def backward_imports(path: Path, tree: ast.AST) -> set[str]:
    here = room(module_of(path))
    rooms = {room(module) for module in imported_modules(path, tree)} - {here, None}
    return {name for name in rooms if RANK[name] >= RANK[here]}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def foreign_assignments(tree: ast.AST) -> list[int]:
    """Lines that assign to an attribute of something imported from outside paceline, setattr included."""
    foreign: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            foreign |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            foreign |= {alias.asname or alias.name for alias in node.names}

    def base_of(target: ast.expr) -> str | None:
        while isinstance(target, ast.Attribute):
            target = target.value
        return target.id if isinstance(target, ast.Name) else None

    lines = []
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            lines += [node.lineno] if base_of(node.args[0]) in foreign else []
        lines += [node.lineno for t in targets if isinstance(t, ast.Attribute) and base_of(t) in foreign]
    return lines


def faults(path: Path) -> list[str]:
    """What a source file does against the rules of the house."""
    text = path.read_text()
    tree, here, found = ast.parse(text), room(module_of(path)), []
    if text.count("\n") > 400:
        found.append("is longer than 400 lines")
    if here is None and path.name != "__init__.py":
        found.append("has no rank")
    elif here is not None:
        found += [f"imports {name}, which is above it" for name in backward_imports(path, tree)]
    if path != PACKAGE / "cli" / "process.py":  # a command's process is its own: streams, hooks
        found += [f"assigns to what others own in line {line}" for line in foreign_assignments(tree)]
    return [f"{path.relative_to(ROOT)} {fault}" for fault in found]


def test_sources_follow_the_rules():
    assert not [fault for path in SOURCES for fault in faults(path)]


_BELOW = re.compile(r"(engine|policy)(\..*)?|target(\.(runner|load|open_model|numerics))?")


def reaches_the_engine(path: Path, tree: ast.AST) -> list[str]:
    """What a drafter imports of the engine, of policies, or of the runner: it sees a `Target` and a `LoadedModel`."""
    is_drafter = room(module_of(path)) == "methods"  # a recipe trains models
    return [name for name in imported_modules(path, tree) if is_drafter and _BELOW.fullmatch(name)]


def test_methods_see_a_target_and_no_engine():
    assert not {
        str(path): found for path in SOURCES if (found := reaches_the_engine(path, ast.parse(path.read_text())))
    }
    for mutant in ("from ..engine import x\n", "from ..target import ModelRunner\n", "import paceline.policy.simple\n"):
        assert reaches_the_engine(PACKAGE / "methods" / "x.py", ast.parse(mutant)), mutant


def test_no_modules_import_each_other_in_a_circle():
    """Nor in functions, nor for types alone."""
    known = {module_of(path): path for path in SOURCES if path.name != "__init__.py"}
    imports = {module: imported_modules(path, ast.parse(path.read_text())) & {*known} for module, path in known.items()}
    [*TopologicalSorter(imports).static_order()]  # raises an error that names the circle
    with pytest.raises(CycleError):
        TopologicalSorter({**imports, "core.tree": {"llm"}}).prepare()


def test_core_imports_torch_and_pydantic_only():
    for path in (PACKAGE / "core").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                assert node.module.split(".")[0] in ("torch", "jaxtyping", "collections", "dataclasses", "enum",
                                                     "abc", "contextlib", "functools", "operator", "typing",
                                                     "pydantic"), path  # fmt: skip


def test_decoders_are_made_in_few_places():
    """`LLM.using` is the way to the same model with something else; without an `LLM` only training decodes."""
    makers = {str(path.relative_to(PACKAGE)) for path in SOURCES if "SpeculativeDecoder(" in path.read_text()}
    assert makers == {"engine/loop.py", "llm.py", "train/prepare.py"}


def test_what_a_pass_keeps_is_an_argument():
    """What the target holds is set by the target alone; a drafter sees a `Target`."""
    of_target = re.compile(r"\b(runner|states|settings)\.\w+ = ")
    assert [path for path in SOURCES if of_target.search(path.read_text())] == []


def test_tests_stay_small():
    for path in (ROOT / "tests").rglob("*.py"):
        assert path.read_text().count("\n") <= 400, path


def test_repository_speaks_of_itself_alone():
    words = re.compile(
        r"\.\./shared|(?<![\w.])/(home|root|opt|work)/|pythonhosted|trust_remote_code=True|torch\.load\((?!.*weights_only)"
    )
    others = [*(ROOT / "examples").rglob("*.py"), *(ROOT / "bench").rglob("*.py"), *(ROOT / "models").rglob("*.py")]
    for path in [*SOURCES, *others, ROOT / "Makefile", *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        found = words.search(path.read_text())
        assert found is None, (path, found and found.group())


@pytest.mark.parametrize(
    "mutant",
    [
        ("core/x.py", "from ..target import ModelRunner\n"),
        ("verify/x.py", "import paceline.methods\n"),
        ("target/x.py", "def f():\n    from ..engine.loop import SpeculativeDecoder\n"),
        ("methods/x.py", "from ..engine import loop\n"),
        ("methods/x.py", "from ..policy import CostModel\n"),
        ("engine/x.py", "from ..llm import LLM\n"),
    ],
)
def test_backward_import_is_noticed(mutant):
    name, source = mutant
    assert backward_imports(PACKAGE / name, ast.parse(source))


@pytest.mark.parametrize(
    "source",
    ["import transformers\ntransformers.x = 1\n", "from torch import nn\nnn.Linear.forward = 1\n",
     "import torch\nsetattr(torch, 'x', 1)\n"],
)  # fmt: skip
def test_foreign_assignment_is_noticed(source):
    assert foreign_assignments(ast.parse(source))


def test_packaged_records_name_no_machine_paths():
    """What a run records of its command line must not travel with the package."""
    for file in sorted((ROOT / "models").rglob("*")):
        if file.suffix in (".json", ".md") and file.parent.name != "model":
            found = re.search(r"(?<![\w.])/(home|root|opt|work|tmp)/", file.read_text(encoding="utf-8"))
            assert found is None, f"{file}: {found and found[0]}"
