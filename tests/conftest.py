"""One thread for each process, so that timings and bits do not depend on who else uses the machine."""

import gc
import os
import tempfile
from pathlib import Path

if not Path("/dev/nvidiactl").exists():  # without a GPU, its kernels run in Triton's interpreter
    os.environ["TRITON_INTERPRET"] = "1"

import jaxtyping
import pytest
import torch


def pytest_configure() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # of commands that tests run
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of these hundreds compiles all that it imports
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items) -> None:
    """`diagonal`: value i of the longest parameter goes with value i, modulo their number, of the others.

    With `more` each pair of two parameters' values; other combinations of three or more are `slow`. Where each takes
    long, `diagonal("slow")` makes all others `slow`.
    """
    for item in items:
        if diagonal := item.get_closest_marker("diagonal"):
            axes = [mark.args[:2] for mark in item.iter_markers("parametrize")]
            places = [(len(values), _place(item.callspec.params, names, values)) for names, values in axes]
            (_, first), *others = sorted(places, reverse=True)
            (length, second), *rest = others
            if any(first % size != place for size, place in others):
                is_pair = not diagonal.args and all((second + first // length) % size == place for size, place in rest)
                item.add_marker("more" if is_pair else "slow")


def _place(params, names, values) -> int:
    """Which of the values these parameters have. `callspec.indices` counts combinations, not values."""
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    for place, value in enumerate(values):
        given = value.values if hasattr(value, "marks") else value if len(names) > 1 else (value,)  # pytest.param
        if all(params[name] is one for name, one in zip(names, given, strict=True)):
            return place
    raise LookupError(f"{names}: none of {values}")


def pytest_collection_finish() -> None:
    """What is imported and collected by now stays: the garbage collector need not look at it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _temporary_files(tmp_path_factory):
    """Whatever is not removed lies with pytest's own files, of which the last three runs are kept."""
    tempfile.tempdir = str(tmp_path_factory.mktemp("files"))


@pytest.fixture(autouse=True)
def _own_randomness():
    """Tests draw from generators of their own; nothing they do to the global one may reach another test."""
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


CHECKED = ("attention", "contracts", "decoding", "engine", "sampling", "target", "verify")
"""Folders in which shapes are checked against annotations, which makes short loops several times slower.

Elsewhere one test of each drafter asks for `checked_types`. The checks decorate every function of `core` and `verify`
when it is defined, so one that is defined within another costs milliseconds in every call: there are none.
"""


@pytest.fixture(autouse=True)
def _types(request):
    jaxtyping.config.update("jaxtyping_disable", request.path.parent.name not in CHECKED)


@pytest.fixture
def checked_types(_types):
    """For one test of a folder in which shapes are not checked."""
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def unchecked_types(_types):
    """For thousands of walks, and for what untyped callers pass."""
    jaxtyping.config.update("jaxtyping_disable", True)
