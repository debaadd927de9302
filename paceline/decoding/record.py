"""What a round leaves behind for policies, reports and pictures."""

from ..core.draft import Draft
from ..core.outputs import Round


def records_of(
    draft: Draft,
    paths: list[list[int]],
    emitted: list[int],
    with_prompt: list[bool],
    seconds: tuple[float, float, float],
) -> list[Round]:
    """One record for each row of the batch, probes and padding left out.

    paths: accepted nodes. emitted: tokens appended. with_prompt: see `Round`. seconds: draft, verify and rest of the
    whole batch's turn.
    """
    token_ids, parents, probes = draft.tree.lists
    confidence = None if draft.confidence is None else draft.confidence.tolist()
    records = []
    for row, path in enumerate(paths):
        nodes = [node for node, is_probe in enumerate(probes[row]) if not is_probe]
        place = {node: index for index, node in enumerate(nodes)} | {-1: -1}
        depth: list[int] = []
        for node in nodes:
            depth.append(depth[place[parents[row][node]]] + 1 if depth else 0)
        given = () if confidence is None else tuple(confidence[row][node] for node in nodes[1:])
        records.append(
            Round(
                draft.source_of(row),
                num_drafted=max(depth),
                num_accepted=len(path),
                num_emitted=emitted[row],
                token_ids=tuple(token_ids[row][node] for node in nodes),
                parents=tuple(place[parents[row][node]] for node in nodes),
                path=tuple(place[node] for node in path),
                confidences=() if any(c != c for c in given) else given,
                hint=0 if draft.hints is None else draft.hints[row],
                batch=len(paths),
                num_rows=draft.tree.num_nodes,
                with_prompt=with_prompt[row],
                draft_s=seconds[0],
                verify_s=seconds[1],
                rest_s=seconds[2],
            )
        )
    return records
