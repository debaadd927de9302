"""gpt-oss' Harmony: an answer is several messages, on channels.

<|channel|>analysis<|message|>THOUGHTS<|end|>
<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>
<|start|>assistant<|channel|>final<|message|>TEXT<|return|>
"""

import re

from .reader import Put, Reader, Reading

_CHANNEL, _TO = re.compile(r"<\|channel\|>(\w+)"), re.compile(r"to=functions\.([\w.:/-]+)")
_START, _CHANNELS, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"


class Harmony(Reader):
    """gpt-oss. Calls of its built-in tools (python, browser) are text."""

    others = (_START, _CHANNELS, _CONSTRAIN, _MESSAGE, "<|end|>", "<|call|>", "<|return|>")
    form = "to=functions.", "NAME <|constrain|>json<|message|>", ""

    def read(self) -> Reading[None]:
        header, is_call, is_header = list[str](), False, False
        put: Put = self.say
        if (yield from self.sees(" to=")):  # the prompt has begun the header
            header, is_header, put = self._held, True, self.hold
        while mark := (yield from self.until((*self.others, *self.hidden), put)):
            if mark in (_START, _CHANNELS, _CONSTRAIN) and not is_call:
                header = header if is_header else []
                header.append(mark)
                is_header, put = True, header.append
            elif mark == _MESSAGE and is_header:
                is_header, told = False, "".join(header)
                channel, tool = _CHANNEL.search(told), _TO.search(told)
                is_call = tool is not None
                self.is_thinking = not is_call and channel is not None and channel[1] == "analysis"
                put = self.argue if is_call else self.wonder if self.is_thinking else self.say
                if tool is not None:
                    self.call(tool[1])
            elif mark in ("<|end|>", "<|call|>", "<|return|>", _START):
                if is_call:
                    yield from self.done()
                is_call = self.is_thinking = False
                header, is_header = [], mark == _START
                put = header.append if is_header else self.say
                self.turn()
