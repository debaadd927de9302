"""Calls whose arguments are elements: each becomes JSON, by the tool's schema, as soon as it is whole."""

import json
from collections.abc import Mapping
from typing import Any

from .python_calls import read_literal
from .reader import Reader, Reading, read_json

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class XmlReader(Reader):
    """Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

    function, parameter: what is before a name, behind it, and at the end.
    strips: whether one line break at each end of a value is not part of it.
    """

    marks: tuple[str, ...] = ("<tool_call>", "<function=")
    ends: tuple[str, ...] = ("</tool_call>",)
    function: tuple[str, str, str] = ("<function=", ">", "</function>")
    parameter: tuple[str, ...] = ("<parameter=", ">", "</parameter>")
    strips = True

    def calls(self, mark: str) -> Reading[None]:
        opens, behind, end = self.function
        yield from self.space()
        if mark != opens and not (yield from self.sees(opens)):
            return
        while True:
            name = yield from self.word()
            if not name or not (yield from self.sees(behind)):
                return
            self.call(name)
            if not (yield from self.arguments(self.tools.get(name, {}), end)):
                return
            yield from self.done()
            yield from self.space()
            if not (yield from self.sees(opens)):
                yield from self.closes(*self.ends)
                return

    def arguments(self, schema: Mapping[str, Any], end: str) -> Reading[bool]:
        """Read the elements and the end of the call; returns whether it is there."""
        start, *middles, close = self.parameter
        count = 0
        while True:
            yield from self.space()
            if not (yield from self.sees(start)):
                break
            key, middle = yield from self.text_until(*middles)
            value, mark = yield from self.text_until(close)
            if not mark:
                return False
            self.forget()
            self.argue_of(count, key, self.read_value(value, middle, schema.get("properties", {}).get(key.strip())))
            count += 1
        has_ended = yield from self.sees(end)
        if has_ended or not self._is_cut:
            self.argue("}" if count else "{}")
        if has_ended:
            self.forget()
        return has_ended

    def argue_of(self, count: int, key: str, value: Any) -> None:
        """Add an argument behind `count` others."""
        before = ", " if count else "{"
        self.argue(f"{before}{json.dumps(key.strip(), ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}")

    def read_value(self, text: str, mark: str, schema: Any) -> Any:
        """The value of an element."""
        if self.strips:
            text = text.removeprefix("\n").removesuffix("\n")
        return typed(text, schema)


class SeedOSS(XmlReader):
    """Seed-OSS: Qwen3-Coder's form under another name."""

    marks, ends, strips = ("<seed:tool_call>",), ("</seed:tool_call>",), False


class MiniMax(XmlReader):
    """MiniMax M2."""

    marks, ends, strips = ("<minimax:tool_call>",), ("</minimax:tool_call>",), False
    function = ('<invoke name="', '">', "</invoke>")
    parameter = ('<parameter name="', '">', "</parameter>")


class DeepSeekXml(XmlReader):
    """DeepSeek V3.2 and V4, which say whether a value is text."""

    marks, strips = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"), False
    ends = ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>")
    function = ('<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>")
    parameter = ('<｜DSML｜parameter name="', '" string="true">', '" string="false">', '">', "</｜DSML｜parameter>")

    def read_value(self, text: str, mark: str, schema: Any) -> Any:
        return text if "true" in mark else typed(text, schema)


class GLM(XmlReader):
    """GLM 4.5 to 4.7: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""

    marks, ends, strips = ("<tool_call>",), (), False
    parameter = ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_key><arg_value>", "</arg_value>")

    def calls(self, mark: str) -> Reading[None]:
        yield from self.space()
        name = yield from self.word()
        yield from self.space()
        if not name or (yield from self.peek()) != "<":
            return
        self.call(name)
        if (yield from self.arguments(self.tools.get(name, {}), "</tool_call>")):
            yield from self.done()


def typed(text: str, schema: Any) -> Any:
    """A value that is written without quotes: of a type that the schema allows, or else text."""
    known = _types(schema)
    if known == {"string"}:
        return text
    try:
        value = read_json(text)
    except (ValueError, RecursionError):
        value = read_literal(text) if known else text
    if not known or any(_is_of(value, kind) for kind in known):
        return value
    return text if "string" in known or isinstance(value, str) else value


def _types(schema: Any) -> set[str]:
    """The types that a schema allows; none if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    found = schema.get("type", ())
    types = {found} if isinstance(found, str) else set(found)
    for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        types |= _types(part)
    if not types and "enum" in schema:
        types = {kind for kind in _TYPES for value in schema["enum"] if _is_of(value, kind)}
    return types


def _is_of(value: Any, kind: str) -> bool:
    is_flag = isinstance(value, bool) and kind in ("integer", "number")
    return not is_flag and isinstance(value, _TYPES.get(kind, ()))
