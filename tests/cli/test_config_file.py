"""--config: a file has the names of options, and the command line wins."""

import pytest

from paceline.server import run
from tests.cli.helpers import paceline, refusal

WRONG = {
    "an unknown name": ("portx: 3", "portx"),
    "no YAML": ("a: [", "not YAML"),
    "no options": ("- 3", "no options"),
    "two values": ("port: [3, 4]", "more than once"),
}


@pytest.fixture
def bound(monkeypatch):
    """Where the server would have listened."""
    seen = []

    def bind(*address):
        seen.append(address)
        raise OSError("enough")

    monkeypatch.setattr(run, "bind", bind)
    return seen


@pytest.mark.parametrize(
    ("text", "arguments", "address"),
    [("model: none\nport: 8123\nhost: 127.0.0.9\n", (), ("127.0.0.9", 8123)),
     ("model: none\nport: 8123\n", ("--port", "99"), ("127.0.0.1", 99)),
     ("port: 7\napi-key: [a, b]\nallow_origin: http://a.example\nreturn-metrics: true\nthreads:\n", ("none",),
      ("127.0.0.1", 7)),
     ("speculative-config: {method: ngram, num_speculative_tokens: 3}\n", ("none",), ("127.0.0.1", 8000)),
     ("", ("none",), ("127.0.0.1", 8000))],
)  # fmt: skip
def test_values_of_a_file(text, arguments, address, bound, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    result = paceline("serve", "--config", str(file), *arguments)
    assert "enough" in result.stderr
    assert bound == [address]


@pytest.mark.parametrize(("text", "told"), WRONG.values(), ids=WRONG)
def test_a_wrong_file(text, told, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    assert told in refusal("serve", "none", "--config", str(file))


@pytest.mark.parametrize(
    ("text", "told"), [("model: a\nport: abc", "--port"), ("port: 3", "MODEL"), ("model: a\nport: 99999", "--port")]
)
def test_a_wrong_value_is_a_usage_error(text, told, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    assert told in refusal("serve", "--config", str(file), code=2)


def test_an_empty_key_of_a_file(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("model: none\napi_key: ''\n")
    assert "empty" in refusal("serve", "--config", str(file))
