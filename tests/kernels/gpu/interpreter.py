"""Triton's interpreter with the same results in less than half the time.

For every operation it checks for overflows that it then does not report, makes the table of numpy's types, and makes
constants of a shape; for every function that a kernel calls it replaces the whole language, which already is replaced.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import triton.language as tl
from triton.runtime import interpreter


def quicken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until `monkeypatch` is undone."""
    quiet = interpreter.InterpreterOptions(sanitize_overflow=False)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", quiet)
    monkeypatch.setattr(interpreter, "_patch_lang", _once_a_launch(interpreter._patch_lang))
    monkeypatch.setattr(interpreter, "_get_np_dtype", _once_a_type(interpreter._get_np_dtype))
    monkeypatch.setattr(tl.tensor, "__init__", _init)


class _Once:
    """What a launch replaced, put back at its end."""

    def __init__(self, scope: Any, known: set[str]):
        self.scope, self.known = scope, known

    def restore(self) -> None:
        self.known.clear()
        self.scope.restore()


def _once_a_launch(patch: Callable[..., Any]) -> Callable[..., Any]:
    known: set[str] = set()  # modules whose functions see the language of the interpreter

    def once(function: Callable[..., Any]) -> _Once | None:
        if function.__module__ in known:
            return None
        known.add(function.__module__)
        return _Once(patch(function), known)

    return once


def _once_a_type(of: Callable[..., Any]) -> Callable[..., Any]:
    known = functools.cache(of)
    pointer = of(tl.pointer_type(tl.int32))
    return lambda kind: pointer if isinstance(kind.scalar, tl.pointer_type) else known(kind.scalar)


@functools.cache
def _constants(shape: tuple[int, ...]) -> tuple[tl.constexpr, tl.tuple]:
    return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])


def _init(self: tl.tensor, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _constants((*type.shape,) if type.is_block() else ())
