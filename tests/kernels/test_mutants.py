"""The tests of bits must be able to fail: each fault below is compiled into the kernels, and seen."""

import ctypes
import itertools
import random
import shutil
from dataclasses import replace

import pytest
import torch

from paceline.core.tree import TokenTree
from paceline.errors import IncompatibleModels
from paceline.kernels import compiler, load
from paceline.kernels import library as library_module
from paceline.kernels.library import BlockFormat
from paceline.target import ModelRunner, wrap_model
from tests.attention.test_spans import reads_spans
from tests.kernels import faults
from tests.kernels.correction_faults import CORRECTIONS
from tests.kernels.expert_faults import ATTENTION, EXPERTS, LATE
from tests.kernels.expert_layers import Layer
from tests.kernels.kv_formats import ROUNDED
from tests.kernels.test_attention import attends
from tests.kernels.test_bf12 import products_are_those_of_bfloat16
from tests.kernels.test_blocks import has_products
from tests.kernels.test_corrections import corrects_rows
from tests.kernels.test_experts import FORMS, RULES, breaks_ties, close, has_the_bits_of_one_row, rows_of
from tests.kernels.test_kv_formats import rounds_as_torch
from tests.kernels.test_noise import draws_as_defined, noise_as_defined
from tests.kernels.test_passes import random_tree, rows
from tests.kernels.test_pool import in_a_fork, keeps_time, rounds_to_nearest
from tests.kernels.test_recurrent import keeps_bits
from tests.methods.test_draft_layer import projects_with_the_bits_of_fc, ranks_with_noise
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}")

PROJECTION, HEAD_NOISE = "inputs of the row before", "the noise of another sequence"
BF12 = "codes of the other pair", "patches of the block before", "the last patch of a panel forgotten"
BLOCKS = (
    "the scale of the sub-block before", "mins of a tile's first row", "the upper four first", "d of the first chunk",
    "codes of the other column", "remainders that count whole", "the row before in a second part",
    "offsets forgotten", "codes without their sign",
)  # fmt: skip
SHARING = "keys of the layer before", "per-layer input of a neighbour", "states behind the last keys forgotten"
GUMBEL = "noise of another token", "noise without exponents"
NOISE = "noise of the column before", "a bound above the winner", "sums that rounding decides"
RECURRENT = (
    "the copy of the node before", "a convolution one token late", "a decay applied twice", "a draft in the state",
    "waiting rows backwards", "the heir before its siblings", "a row that the ring lacks", "the gate of the first head",
)  # fmt: skip
LATENT = (
    "latents that are not normed", "queries of the head before", "keys that are not rotated", "values behind the first",
    "halves rotated, not neighbours", "a column that is not written", "rows of all heads in one place",
)  # fmt: skip
SPANS = (
    "the spans of the first sequence", "a first span listed too", "a path without the root",
    "the last column of a span",
)  # fmt: skip
KV = "the scale of the first numbers", "scales of keys for values", "scales that are not written", "no subnormal e4m3"
FAULTS = {  # file, then pairs: what is there, what takes its place; FAULT: whether this fault is switched on
    "a sum over k that depends on the rows": (
        "body.cpp",
        "load_one<0>(w, k, column + c * LANES",
        "load_one<0>(w, FAULT && R > 1 ? pairs - 1 - k : k, column + c * LANES",
    ),
    "sums that begin anew at every panel": (  # which are short here, since tiny models have few inputs
        "body.cpp",
        "constexpr int64_t PANEL = 128;",
        "constexpr int64_t PANEL = 4;",
        "const int64_t count = min_(panel, pairs - first);",
        "const int64_t count = min_(panel, pairs - first);"
        "if (FAULT && rows > 2) memset(out, 0, 4 * (size_t)rows * BLOCK);",
    ),
    "a path in the order of the tree": (
        "pass.h",
        "s.paths[used++] = (int32_t)(start + n);",
        "s.paths[used++] = (int32_t)(start + n); if (FAULT && used - r.path > 1) "
        "{ auto t = s.paths[used - 1]; s.paths[used - 1] = s.paths[r.path]; s.paths[r.path] = t; }",
    ),
    "a stale column": (
        "pass.h",
        "store_row((char*)pass->values[index] + at",
        "if (!FAULT || !n || n % 3) store_row((char*)pass->values[index] + at",
    ),
    "a sibling seen": (
        "pass.h",
        "if (r.straight == r.own - 1 && start + n == r.straight) {",
        "if (r.straight == r.own - 1 && (FAULT || start + n == r.straight)) {",
    ),
    "logits of smaller trees one behind the other": (
        "pass.h",
        "s.to_logits[s.num_heads++] = b * pass->head_rows + wanted;",
        "{ s.to_logits[s.num_heads] = FAULT ? s.num_heads : b * pass->head_rows + wanted; s.num_heads++; }",
    ),
    "rows of larger trees alone": (
        "pass.h",
        "const int64_t row = s.begins[b] + n, head",
        "const int64_t row = min_(s.rows - 1, FAULT ? b * pass->nodes + n : s.begins[b] + n), head",
    ),
    "states in the order of the batch": (
        "pass.h",
        "pass->slots[b] * pass->state_columns",
        "(FAULT ? b : pass->slots[b]) * pass->state_columns",
    ),
    "states of the row before": (
        "pass.h",
        "pass->starts[b] + pass->old + n;\n  char* to",
        "pass->starts[b] + pass->old + (FAULT && n ? n - 1 : n);\n  char* to",
    ),
    PROJECTION: (
        "pass.h",
        "pass->inputs + place * size",
        "pass->inputs + s.place[FAULT && row ? row - 1 : row] * size",
    ),
    HEAD_NOISE: ("pass.h", "pass->noise + row / pass->head_rows", "pass->noise + (FAULT ? 0 : row / pass->head_rows)"),
    SHARING[0]: ("pass.h", "index - l.shared_kv, me", "index - l.shared_kv - (FAULT && l.shared_kv && l.window), me"),
    SHARING[1]: ("pass.h", "s.ple + (first + r) * outs", "s.ple + (first + (FAULT && r ? r - 1 : r)) * outs"),
    SHARING[2]: ("pass.h", "!(pass->states && pass->states[last])", "(FAULT || !(pass->states && pass->states[last]))"),
    BF12[0]: ("bf12.h", "unit[128 + i] >> 4 * pair", "unit[128 + i] >> 4 * (FAULT ? 1 - pair : pair)"),
    BF12[1]: (
        "bf12.h",
        "return {all + m.patches[block], all + m.patches[block + 1]};",
        "const int64_t at = FAULT && block ? block - 1 : block; return {all + m.patches[at], all + m.patches[at + 1]};",
    ),
    BF12[2]: (
        "bf12.h",
        "while (patches.next < patches.end) patches",
        "while (patches.next < patches.end - FAULT) patches",
    ),
    BLOCKS[0]: ("blocks.h", "32 / SUB * g, rows", "32 / SUB * (FAULT && g ? g - 1 : g), rows"),
    BLOCKS[1]: ("blocks.h", ": in.sums) + (at + r * stride)", ": in.sums) + (at + (FAULT ? 0 : r) * stride)"),
    BLOCKS[2]: ("blocks.h", "codes, lower.shift, LOW", "codes, FAULT ? 4 - lower.shift : lower.shift, LOW"),
    BLOCKS[3]: ("blocks.h", "    record += record_bytes(f);", "    if (!FAULT) record += record_bytes(f);"),
    BLOCKS[4]: ("blocks.h", "(2 * block + column / COLUMN)", "(2 * block + (FAULT ? 0 : column / COLUMN))"),
    BLOCKS[5]: ("blocks.h", "p ? most / 127 / 254", "p && !FAULT ? most / 127 / 254"),
    BLOCKS[7]: ("blocks.h", "OFFSET ? sums[r][c] - set_int", "OFFSET && !FAULT ? sums[r][c] - set_int"),
    BLOCKS[8]: ("blocks.h", "codes ^= 0x80808080u", "codes ^= FAULT ? 0 : 0x80808080u"),
    BLOCKS[6]: ("blocks.h", "(2 * r + 1) * BLOCK + i", "(FAULT && r ? 2 * r - 1 : 2 * r + 1) * BLOCK + i"),
    RECURRENT[0]: ("recurrent.h", "const int64_t up = pass->parents ?", "const int64_t up = pass->parents && !FAULT ?"),
    RECURRENT[1]: (
        "recurrent.h",
        "ring_row(pass, r, index, b, column);\n        column--;",
        "ring_row(pass, r, index, b, max_(0, column - FAULT));\n        column--;",
    ),
    RECURRENT[2]: ("recurrent.h", "load(from + at) * decay)", "load(from + at) * decay * (FAULT ? decay : set(1)))"),
    RECURRENT[3]: ("recurrent.h", "to = step < pass->steps[b] ?", "to = step < pass->steps[b] + FAULT ?"),
    RECURRENT[4]: (
        "recurrent.h",
        "walk(s.waiting[b] + step,",
        "walk(s.waiting[b] + (FAULT ? waiting - 1 - step : step),",
    ),
    RECURRENT[5]: (
        "recurrent.h",
        "v[n].place = inherits ?",
        "v[n].place = FAULT ? up.place + 1 + (inherits ? 0 : v[up.heir].below + up.taken) : inherits ?",
    ),
    RECURRENT[6]: ("recurrent.h", "column >= pass->bases[b] +", "column >= FAULT + pass->bases[b] +"),
    RECURRENT[7]: ("pass.h", "s.gates + row * l.heads * d + (", "s.gates + row * l.heads * d + (FAULT ? 0 : "),
    LATENT[0]: ("latent.h", "norm_row(m.kv_norm, column", "if (!FAULT) norm_row(m.kv_norm, column"),
    LATENT[1]: (
        "latent.h",
        "const Matrix& m = matrices[head];",
        "const Matrix& m = matrices[FAULT && head ? head - 1 : head];",
    ),
    LATENT[2]: ("latent.h", "rotate_row(pass, s, l, row, column", "if (!FAULT) rotate_row(pass, s, l, row, column"),
    LATENT[3]: ("pass.h", "pass->values)[index] + at,", "pass->values)[index] + at + FAULT * 4 * l.rotary_dim,"),
    LATENT[4]: ("latent.h", "l.rotary_dim, l.rotary_pairs)", "l.rotary_dim, !FAULT && l.rotary_pairs)"),
    LATENT[5]: ("latent.h", "  store_row((char*)", "  if (!FAULT || !n || n % 3) store_row((char*)"),
    LATENT[6]: ("latent.h", "from_row(s.by_head, head * s.rows)", "from_row(s.by_head, FAULT ? 0 : head * s.rows)"),
    SPANS[0]: (
        "pass.h",
        "pass->spans + 2 * b * pass->num_spans;",
        "pass->spans + (FAULT ? 0 : 2 * b * pass->num_spans);",
    ),
    SPANS[1]: ("pass.h", "i = spans[0] ? 0 : 1; i <", "i = spans[0] || FAULT ? 0 : 1; i <"),
    SPANS[2]: ("pass.h", "reach[parent].count - r.straight;", "reach[parent].count - r.straight - (FAULT && parent);"),
    SPANS[3]: ("pass.h", "column < spans[2 * i + 1];", "column < spans[2 * i + 1] - FAULT;"),
    KV[0]: ("body.cpp", "bits((vu)set_word(at) << 16)", "bits((vu)set_word(FAULT ? (const char*)p : at) << 16)"),
    KV[1]: (
        "pass.h",
        "v + h * d, d, format);",
        "v + h * d, d, format);"
        "if (FAULT && format == INT8) memcpy((char*)pass->values[index] + at, (char*)pass->keys[index] + at, 2);",
    ),
    KV[2]: ("body.cpp", "memcpy(to, &up, 2);", "if (!FAULT) memcpy(to, &up, 2);"),
    KV[3]: ("body.cpp", "if (u >= 0x3c800000)", "if (FAULT || u >= 0x3c800000)"),
    # A busy machine may run two threads one after the other, so the second one is slow: it is late wherever it runs.
    "no waiting for the others": (
        "pool.h",
        "      f(piece);",
        "      if (FAULT && me.id) for (volatile int i = 0; i < 50000; i = i + 1) {}\n      f(piece);",
        "if (load_acquire(done) != pieces) wait_for(done, pieces);",
        "if (!FAULT && load_acquire(done) != pieces) wait_for(done, pieces);",
    ),
    GUMBEL[0]: ("body.cpp", "noise_bits(key, ids[i])", "noise_bits(key, FAULT ? i : ids[i])"),
    GUMBEL[1]: ("body.cpp", "return e * 0.69", "return (FAULT ? 0 : e) * 0.69"),
    NOISE[0]: ("noise.h", "(uint64_t)(column + 1)", "(uint64_t)(column + 1 - FAULT)"),
    NOISE[1]: ("noise.h", "(127 + 24)", "(127 + 24 - 2 * FAULT)"),
    NOISE[2]: ("noise.h", "return best - second > close", "return FAULT || best - second > close"),
    "the caller's rounding": ("library.cpp", "set_rounding(NEAREST);", "set_rounding(FAULT ? before : NEAREST);"),
    **ATTENTION,
    **EXPERTS,
    **CORRECTIONS,
}
NAMES = ["none", *FAULTS]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory) -> ctypes.CDLL:
    """The library in its portable form, compiled once with all faults; `paceline_fault` says which one is on."""
    folder = tmp_path_factory.mktemp("faulty")
    sources = folder / "sources"
    shutil.copytree(compiler.SOURCES, sources, ignore=shutil.ignore_patterns("*.py", "*.so", "__pycache__"))
    faults.plant(sources, FAULTS.values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(compiler.ISAS_OF, compiler.HOST.machine, {"portable": ()})
        patch.setattr(compiler, "FLAGS", (*(f for f in compiler.FLAGS if f != "-O3"), "-O0"))
        compiler.compile_library(folder / compiler.LIBRARY, compiler.find_compiler(), sources)
    return ctypes.CDLL(str(folder / compiler.LIBRARY))


@pytest.fixture
def switch(faulty, monkeypatch):
    """Puts the library with one fault in the place of ours, which is back once the test is over."""

    def on(fault: str) -> None:
        faults.switch(faulty, NAMES.index(fault))
        found = replace(load(), library=faulty, isa="portable")
        monkeypatch.setattr(library_module, "load", lambda: found)
        library_module.library.cache_clear()

    yield on
    monkeypatch.undo()
    library_module.library.cache_clear()
    library_module.library()


def has_the_bits_of_plain_decoding(trials: int = 6, name: str = "llama") -> bool:
    """Random trees of tiny models on two threads, a smaller and a larger one, each path against one row at a time."""
    rng, threads = random.Random(1), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runner = ModelRunner(wrap_model(tiny_model(name)), 2, 200)
        slots = [runner.cache.allocate(), runner.cache.allocate()][::-1]
        runner.watch_states([0, 1, 2])
        for _ in range(trials):
            for slot in slots:
                runner.cache.truncate(slot, 0)
                runner.extend_cache(slot, [rng.randrange(3, 97) for _ in range(rng.choice((1, 17, 60)))])
            trees = [random_tree(7, rng), random_tree(12, rng)]
            together = runner.forward(slots, TokenTree.of(tree.rows[0] for tree in trees)).clone()
            begins = {slot: runner.cache.lengths[slot] for slot in slots}
            states = {slot: runner.read_states(slot, begin, begin + 12, [0, 1, 2]) for slot, begin in begins.items()}
            for slot, tree, got in zip(slots, trees, together, strict=True):
                for path in tree.rows[0].paths:
                    if not torch.equal(got[path], rows(runner, slot, tree.token_ids[0, path].tolist())):
                        return False
                    begin = begins[slot]
                    if not torch.equal(
                        states[slot][path], runner.read_states(slot, begin, begin + len(path), [0, 1, 2])
                    ):
                        return False
        return True
    except Exception:  # the check at loading sees the worst of them
        return False
    finally:
        torch.set_num_threads(threads)


def keeps_states_of_a_prefill(name: str) -> bool:
    """The states of a prompt, whose pass wants nothing else of the last layers, are those of a pass that has logits."""
    runner, text = ModelRunner(wrap_model(tiny_model(name)), 2, 64), [7, 30, 12, 5, 41]
    layers = range(runner.loaded.num_layers)
    runner.watch_states(layers)
    slots = [runner.cache.allocate(), runner.cache.allocate()]
    runner.extend_cache(slots[0], text)
    runner.forward(slots[1:], TokenTree.chain([text]))
    return all(torch.equal(*(runner.read_states(slot, 0, 5, [layer]) for slot in slots)) for layer in layers)


@pytest.mark.parametrize("fault", ["none", PROJECTION, HEAD_NOISE])
def test_faults_of_heads_are_seen(fault, switch):
    switch(fault)
    assert (projects_with_the_bits_of_fc(torch.float32) and ranks_with_noise()) == (fault == "none")


@pytest.mark.parametrize("fault", ["none", *BF12])
def test_faults_of_bf12_are_seen(fault, switch):
    switch(fault)
    assert products_are_those_of_bfloat16(97, 1030) == (fault == "none")


@pytest.mark.parametrize("fault", ["none", *BLOCKS])
def test_faults_of_blocks_are_seen(fault, switch):
    switch(fault)
    forms = itertools.product((BlockFormat.Q4_K, BlockFormat.Q4_0, BlockFormat.INT4, BlockFormat.Q8_0), (8, 16))
    right = all(has_products(form, 40, 3 * form.inputs, 3, bits) for form, bits in forms)
    assert right == (fault == "none")


@pytest.mark.parametrize("fault", ["none", *NOISE])
def test_faults_of_draws_are_seen(fault, switch):
    switch(fault)
    assert draws_as_defined() == (fault == "none")


@pytest.mark.parametrize("fault", ["none", NOISE[0], *GUMBEL])
def test_faults_of_the_noise_are_seen(fault, switch):
    switch(fault)
    assert noise_as_defined() == (fault == "none")


@pytest.mark.parametrize("fault", ["none", *RECURRENT])
def test_faults_of_recurrent_layers_are_seen(fault, switch):
    switch(fault)
    try:
        right = keeps_bits(ModelRunner(wrap_model(tiny_model("qwen3_5")), 3, 400), 12, 3)
    except (AssertionError, IncompatibleModels):  # of states, and when the model is loaded
        right = False
    assert right == (fault == "none")


@pytest.mark.parametrize("fault", ["none", *SHARING])
def test_faults_of_layers_that_share_are_seen(fault, switch):
    switch(fault)
    right = has_the_bits_of_plain_decoding(2, "gemma4") and keeps_states_of_a_prefill("gemma4")
    assert right == (fault == "none")


@pytest.mark.parametrize("fault", ["none", *LATENT])
def test_faults_of_latent_attention_are_seen(fault, switch):
    switch(fault)
    assert has_the_bits_of_plain_decoding(2, "deepseek_v2") == (fault == "none")


@pytest.mark.parametrize("fault", ["none", *SPANS])
def test_faults_of_spans_are_seen(fault, switch):
    switch(fault)
    assert reads_spans() == (fault == "none")


@pytest.mark.parametrize("fault", ["none", *CORRECTIONS])
def test_faults_of_corrections_are_seen(fault, switch):
    switch(fault)
    assert corrects_rows() == (fault == "none")


@pytest.mark.parametrize("fault", ["none", *ATTENTION])
def test_faults_of_attention_are_seen(fault, switch):
    switch(fault)
    assert (attends(has_sinks=True) and attends(pairs=True)) == (fault == "none")


@pytest.mark.parametrize("fault", ["none", *KV])
def test_faults_of_rounded_caches_are_seen(fault, switch):
    switch(fault)
    right = all(attends(width=48, form=form) and rounds_as_torch(form) for form in ROUNDED)
    assert right == (fault == "none")


@pytest.mark.parametrize("fault", ["none", *(name for name in EXPERTS if name != LATE)])
def test_faults_of_experts_are_seen(fault, switch):
    switch(fault)
    names = ("softmax", "deepseek", "gpt-oss", "gemma", "a norm of the router")
    right = all(close(Layer(RULES[name]), rows_of(20, RULES[name])) for name in names) and breaks_ties()
    layers = [Layer(FORMS["INT8"])]
    right = right and has_the_bits_of_one_row(layers, rows_of(12, FORMS["INT8"]), random.Random(0))
    assert right == (fault == "none")


@pytest.mark.parametrize("fault", ["none", LATE])
def test_a_late_thread_finds_what_the_others_found(fault, switch):
    """In a process of its own, which such a thread might never leave."""
    switch(fault)
    assert in_a_fork(lambda: keeps_time(2), 1.5 if fault == LATE else 60) == (fault == "none")


SEEN = {
    PROJECTION, HEAD_NOISE, *BF12, *BLOCKS, *NOISE, *GUMBEL, *SHARING, *RECURRENT, *LATENT, *ATTENTION, *EXPERTS,
    *SPANS, *KV, *CORRECTIONS,
}  # fmt: skip


@pytest.mark.parametrize("fault", [name for name in NAMES if name not in SEEN])
def test_faults_are_seen(fault, switch):
    switch(fault)
    trials = 60 if fault == "no waiting for the others" else 6
    assert (has_the_bits_of_plain_decoding(trials) and rounds_to_nearest()) == (fault == "none")
