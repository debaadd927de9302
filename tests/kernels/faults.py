"""Faults in the sources of the kernels: compiled in all together, and switched on one by one."""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path


def plant(folder: Path, faults: Iterable[Sequence[str]]) -> None:
    """Write `faults` into the sources in a folder, where FAULT stands for "this one is on".

    Each is a file, and then what is right there and what is wrong, in pairs.
    """
    for number, (name, *pairs) in enumerate(faults, 1):
        text = (folder / name).read_text()
        for right, wrong in zip(pairs[::2], pairs[1::2], strict=True):
            assert right in text, right
            text = text.replace(right, wrong.replace("FAULT", f"(paceline_fault == {number})"))
        (folder / name).write_text(text)
    for name in ("abi.h", "pool.h"):
        (folder / name).write_text('extern "C" int paceline_fault;\n' + (folder / name).read_text())
    (folder / "library.cpp").write_text((folder / "library.cpp").read_text() + "int paceline_fault = 0;\n")


def switch(library: ctypes.CDLL, number: int) -> None:
    """Switch on the fault of this number, counted from 1; 0: none."""
    ctypes.c_int.in_dll(library, "paceline_fault").value = number


def unseen(library: ctypes.CDLL, faults: dict[str, tuple[str, ...]], is_right: Callable[[str], bool]) -> list[str]:
    """Names of the faults with which `is_right(instruction set)` holds, which each one names first."""
    missed = []
    for number, (name, (isa, *_)) in enumerate(faults.items(), 1):
        switch(library, number)
        if is_right(isa):
            missed.append(name)
    switch(library, 0)
    return missed
