"""A result folder as one page of HTML that opens without a network, and the text of each token for it."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..errors import ConfigError
from .opened import Opened, OpenedAnswer, OpenedRound
from .page_parts import article, figures, links, made_by

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HOLE = re.compile(r"\{\{(\w+)\}\}")


def pieces(
    tokenizer: "PreTrainedTokenizerBase", token_ids: Sequence[int], skip_special_tokens: bool = True
) -> list[str]:
    """The text that each token adds; joined, the text of the answer.

    A character that spans tokens goes to the token that completes it and leaves the ones before it empty, as special
    tokens are unless asked for. At the end an incomplete one becomes a replacement character of the last token.
    """
    from ..sampling import Detokenizer

    text, found = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens), list[str]()
    for token in token_ids:
        text.feed(token)
        found.append(text.take())
    if found:
        found[-1] += text.finish()
    return found


def round_pieces(tokenizer: "PreTrainedTokenizerBase", token_ids: Sequence[int], parents: Sequence[int]) -> list[str]:
    """The text of each node of a round's tree, read after its parent's; special tokens by name, the root included."""
    found = list[str]()
    for node, parent in enumerate(parents):
        alone = _decode(tokenizer, [token_ids[node]])
        if parent >= 0:
            # A decoder may treat the first token of a text apart, and drop its leading space.
            before = _decode(tokenizer, [token_ids[parent]])
            both = _decode(tokenizer, [token_ids[parent], token_ids[node]])
            alone = both[len(before) :] if both.startswith(before) and len(both) > len(before) else alone
        found.append(alone)
    return found


def load_tokenizer(source: str | Path) -> "PreTrainedTokenizerBase":
    """The tokenizer in a folder; never fetched. Raises `ConfigError` where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises kinds of many modules
        raise ConfigError(
            "there is no tokenizer here", got=f"{source}: {str(error).splitlines()[0]}", expected="a model's folder"
        ) from None


def tokenizer_for(results: Opened, answers: Sequence[OpenedAnswer], given: str | None = None):
    """The tokenizer asked for; else the model's own, where texts are missing and the model lies here; or None."""
    if given is not None:
        return load_tokenizer(given)
    model = str(results.summary.get("model_path") or results.summary.get("model") or "")
    if all(has_texts(one) for one in answers) or not (Path(model) / "config.json").is_file():
        return None
    try:
        return load_tokenizer(model)
    except ConfigError:
        return None


def has_texts(answer: OpenedAnswer) -> bool:
    """Whether the text of every token, of the answer and of its drafts, was written down."""
    whole = len(answer.pieces) == len(answer.token_ids)
    return whole and all(len(one.pieces) == len(one.token_ids) for one in answer.rounds)


def with_texts(answer: OpenedAnswer, tokenizer: "PreTrainedTokenizerBase | None") -> OpenedAnswer:
    """The answer with the text of every token: the tokenizer's, else what was written down, else the ids."""
    told = tuple(pieces(tokenizer, answer.token_ids, False)) if tokenizer is not None else answer.pieces
    if len(told) != len(answer.token_ids):
        told = tuple(f"[{token}]" for token in answer.token_ids)
    return replace(answer, pieces=told, rounds=tuple(_round_texts(one, tokenizer) for one in answer.rounds))


def chosen(answers: Sequence[OpenedAnswer]) -> list[OpenedAnswer]:
    """The answers worth a page: those with rounds, of the first repeat; the plain ones only where all are plain."""
    ours = [one for one in answers if one.rounds and one.token_ids and one.repeat == 0]
    return [one for one in ours if not one.is_plain] or ours


def page(results: Opened, tokenizer: "PreTrainedTokenizerBase | None" = None) -> str:
    """The whole page as text. Raises `ConfigError` where the results hold no answer with rounds."""
    answers = results.answers()
    shown = [with_texts(one, tokenizer) for one in chosen(answers)]
    if not shown:
        raise ConfigError("these results hold no answer of ours with its rounds", got=str(results.path))
    plain = {(one.id, one.turn): one for one in reversed(answers) if one.is_plain and one.repeat == 0}
    style, script = _part("page.css"), _part("page.js")
    names = " and ".join(dict.fromkeys(one.side for one in shown))
    return _fill(
        _part("page.html"),
        {
            "title": html.escape(f"{results.model} with {names}"),
            "model": html.escape(results.model),
            "drafters": html.escape(names),
            "figures": figures(results),
            "made_by": made_by(results),
            "categories": _options(dict.fromkeys(one.category for one in shown)),
            "sides": _options(dict.fromkeys(one.side for one in shown)),
            "links": links(shown),
            "answers": "\n".join(article(n, one, plain.get((one.id, one.turn))) for n, one in enumerate(shown)),
            "data": as_script([_data(one) for one in shown]),
            "style": style,
            "script": script,
            "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        },
    )


def is_page(head: str) -> bool:
    """For `files.check_out`: whether `paceline show` wrote a page."""
    return '<meta name="generator" content="paceline show">' in head


def as_script(value: object) -> str:
    """JSON that can stand inside a script element, whatever the texts in it: no `<` is left."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")


# Helpers


def _decode(tokenizer: "PreTrainedTokenizerBase", token_ids: list[int]) -> str:
    return cast("str", tokenizer.decode(token_ids, skip_special_tokens=False))


def _round_texts(one: OpenedRound, tokenizer: "PreTrainedTokenizerBase | None") -> OpenedRound:
    if tokenizer is not None and len(one.token_ids) == len(one.parents):
        return replace(one, pieces=tuple(round_pieces(tokenizer, one.token_ids, one.parents)))
    if len(one.pieces) != len(one.token_ids):
        return replace(one, pieces=tuple(f"[{token}]" for token in one.token_ids))
    return one


def _data(answer: OpenedAnswer) -> dict[str, object]:
    """What the page's script needs of an answer beyond what stands in its text."""
    return {
        "ids": answer.token_ids,
        "origins": "".join(origin[0] for origin in answer.origins),
        "rounds": [
            {
                "source": one.source,
                "emitted": one.num_emitted,
                "texts": one.pieces,
                "ids": one.token_ids,
                "parents": one.parents,
                "path": one.path,
                "confidences": [round(x, 4) for x in one.confidences],
                "ms": [round(1e3 * x, 3) for x in one.seconds],
            }
            for one in answer.rounds
        ],
    }


def _options(names: "dict[str, None]") -> str:
    return "".join(f"<option>{html.escape(name)}</option>" for name in names if name)


def _part(name: str) -> str:
    return (resources.files("paceline.bench") / name).read_text(encoding="utf-8")


def _fill(template: str, parts: dict[str, str]) -> str:
    """Fill the holes in one pass, so that what looks like a hole in an answer stays text."""
    return _HOLE.sub(lambda hole: parts[hole[1]], template)
