"""FunctionGemma and Gemma 4: `call:NAME{KEY:VALUE,...}`, with keys without quotes and texts between marks."""

import json
import re
from typing import Any

from .reader import MISSING, Reader, Reading, read_json

_PLAIN = re.compile(r"[,:\[\]{}]")


class Gemma4(Reader):
    """Gemma 4. quote: what is before and behind a text."""

    marks, ends = ("<|tool_call>",), ("<tool_call|>",)
    quote = '<|"|>'
    others: tuple[str, ...] = ('<|"|>',)

    def calls(self, mark: str) -> Reading[None]:
        yield from self.space()
        if not (yield from self.sees("call:")):
            return
        name = yield from self.word()
        if not name or (yield from self.peek()) != "{":
            return
        value = yield from self._value(0)
        if value is MISSING:
            return
        self.call(name)
        self.argue(json.dumps(value, ensure_ascii=False))
        yield from self.done()
        yield from self.closes(*self.ends)

    def _value(self, depth: int) -> Reading[Any]:
        """Read a value; `MISSING` if it is none."""
        if (yield from self.sees(self.quote)):
            text, mark = yield from self.text_until(self.quote)
            return text if mark else MISSING
        is_list = yield from self.sees("[")
        if not is_list and not (yield from self.sees("{")):
            text = yield from self._plain()
            return _scalar(text) if text and text.strip() else MISSING
        end, items, named = "]" if is_list else "}", list[Any](), dict[str, Any]()
        while depth < 64 and not (yield from self.sees(end)):
            key: str | None = ""
            if not is_list:
                is_quoted = yield from self.sees(self.quote)
                key = (yield from self.text_until(self.quote))[0] if is_quoted else (yield from self._plain())
                if key is None or not (yield from self.sees(":")):
                    return MISSING
                yield from self.space()
            value = yield from self._value(depth + 1)
            if value is MISSING:
                return MISSING
            if is_list:
                items.append(value)
            else:
                named[str(key)] = value
            yield from self.space()
            if not (yield from self.sees(",")) and (yield from self.peek()) != end:
                return MISSING
            yield from self.space()
        return MISSING if depth >= 64 else items if is_list else named

    def _plain(self) -> Reading[str | None]:
        """Read what is not between quotes; None at the end."""
        parts = list[str]()
        found = yield from self.before(_PLAIN, parts.append)
        self._held += parts
        return "".join(parts) if found else None


class FunctionGemma(Gemma4):
    """FunctionGemma."""

    marks, ends = ("<start_function_call>",), ("<end_function_call>",)
    quote, others = "<escape>", ("<escape>",)


def _scalar(text: str) -> Any:
    """A number or a word of JSON, or else text. The template writes None for null."""
    try:
        return read_json("null" if text.strip() == "None" else text)
    except (ValueError, RecursionError):
        return text.strip()
