"""The contract of drafters, checked in each round: a bad draft is an error that names the drafter."""

from collections.abc import Collection, Sequence
from inspect import Parameter, signature
from typing import Any

from torch import Tensor

from ..core.draft import Draft, Law
from ..core.interfaces import DraftBudget, Drafter, DraftPolicy
from ..core.nodes import Tree
from ..core.request import TokenSequence
from ..core.shortage import is_shortage
from ..core.tree import TokenTree
from ..errors import DraftError, PacelineError


def call(drafter: Drafter, method: str, seqs: Sequence[TokenSequence], *args: Any) -> Any:
    """Call a method of a drafter and convert its exceptions to a `DraftError` that names the drafter.

    Paceline's own errors, and those that `spared` knows, are passed on unchanged. Raises `DraftError` if a text got
    longer or shorter.
    """
    ends, result, failed = _ends(seqs), None, None
    try:
        result = getattr(drafter, method)(tuple(seqs), *args)
    except Exception as error:
        if not isinstance(error, PacelineError) and not is_shortage(error):
            message = f"{_name(drafter)} failed in {method}()"
            raise DraftError(message, got=f"{type(error).__name__}: {error}") from error
        failed = error
    if _ends(seqs) != ends:
        message = f"{_name(drafter)} changed the tokens of a sequence in {method}()"
        fix = "draft on a copy: [*seq.token_ids]"
        raise DraftError(message, expected="token_ids as they were", fix=fix) from failed
    if failed is not None:
        raise failed
    return result


def bind_policy(policy: DraftPolicy, *given: Any) -> None:
    """Call `bind` of a policy with as many of its arguments as it takes: users' own may not ask for experts."""
    takes = signature(policy.bind).parameters.values()
    is_open = any(one.kind is Parameter.VAR_POSITIONAL for one in takes)
    policy.bind(*(given if is_open else given[: len(takes)]))


def _ends(seqs: Sequence[TokenSequence]) -> list[tuple[int, list[int]]]:
    return [(len(seq.token_ids), seq.token_ids[-1:]) for seq in seqs]


def check_contract(
    draft: Draft,
    seqs: Sequence[TokenSequence],
    budgets: Sequence[DraftBudget],
    vocab_size: int,
    num_masks: int = 0,
    banned_token_ids: Collection[int] = (),
    drafter: Drafter | None = None,
) -> None:
    """Raise `DraftError` unless the draft has one tree per sequence, within vocabulary and budget, and a matching law.

    num_masks: how many mask tokens the target accepts; mask j is a probe with token `vocab_size + j`.
    banned_token_ids: placeholders of images.
    """
    _check_fields(draft, len(seqs), vocab_size, drafter)
    for row, (tree, seq, budget) in enumerate(zip(draft.tree.rows, seqs, budgets, strict=True)):
        ids, parents, probes = tree.token_ids, tree.parents, tree.is_probe
        if ids[0] != seq.token_ids[-1] or parents[0] != -1 or probes[0]:
            raise DraftError(f"{draft.source}: node 0 is not the last token", got=ids[0], expected=seq.token_ids[-1])
        nodes = sum(not probe or token >= vocab_size for token, probe in zip(ids, probes, strict=True)) - 1
        if nodes > budget.nodes:
            raise DraftError(f"{draft.source} drafted too many tokens", got=nodes, expected=f"<= {budget.nodes}")
        wrong = next((node for node in range(1, len(tree)) if not 0 <= parents[node] < node), None)
        if wrong is not None:
            got = f"node {wrong} under {parents[wrong]}"
            raise DraftError(f"{draft.source}: a parent must precede its child", got=got)
        last = tree.candidates[-1]
        for node in range(1, len(tree)):
            token, up = ids[node], parents[node]
            if vocab_size <= token < vocab_size + num_masks:
                _check_mask(draft.source, tree, node, vocab_size)
                if node < last:
                    got = f"node {last} after mask {node}"
                    raise DraftError(f"{draft.source}: a candidate follows mask tokens", got=got)
                continue
            if not 0 <= token < vocab_size:
                expected = f"0 to {vocab_size - 1}" + (f", or one of {num_masks} mask tokens" if num_masks else "")
                raise DraftError(f"{draft.source} drafted a token outside the vocabulary", got=token, expected=expected)
            if probes[node]:
                continue
            if token in banned_token_ids:
                message = f"{draft.source_of(row)} drafted a placeholder of an image"
                raise DraftError(message, got=token, expected="a text token")
            if probes[up]:
                raise DraftError(f"{draft.source}: candidate {node} has a probe as its parent")
            if tree.depths[node] > budget.depth:
                got = tree.depths[node]
                raise DraftError(f"{draft.source} drafted too deep", got=got, expected=f"<= {budget.depth}")


def _check_fields(draft: Draft, rows: int, vocab_size: int, drafter: Drafter | None) -> None:
    """Check types, dtypes and shapes of the draft's fields."""

    def wrong(field: str, got: object, expected: str) -> DraftError:
        got = f"{got.dtype} {list(got.shape)}" if isinstance(got, Tensor) else f"{type(got).__name__} {got!r:.60}"
        return DraftError(f"{_name(drafter)} returned a wrong {field}", got=got, expected=expected)

    if not isinstance(draft, Draft):
        raise wrong("draft", draft, "a Draft")
    if not isinstance(draft.source, str):
        raise wrong("source", draft.source, "text")
    if not isinstance(draft.tree, TokenTree):
        raise wrong("tree", draft.tree, "a TokenTree")
    if len(draft.tree.rows) != rows:
        raise wrong("tree", len(draft.tree.rows), f"{rows} rows")
    size = [rows, draft.tree.num_nodes]
    if not isinstance(draft.law, Law):
        raise wrong("law", draft.law, "a Law")
    if (draft.q is None) != (draft.law is Law.POINT_MASS):
        raise wrong("q", draft.q, f"{'no' if draft.law is Law.POINT_MASS else 'a'} q with {draft.law.name}")
    for field, got, full in (("q", draft.q, [*size, vocab_size]), ("confidence", draft.confidence, size)):
        if got is not None and not (isinstance(got, Tensor) and got.is_floating_point() and list(got.shape) == full):
            raise wrong(field, got, f"floating-point {full}")
    for field, got, kind in (("sources", draft.sources, str), ("hints", draft.hints, int)):
        fits = got is None or (isinstance(got, tuple) and len(got) == rows and all(isinstance(x, kind) for x in got))
        if not fits:
            raise wrong(field, got, f"a tuple of {rows} {kind.__name__}")


def _name(drafter: Drafter | None) -> str:
    return "a drafter" if drafter is None else f"the drafter {str(getattr(drafter, 'name', type(drafter).__name__))!r}"


def _check_mask(source: str, tree: Tree, node: int, vocab_size: int) -> None:
    """Check that mask 0 is a child of the root or of a candidate, and mask j a child of mask j - 1."""
    ids, up, mask = tree.token_ids, tree.parents[node], tree.token_ids[node] - vocab_size
    if not tree.is_probe[node]:
        raise DraftError(f"{source} drafted a mask token", got=f"candidate {node}", expected="a probe")
    if ids[up] != ids[node] - 1 if mask else tree.is_probe[up]:
        expected = f"below mask {mask - 1}" if mask else "below the root or a candidate"
        raise DraftError(f"{source} misplaced mask {mask}", got=f"node {node} under {up}", expected=expected)
