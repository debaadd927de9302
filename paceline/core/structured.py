"""The required form of an answer: vLLM's `StructuredOutputsParams`."""

import json
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import BeforeValidator, Field

from ..errors import ConfigError
from ..schema import Many, Text, brief, checked

if TYPE_CHECKING:
    from collections.abc import Sequence as Listed  # type checkers let lists pass; what is read is a tuple
else:
    Listed = Many
FORMS = ("json", "regex", "choice", "grammar", "json_object")
_OF_JSON = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


@checked
class StructuredOutputsParams:
    """The form of an answer: exactly one of the first five fields. Names and defaults are vLLM's.

    Every answer that ends with "stop" has this form. It ends where the model ends it, or with the first token after
    which nothing may follow. What `max_tokens` or a stop string cuts is the beginning of such an answer.

    Raises `ConfigError` for no form or several, for text that is no JSON, and for options of JSON without it.
    """

    json: str | dict[str, Any] | None = None  # a JSON schema; kept as text
    regex: Text | None = None  # of the whole answer, in the syntax of Rust's regex, which has no look-around
    choice: Annotated[Listed[Text], Field(min_length=1)] | None = None  # one of these texts
    grammar: Text | None = None  # a context-free grammar in Lark's syntax or in GBNF
    json_object: bool | None = None  # True: any JSON object
    disable_any_whitespace: bool = False  # JSON without whitespace between its tokens
    disable_additional_properties: bool = False  # for objects whose schema says nothing about them
    whitespace_pattern: Text | None = None  # a regex of the whitespace between parts of JSON; None: at most one space

    def __post_init__(self) -> None:
        forms = [name for name in FORMS if getattr(self, name) not in (None, False)]
        if len(forms) != 1:
            got, expected = " and ".join(forms) or "none", "one of " + ", ".join(FORMS)
            raise ConfigError("StructuredOutputsParams needs exactly one form", got=got, expected=expected)
        unread = [name for name in _OF_JSON if getattr(self, name)]
        if unread and forms[0] not in ("json", "json_object"):
            raise ConfigError(f"StructuredOutputsParams.{unread[0]} is for JSON only", got=forms[0], fix="leave it out")
        if self.json is not None:
            object.__setattr__(self, "json", _as_text(self.json))

    @property
    def form(self) -> str:
        """The name of the field that is set."""
        return next(name for name in FORMS if getattr(self, name) not in (None, False))


def _as_text(schema: str | dict[str, Any]) -> str:
    try:
        read = json.loads(schema) if isinstance(schema, str) else schema
        text, got = json.dumps(read), None if isinstance(read, dict) else read
    except (ValueError, TypeError, RecursionError) as error:
        text, got = "", error
    if got is not None:
        message = "StructuredOutputsParams.json is no JSON schema"
        raise ConfigError(message, got=brief(str(got)), expected="a dict, or its text in JSON")
    return text


def _from_dict(value: object) -> object:
    return StructuredOutputsParams(**cast("dict[str, Any]", value)) if isinstance(value, dict) else value


StructuredOutputs = Annotated[StructuredOutputsParams, BeforeValidator(_from_dict)]
"""`StructuredOutputsParams`, which may be given as a dict."""
