"""Calls in Python: `[f(a=1), g(b="x")]`. They are parsed, never run, and passed on once they are whole."""

import ast
import json
import warnings
from collections.abc import Iterable
from typing import Any

from .reader import Reader, Reading

_JSON = {"true": True, "false": False, "null": None}


class PythonReader(Reader):
    """Reads calls in Python; without a mark they must name a tool of the request."""

    def python_calls(self, is_known: bool, is_list: bool) -> Reading[None]:
        """Read one call or several."""
        while True:
            yield from self.space()
            text = yield from self.word()
            if not text or (yield from self.peek()) != "(":
                return
            parts = [text]
            is_whole = yield from self.value(parts.append, is_python=True)
            self._held += parts[1:]
            made = _parsed("".join(parts), self) if is_whole else None
            if made is None or (is_known and made[0] not in self.tools):
                return
            self.call(made[0])
            self.argue(made[1])
            yield from self.done()
            yield from self.space()
            if is_list and (yield from self.sees("]")):
                self.forget()
                return
            yield from self.sees(",")


def _parsed(text: str, reader: Reader) -> tuple[str, str] | None:
    """The name and the arguments of a call, in JSON; None if it is none, or computes something."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about escapes
            call = ast.parse(text, mode="eval").body
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "print" and len(call.args) == 1:
            call = call.args[0]
        if not isinstance(call, ast.Call):
            return None
        name = ast.unparse(call.func).removesuffix(".call")  # of Llama's built-in tools
        name = name if name in reader.tools else name.rpartition(".")[2]
        known: Iterable[str] = reader.tools.get(name, {}).get("properties", {})
        arguments = {key: _literal(value) for key, value in zip(known, call.args, strict=False)}
        if len(arguments) < len(call.args):
            return None
        named = {str(item.arg): _literal(item.value) for item in call.keywords if item.arg is not None}
        written = json.dumps(arguments | named, ensure_ascii=False, allow_nan=False)
        return (name, written) if len(named) == len(call.keywords) else None
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def read_literal(text: str) -> Any:
    """A value that is no text as Python writes it, as some chat templates do; the text if it is none."""
    try:
        with warnings.catch_warnings(action="ignore"):
            value = _literal(ast.parse(text.strip(), mode="eval").body)
        json.dumps(value, allow_nan=False)
        return text if isinstance(value, str) else value
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text


def _literal(node: ast.expr | None) -> Any:
    """The value of a literal, JSON's words included. Raises ValueError for anything else."""
    if isinstance(node, ast.Name) and node.id in _JSON:
        return _JSON[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {str(_literal(key)): _literal(value) for key, value in zip(node.keys, node.values, strict=True)}
    value = ast.literal_eval(node) if node is not None else ()  # of **
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError(value)
    return value
