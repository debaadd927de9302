"""A pass on a GPU: the structures of `abi.h` over tensors, computed by the kernels of this folder.

What differs between two passes over trees of the same shape is in tensors (`Inputs`), so that one can be replayed as a
graph of the other (`graphs`): nothing here reads a number of the device, or a list of the host.
"""

from typing import Any

import torch
from torch import Tensor

from ..library import FORMATS
from . import corrections
from .attention import attend
from .corrections import Corrected
from .products import finish, multiply
from .recurrent import walk
from .rows import embed, keep, plan, rotate, settle
from .structures import Inputs, Layer, Matrix, Model, Norm, Pass

_DTYPES = {form: dtype for dtype, form in FORMATS.items()}


def compute(model: Model, step: Pass, inputs: Inputs) -> None:
    """Run a pass, of whose fields the lists of numbers are not read."""
    rows, hidden, dtype = step.batch * step.nodes, model.hidden, _DTYPES[model.cache_format]
    device = step.keys[0].device
    places, paths = plan(inputs, step.nodes, step.old, step.max_position)
    stream = torch.empty(rows, hidden, device=device)
    keeps_last = bool(step.states) and step.states[model.num_layers] is not None
    wants_end = step.logits is not None or step.last_hidden is not None or keeps_last
    if step.rows is not None:
        stream.copy_(step.rows.reshape(rows, hidden))
    elif step.inputs is not None:
        _project(model, step, inputs, stream, dtype)
    else:
        embed(model.embeddings, inputs.ids, stream, model.embedding_scale)
    corrected = corrections.of(step)
    own = None if model.ple_project.data is None else _per_layer(model, inputs, stream, dtype)
    normed = torch.empty(rows, hidden, dtype=dtype, device=device)
    last = torch.empty_like(stream) if keeps_last else None
    product: dict[str, Any] = {}  # what is to be added to the stream, by the kernel that norms it next
    end = model.num_layers if wants_end else _end(model, step)
    for index, layer in enumerate(model.layers[:end]):
        ends = step.kv_only or (index == end - 1 and not wants_end)
        if layer.hidden_norm.kind:
            x = _beside_embeddings(model, layer, inputs, stream, dtype)
        else:
            x = settle(stream, **product, following=layer.input, out=normed)
        product = {}
        _keep(step, places, index, stream)
        if layer.recurrent:
            r = layer.recurrent
            sums = corrections.multiply(x, r.inputs[: r.num_inputs], corrected)
            held = step.recurrent_states[index], step.recurrent_rows[index]
            mixed = walk(r, sums, *held, inputs, places, paths, dtype, ends)
            if mixed is not None:
                norm = Norm() if layer.q.data is not None else layer.after_attention
                product = _product(r.out, mixed, corrected, norm, r.times)
        if layer.q.data is not None:
            matrices = [matrix for matrix in (layer.q, layer.k, layer.v) if matrix.data is not None]
            sums = corrections.multiply(x, matrices, corrected)
            keys, values = step.keys[index - layer.shared_kv], step.values[index - layer.shared_kv]
            q, gates = rotate(layer, sums, places, keys, values, *_tables(step, layer), step.max_position < 0, dtype)
            if not ends:
                blocks = (inputs.ends, inputs.firsts) if layer.window or not step.windowed_blocks else (None, None)
                x = attend(layer, q, gates, keys, values, inputs, places, paths, *blocks)
                if product:  # of a mixer beside it
                    settle(stream, **product)
                product = _product(layer.o, x, corrected, layer.after_attention, layer.attention_times)
        if ends:
            continue
        scalar = layer.scalar or 1.0
        if layer.up.data is not None:
            x = settle(stream, **product, following=layer.before_mlp, out=normed)
            gate = None if layer.gate.data is None else layer.gate
            x = corrections.finish(x, layer.up, gate, layer.activation, corrected, layer.gate_times)
            times = 1.0 if own is not None else scalar
            product = _product(layer.down, x, corrected, layer.after_mlp, layer.mlp_times, times)
        if own is not None:
            x = settle(stream, **product, out=normed)
            gates = torch.empty(rows, model.ple_size, device=device)
            corrections.finish(x, layer.ple_gate, None, layer.activation, corrected, out=gates)
            x = (gates * own[:, index]).to(dtype)
            product = _product(layer.ple_out, x, corrected, layer.after_ple, 1.0, scalar)
        if step.deepstack and step.deepstack[index] is not None:
            product["more"] = step.deepstack[index]
    if not wants_end:
        return
    settle(stream, **product, following=model.final_norm, out=normed, last=last)
    if step.last_hidden is not None:
        step.last_hidden.view(rows, hidden).copy_(stream)
    if last is not None:
        _keep(step, places, model.num_layers, last)
    if step.logits is None:
        return
    some = normed.view(step.batch, step.nodes, hidden)[:, step.nodes - step.head_rows :].contiguous().view(-1, hidden)
    scale, cap = model.logit_scale, model.logit_softcap
    finish(some, model.head, out=step.logits.view(len(some), -1), times=scale, softcap=cap)
    if step.sizes:  # what pads a tree has no logits
        nodes = torch.arange(step.nodes - step.head_rows, step.nodes, device=device)
        step.logits.masked_fill_((nodes >= inputs.sizes[:, None])[..., None], 0.0)
    if step.top:
        _find_top(step)


def _end(model: Model, step: Pass) -> int:
    """The layers that a pass needs which wants only what layers keep: those behind share keys, and keep no state."""
    last = model.num_layers - 1
    while last > 0 and model.layers[last].shared_kv and not (step.states and step.states[last] is not None):
        last -= 1
    return last + 1


def _product(
    matrix: Matrix, x: Tensor, corrected: Corrected | None, post: Norm, times: float, scalar: float = 1.0
) -> dict[str, Any]:
    """Arguments of `rows.settle`, which adds a product to the residual stream."""
    sums = corrections.multiply(x, [matrix], corrected)
    return {"sums": sums, "bias": matrix.bias, "post": post, "times": times, "scalar": scalar}


def _per_layer(model: Model, inputs: Inputs, stream: Tensor, dtype: torch.dtype) -> Tensor:
    """The layers' own inputs [R, num_layers, ple_size]: a norm of a projection of the rows, plus a row of a table."""
    x = settle(stream, out=torch.empty(stream.shape, dtype=dtype, device=stream.device))
    sums = multiply(x, [model.ple_project])
    own = torch.empty(sums.shape[1:], device=stream.device)
    embed(model.ple_table, inputs.ids, own, model.ple_scale)
    size = model.ple_size
    settle(own.view(-1, size), sums.view(len(sums), -1, size), post=model.ple_norm)
    return own.view(len(x), -1, size)


def _beside_embeddings(model: Model, layer: Layer, inputs: Inputs, stream: Tensor, dtype: torch.dtype) -> Tensor:
    """The input of EAGLE-3's layer: [input(embedding), hidden_norm(row)]."""
    x = torch.empty(len(stream), 2 * model.hidden, dtype=dtype, device=stream.device)
    embedded = torch.empty_like(stream)
    embed(model.embeddings, inputs.ids, embedded, model.embedding_scale)
    settle(embedded, following=layer.input, out=x[:, : model.hidden])
    last = stream if layer.norm_before_residual else None
    settle(stream, following=layer.hidden_norm, out=x[:, model.hidden :], last=last)
    return x


def _project(model: Model, step: Pass, inputs: Inputs, stream: Tensor, dtype: torch.dtype) -> None:
    """The rows that the first layer reads, from states; with `projects_pairs` embeddings of tokens are before them."""
    matrix, hidden = model.project, model.hidden
    before = hidden if model.projects_pairs else 0
    x = torch.empty(len(stream), matrix.ins, dtype=dtype, device=stream.device)
    if before:
        embedded = torch.empty_like(stream)
        embed(model.embeddings, inputs.ids, embedded, model.embedding_scale)
        settle(embedded, following=model.embedding_norm, out=x[:, :hidden])
    given = step.inputs.reshape(len(stream), -1)
    if model.state_norm.kind:
        settle(given.float(), following=model.state_norm, out=x[:, before:])
    else:
        x[:, before:].copy_(given)
    finish(x, matrix, out=stream)


def _tables(step: Pass, layer: Layer) -> tuple[Tensor, Tensor]:
    if not layer.rotary_dim:
        return step.keys[0], step.keys[0]
    return step.cos[layer.rope], step.sin[layer.rope]


def _keep(step: Pass, places: Tensor, index: int, rows: Tensor) -> None:
    """Store a hidden state in the columns of the pass."""
    if step.states and step.states[index] is not None:
        keep(rows, places, step.states[index], step.state_columns, step.state_row)


def _find_top(step: Pass) -> None:
    """The largest of the logits, with noise added to them, and their log-probabilities."""
    logits = step.logits if step.noise is None else step.logits + step.noise[:, None]
    lowest = torch.finfo(torch.float32).min / 4
    logits = torch.where(logits < torch.inf, logits, lowest)
    values, columns = logits.topk(step.top, -1)
    step.top_ids.copy_(columns)
    step.top_logps.copy_(values - logits.logsumexp(-1, keepdim=True))
