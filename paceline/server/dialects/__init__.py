"""Other APIs than OpenAI's, each a translation to a chat or a completion and of the answer back."""

from typing import Any


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Structured outputs of a schema as llama.cpp and Ollama read it: it lists all properties that there may be."""
    return {"json": schema, "disable_additional_properties": True}
