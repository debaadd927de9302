"""Calls whose arguments are JSON, which is passed on as it comes."""

import json
from typing import Any

from .python_calls import PythonReader
from .reader import MISSING, Reading

_NAMES, _ARGUMENTS = ("name", "function", "tool_name"), ("arguments", "parameters")


class JsonReader(PythonReader):
    """`{"name": ..., "arguments": {...}}`: one object behind a mark, or several, also as a list, or calls in Python.

    Where such an object has no mark, it is a call if it names a tool of the request.
    """

    def calls(self, mark: str) -> Reading[None]:
        yield from self.space()
        yield from self.several(is_known=not mark)
        yield from self.closes(*self.ends)

    def several(self, is_known: bool = False) -> Reading[None]:
        """Read one call or several."""
        is_list = yield from self.sees("[")
        yield from self.space()
        is_json = (yield from self.peek()) == "{"
        yield from (self.objects if is_json else self.python_calls)(is_known, is_list)

    def objects(self, is_known: bool, is_list: bool) -> Reading[None]:
        """Read one object or several."""
        while (yield from self.object(is_known)):
            yield from self.space()
            if is_list and (yield from self.sees("]")):
                self.forget()
                return
            for separator in (",", ";"):
                yield from self.sees(separator)
            yield from self.space()
            if (yield from self.peek()) != "{":
                return

    def object(self, is_known: bool = False) -> Reading[bool]:
        """Read an object; returns whether it is a call. is_known: only of a tool of the request."""
        name, arguments, is_made = "", None, False
        if not (yield from self.sees("{")):
            return False
        while True:
            yield from self.space()
            key = (yield from self.parsed()) if (yield from self.peek()) == '"' else MISSING
            yield from self.space()
            if not isinstance(key, str) or not (yield from self.sees(":")):
                return is_made
            yield from self.space()
            is_object = (yield from self.peek()) == "{"
            if key == "function" and is_object and not is_made:
                is_made = yield from self.object(is_known)
            elif key in _NAMES and not name:
                name = yield from self.parsed()
                if not isinstance(name, str) or not name or (is_known and name not in self.tools):
                    return False
            elif key in _ARGUMENTS and name and is_object and not is_made:
                self.call(name)
                is_made = True
                if not (yield from self.value(self.argue)):
                    return True
            elif key in _ARGUMENTS and arguments is None:
                arguments = yield from self.parsed()
                if arguments is MISSING:
                    return is_made
            elif (is_known and not is_made and key not in ("id", "type")) or not (yield from self.value(self.hold)):
                return is_made
            if name and arguments is not None and not is_made:
                self.call(name)
                self.argue(_as_text(arguments))
                is_made = True
            yield from self.space()
            if (yield from self.sees("}")):
                break
            if not (yield from self.sees(",")):
                return is_made
        if name and not is_made and not is_known:
            self.call(name)
            self.argue("{}")
            is_made = True
        if is_made:
            yield from self.done()
        return is_made

    def named(self, name: str, id: str = "") -> Reading[bool]:
        """Read the arguments of a call whose name has been read before them; returns whether they were there."""
        yield from self.space()
        if not name or (yield from self.peek()) != "{":
            return False
        self.call(name, id)
        if (yield from self.value(self.argue)):
            yield from self.done()
        return True


def _as_text(arguments: Any) -> str:
    """Arguments that were no object, or written before the name: text is JSON already."""
    if isinstance(arguments, str) and arguments.strip():
        return arguments
    return "{}" if arguments in (None, "") else json.dumps(arguments, ensure_ascii=False)


class Hermes(JsonReader):
    """Hermes and Qwen. Small models also write the object alone or in a code block, and Gemma 3 a call in Python."""

    marks, ends, bare = ("<tool_call>", "```"), ("</tool_call>",), "{["
    form = "<tool_call>", '\n{"name": "NAME", "arguments": ', "}\n</tool_call>"

    def calls(self, mark: str) -> Reading[None]:
        if mark != "```":
            yield from super().calls(mark)
            return
        language = yield from self.word()
        yield from self.space()
        if language in ("", "json", "tool_call", "tool_code"):
            yield from self.several(is_known=True)
            yield from self.closes("```")


class Llama(JsonReader):
    """Llama 3 and 4: alone or behind `<|python_tag|>`, several divided by `;`, or `<function=NAME>{...}`."""

    marks, bare = ("<|python_tag|>", "<|python_start|>", "<function="), "{["
    ends = ("<|python_end|>", "</function>")
    form = "<|python_tag|>", '{"name": "NAME", "parameters": ', "}"

    def calls(self, mark: str) -> Reading[None]:
        if mark != "<function=":
            yield from super().calls(mark)
            return
        name = yield from self.word()
        if (yield from self.sees(">")) and (yield from self.named(name)):
            yield from self.closes(*self.ends)


class Mistral(JsonReader):
    """`[TOOL_CALLS] [{...}]`, and in newer models `[TOOL_CALLS]NAME[ARGS]{...}`."""

    marks, others = ("[TOOL_CALLS]",), ("[ARGS]", "[CALL_ID]")
    form = "[TOOL_CALLS]", ' [{"name": "NAME", "arguments": ', "}]"

    def calls(self, mark: str) -> Reading[None]:
        yield from self.space()
        if (yield from self.peek()) in ("[", "{"):
            yield from self.several()
            return
        name, id = (yield from self.word()), ""
        if (yield from self.sees("[CALL_ID]")):
            id = yield from self.word()
        yield from self.sees("[ARGS]")
        yield from self.named(name, id)


class Granite(JsonReader):
    """Granite 3, Phi-4-mini: a list behind `<|tool_call|>`, or behind `<tool_call>` without an end."""

    marks, ends = ("<|tool_call|>", "<tool_call>", "functools"), ("<|/tool_call|>", "</tool_call>")
    form = "<|tool_call|>", '[{"name": "NAME", "arguments": ', "}]"


class Pythonic(JsonReader):
    """LFM2, OLMo 3, ToolACE: `[NAME(KEY=VALUE), ...]`."""

    marks, bare = ("<|tool_call_start|>", "<function_calls>"), "["
    ends = ("<|tool_call_end|>", "</function_calls>")


class Nemotron(JsonReader):
    """Nemotron."""

    marks, ends = ("<TOOLCALL>",), ("</TOOLCALL>",)
    form = "<TOOLCALL>", '[{"name": "NAME", "arguments": ', "}]</TOOLCALL>"


class Listed(JsonReader):
    """Jamba, Hunyuan, MiniMax M1: a list, or one object a line."""

    marks, ends = ("<tool_calls>",), ("</tool_calls>",)
    form = "<tool_calls>", '[{"name": "NAME", "arguments": ', "}]</tool_calls>"


class InternLM(JsonReader):
    """InternLM 2."""

    marks, ends = ("<|action_start|><|plugin|>",), ("<|action_end|>",)
    form = "<|action_start|><|plugin|>", '{"name": "NAME", "parameters": ', "}<|action_end|>"


class Command(JsonReader):
    """Command R7B and A."""

    marks, ends = ("<|START_ACTION|>",), ("<|END_ACTION|>",)
    form = (
        "<|START_ACTION|>",
        '[\n    {"tool_call_id": "0", "tool_name": "NAME", "parameters": ',
        "}\n]<|END_ACTION|>",
    )


class DeepSeek(JsonReader):
    """DeepSeek V3, R1 (NAME in a line, then JSON in a code block) and V3.1 (`NAME<｜tool▁sep｜>{...}`)."""

    marks = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    separator, ends = "<｜tool▁sep｜>", ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
    others = ("<｜tool▁sep｜>",)
    form = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    )

    def calls(self, mark: str) -> Reading[None]:
        if mark == self.marks[0]:
            yield from self.space()
            if not (yield from self.sees(self.marks[1])):
                return
        yield from self.space()
        told = yield from self.word()
        yield from self.space()
        if not (yield from self.sees(self.separator)):
            return
        name = (yield from self.word()) if told == "function" else ""
        if name:
            yield from self.space()
            yield from self.sees("```json")
        if (yield from self.named(name or self.name_of(told), self.id_of(told))):
            if name:
                yield from self.closes("```")
            for end in self.ends:
                yield from self.closes(end)

    def name_of(self, told: str) -> str:
        """The name of the tool, from what is told of the call."""
        return told

    def id_of(self, told: str) -> str:
        """The id of the call; "" for any."""
        return ""


class Kimi(DeepSeek):
    """Kimi K2: `functions.NAME:INDEX`, which is the id of the call."""

    marks = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    separator, ends = "<|tool_call_argument_begin|>", ("<|tool_call_end|>", "<|tool_calls_section_end|>")
    others = ("<|tool_call_argument_begin|>",)
    form = (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
    )

    def name_of(self, told: str) -> str:
        return told.partition(":")[0].removeprefix("functions.")

    def id_of(self, told: str) -> str:
        return told


class Forced(JsonReader):
    """An answer that is one call, see `forms.forced_form`."""

    bare = "{"
