"""Reads an answer as it comes: what is text, what are thoughts, and what are calls of tools.

A reader is a generator that pauses where it needs more text. It decides by what it has read and never goes back, so the
same is found wherever the text is cut, in a time linear in its length.

    text        Sure. <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>
    say         Sure.
    hold             -<tool_call>{"name": "f", "arguments": -                       text again if this is no call
    call                                   f
    argue                                                   {"x": 1}
    forget                                                          }</tool_call>
"""

import json
import math
import re
import secrets
import sys
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias, TypeVar

_T = TypeVar("_T")
Reading: TypeAlias = Generator[None, None, _T]
Tools: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's parameters, by name."""
Put: TypeAlias = Callable[[str], object]
NAME = re.compile(r"[^\w.:/-]")  # what ends the name of a tool
MISSING = object()
_SCALAR, _SPACE, _JSON, _PYTHON = map(re.compile, (r"[\s,;:\]}]", r"\S", r'["{}\[\]]', r"""["'{}\[\]()]"""))
_QUOTED = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}


@dataclass
class Piece:
    """What a part of an answer adds.

    reasoning: thoughts, which are no part of the text.
    calls: parts of tool calls as the API streams them: `index`, in the first part of a call `id`, `type` and
        `function.name`, and pieces of `function.arguments`.
    """

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


class Reader:
    """Reads one answer. Subclasses say how a family of models writes calls.

    marks: texts behind which calls are. ends: texts behind a call. others: further texts of the format.
    bare: characters that may begin a call without a mark, where nothing has been said before it.
    form: how a call of NAME is written: its mark, what is before the JSON of the arguments, and what is behind it. None
        where arguments are no JSON, so that no schema can force them.
    thoughts: the texts before and after thoughts, which only come at the beginning. hidden: texts that are left out.
    most: calls after these are not read; `is_over` says that nothing more is. opens: those of `marks` that count.

    White space beside calls and thoughts is no text, and beside calls neither is one that was cut.
    """

    marks: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    bare = ""
    form: tuple[str, str, str] | None = None

    def __init__(
        self,
        tools: Tools,
        thoughts: tuple[str, str] | None = None,
        hidden: tuple[str, ...] = (),
        most: int = sys.maxsize,
    ):
        self.tools, self.thoughts, self.hidden, self.most = tools, thoughts, hidden, most
        self.opens = self.marks
        self.num_calls, self.is_over, self.is_thinking = 0, False, False
        self._text, self._at, self._is_whole = "", 0, False
        self._num_past = 0  # characters before these
        self._piece = Piece()
        self._held, self._spaces = list[str](), list[str]()
        self._num_before = 0  # calls before what is held
        self._is_fresh, self._is_behind = True, False  # nothing was said yet; a call or thoughts have just ended
        self._reading = self.read()

    def begin(self, prompt: str) -> None:
        """Tell what the prompt ends with, before the first `feed`: it may have opened the thoughts."""
        self.is_thinking = self.thoughts is not None and prompt.rstrip().endswith(self.thoughts[0])

    def feed(self, text: str, is_end: bool = False) -> Piece:
        """Read more of the answer. is_end: nothing comes after it."""
        self._go(text)
        if is_end:
            self._is_whole = True
            self._go("")
            self._piece.text += "" if self.is_thinking else "".join(self._spaces)
        piece, self._piece = self._piece, Piece()
        return piece

    def _go(self, text: str) -> None:
        if not self.is_over:
            self._num_past += self._at
            self._text, self._at = self._text[self._at :] + text, 0
            next(self._reading, None)

    @property
    def num_read(self) -> int:
        """How many characters have been read."""
        return self._num_past + self._at

    def read(self) -> Reading[None]:
        """Read the whole answer."""
        yield from self._think()
        while True:
            if self.bare and self._is_fresh:
                yield from self.space(self.say)
                if (yield from self.peek()) in (*self.bare,):
                    yield from self._attempt("")
            mark = yield from self.until((*self.opens, *self.hidden), self.say)
            if not mark:
                return
            if mark in self.opens:
                yield from self._attempt(mark)

    def calls(self, mark: str) -> Reading[None]:
        """Read calls behind a mark. What is held at the end becomes text."""
        raise NotImplementedError

    def _attempt(self, mark: str) -> Reading[None]:
        self._held, self._num_before = [mark], self.num_calls
        yield from self.calls(mark)
        held = "".join(self._held)
        self.forget()
        if held and self._is_cut and self.num_calls:
            self._spaces = []
        else:
            for text in self.hidden:
                held = held.replace(text, "")
            self.say(held)

    def _think(self) -> Reading[None]:
        if self.thoughts is None:
            return
        if not self.is_thinking:
            yield from self.space(self.say)
            self.is_thinking = yield from self.sees(self.thoughts[0])
            if not self.is_thinking:
                return
        self.forget()
        self.turn()
        while (yield from self.until((self.thoughts[1], *self.hidden), self.wonder)) not in ("", self.thoughts[1]):
            pass
        self.is_thinking = False
        self.turn()

    # what has been found

    def say(self, text: str) -> None:
        """Add text."""
        self._piece.text += self._trimmed(text)

    def wonder(self, text: str) -> None:
        """Add thoughts."""
        self._piece.reasoning += self._trimmed(text)

    def _trimmed(self, text: str) -> str:
        """Without white space at its end, which is held, and at its beginning behind a call."""
        text = text.lstrip() if self._is_behind else text
        sure = text.rstrip()
        if not sure:
            self._spaces += [text] * bool(text)
            return ""
        spaces, self._spaces = "".join(self._spaces), [text[len(sure) :]]
        self._is_fresh = self._is_behind = False
        return spaces + sure

    def hold(self, text: str) -> None:
        """Keep what may belong to a call."""
        self._held.append(text)

    def forget(self) -> None:
        """What is held belongs to a call."""
        self._held = []

    def call(self, name: str, id: str = "") -> None:
        """Begin a call."""
        self.forget()
        self._spaces = []
        function = {"name": name, "arguments": ""}
        made = {"id": id or f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
        self._piece.calls.append({"index": self.num_calls, **made})
        self.num_calls += 1

    def argue(self, text: str) -> None:
        """Add to the arguments of the call."""
        index, made = self.num_calls - 1, self._piece.calls
        if not made or made[-1]["index"] != index:
            made.append({"index": index, "function": {"arguments": ""}})
        made[-1]["function"]["arguments"] += text

    def turn(self) -> None:
        """Something else begins; the white space between is neither's."""
        self._spaces, self._is_fresh, self._is_behind = [], True, True

    def done(self) -> Reading[None]:
        """End the call."""
        self.forget()
        self.turn()
        self.is_over = self.num_calls >= self.most
        while self.is_over:
            yield

    # what is read next

    @property
    def _is_cut(self) -> bool:
        return self._is_whole and self._at == len(self._text)

    def peek(self) -> Reading[str]:
        """The next character; "" at the end."""
        while self._at == len(self._text) and not self._is_whole:
            yield
        return self._text[self._at : self._at + 1]

    def take(self, count: int, put: Put) -> None:
        """Pass on characters that are known to be there."""
        put(self._text[self._at : self._at + count])
        self._at += count

    def before(self, pattern: re.Pattern[str], put: Put) -> Reading[str]:
        """Pass text on up to a character of a pattern, which is left; returns it, or "" at the end."""
        while True:
            found = pattern.search(self._text, self._at)
            self.take((len(self._text) if found is None else found.start()) - self._at, put)
            if found is not None or self._is_whole:
                return found[0] if found else ""
            yield

    def until(self, marks: tuple[str, ...], put: Put) -> Reading[str]:
        """Pass text on up to one of the marks, which is read too; returns it, or "" at the end."""
        while True:
            found = _any_of(marks).search(self._text, self._at) if marks else None
            if found is not None:
                self.take(found.start() - self._at, put)
                self._at = found.end()
                return found[0]
            rest = self._text[self._at :]
            kept = max((_overlap(rest, mark) for mark in marks), default=0)
            if self._is_whole and kept and self.num_calls and put == self.say:  # a mark that was cut
                self.take(len(rest) - kept, put)
                self._at, self._spaces = len(self._text), []
                return ""
            self.take(len(rest) - (0 if self._is_whole else kept), put)
            if self._is_whole:
                return ""
            yield

    def sees(self, text: str, put: Put | None = None) -> Reading[bool]:
        """Whether this comes next; then it is read, and held unless `put` says otherwise."""
        while True:
            rest = self._text[self._at : self._at + len(text)]
            if rest == text or self._is_whole or not text.startswith(rest):
                break
            yield
        if rest == text:
            self.take(len(text), put or self.hold)
        return rest == text

    def closes(self, *ends: str) -> Reading[bool]:
        """Read one of the ends behind a call, or its beginning where the answer was cut, and white space before it."""
        if self.num_calls == self._num_before:
            return False
        yield from self.space()
        for end in ends:
            if (yield from self.sees(end)):
                self.forget()
                return True
        rest = self._text[self._at :]
        if rest and self._is_whole and any(end.startswith(rest) for end in ends):
            self.take(len(rest), self.hold)
            self.forget()
        return False

    def space(self, put: Put | None = None) -> Reading[None]:
        """Read white space."""
        yield from self.before(_SPACE, put or self.hold)

    def word(self) -> Reading[str]:
        """Read what may be the name of a tool."""
        parts = list[str]()
        yield from self.before(NAME, parts.append)
        self._held += parts
        return "".join(parts)

    def text_until(self, *marks: str) -> Reading[tuple[str, str]]:
        """Read text and the mark behind it; that is "" at the end."""
        parts = list[str]()
        mark = yield from self.until(marks, parts.append)
        self._held += [*parts, mark]
        return "".join(parts), mark

    def value(self, put: Put, is_python: bool = False) -> Reading[bool]:
        """Pass on a value of JSON, or of Python; returns whether it is whole. Brackets are only counted."""
        quotes, outside, begins = ("\"'", _PYTHON, "([{\"'") if is_python else ('"', _JSON, '[{"')
        first = yield from self.peek()
        if not first or first not in begins:
            yield from self.before(_SCALAR, put)
            return not self._is_cut
        depth = 0
        while char := (yield from self.before(outside, put)):
            self.take(1, put)
            if char in quotes:
                if not (yield from self._quoted(char, put)):
                    return False
            else:
                depth += 1 if char in "([{" else -1
            if depth <= 0:
                return True
        return False

    def _quoted(self, quote: str, put: Put) -> Reading[bool]:
        """Pass on the rest of a quoted text."""
        while char := (yield from self.before(_QUOTED[quote], put)):
            self.take(1, put)
            if char == quote:
                return True
            if (yield from self.peek()):
                self.take(1, put)
        return False

    def parsed(self) -> Reading[Any]:
        """Read a value of JSON; `MISSING` if it is none."""
        parts = list[str]()
        is_whole = yield from self.value(parts.append)
        self._held += parts
        if not is_whole:
            return MISSING
        try:
            return read_json("".join(parts), strict=False)
        except (ValueError, RecursionError):
            return MISSING


def read_json(text: str, strict: bool = True) -> Any:
    """A value of JSON. Raises ValueError, also for NaN and infinities, which JSON does not have."""
    return json.loads(text, strict=strict, parse_constant=_refused, parse_float=_finite)


def _refused(word: str) -> Any:
    raise ValueError(word)


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(text)
    return value


@cache
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True)))


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end may be the beginning of the mark."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-size:])), 0)
