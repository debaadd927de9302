"""The server that clients are tried with, and what they are asked."""

import json
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

RIVERS = "Name three rivers of Europe."
MOST = 24


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Rome"]
    is_warm: bool


TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": Weather.__doc__, "parameters": Weather.model_json_schema()},
}


class Skipped(Exception):
    """A check that does not apply here."""


@dataclass
class Target:
    """The server, and what was found. node_dir: where npm installed packages."""

    base_url: str
    api_key: str
    sees: bool = False
    node_dir: Path = field(default_factory=Path)
    model: str = ""
    rows: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])

    def find_model(self) -> None:
        """The name of the served model."""
        asked = urllib.request.Request(f"{self.base_url}/models", headers={"Authorization": f"Bearer {self.api_key}"})
        with urllib.request.urlopen(asked) as answer:
            self.model = json.load(answer)["data"][0]["id"]

    @property
    def root(self) -> str:
        """The server, for other APIs."""
        return self.base_url.removesuffix("/v1")

    @contextmanager
    def check(self, client: str, what: str) -> Iterator[None]:
        """A row of the table: what raises in the block has failed."""
        try:
            yield
            told = "passed"
        except Skipped as why:
            told = f"skipped: {why}"
        except Exception as error:
            told = " ".join(f"FAILED: {type(error).__name__}: {error}".split())[:300]
        self.rows.append((client, what, told))
        print(f"{client:12} {what:22} {told}", flush=True)


def assert_raises(kind: type[Exception], function: Callable[[], object]) -> None:
    """That it raises this."""
    try:
        function()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")
