"""A local model as a side: what it cannot answer is a finding."""

from types import SimpleNamespace

import pytest

from paceline.audit.answers import Ask
from paceline.audit.client import NoAnswer
from paceline.audit.local import Local
from paceline.audit.run import Job
from paceline.errors import CacheFull, ConfigError
from paceline.system.files import silent


class Narrow:
    """A model that refuses long prompts."""

    numerics = "fast"

    def __init__(self, kind: type[Exception]):
        self.kind = kind

    def plain(self) -> "Narrow":
        return self

    def generate(self, prompts, params):
        if any("long" in prompt for prompt in prompts):
            raise self.kind("the prompt is too long")
        output = SimpleNamespace(text="yes", token_ids=[1], logprobs=[], finish_reason="stop")
        return [SimpleNamespace(outputs=[output], prompt_token_ids=[1, 2]) for _ in prompts]


@pytest.mark.parametrize("kind", [ConfigError, CacheFull])
def test_a_prompt_that_does_not_fit(kind):
    side = Local(Narrow(kind), "tiny")  # pyright: ignore[reportArgumentType]
    assert side.answer("short", Ask()).text == "yes"
    with pytest.raises(NoAnswer, match="too long"):
        side.answer("a long one", Ask())
    runs = side.draw([Job(at, text, Ask()) for at, text in enumerate(["short", "a long one", "short"])], silent)
    assert [run.answer is not None for run in runs] == [True, False, True]
    assert "too long" in runs[1].error
