"""Faults of layers of experts, of sinks and of rotations, as `test_mutants.py` plants them."""

LATE = "groups counted for all layers together"
ATTENTION = {
    "sinks forgotten": ("pass.h", "l.sinks ? l.sinks", "l.sinks && !FAULT ? l.sinks"),
    "the sink of a key's first head": ("pass.h", "l.sinks[head]", "l.sinks[FAULT ? h * groups : head]"),
    "pairs rotated as halves": ("pass.h", "l.rotary_dim, l.rotary_pairs)", "l.rotary_dim, l.rotary_pairs && !FAULT)"),
}
EXPERTS = {
    "the experts of another row": (
        "experts.h",
        "s.place_of + row * e.chosen",
        "s.place_of + (FAULT ? s.rows - 1 - row : row) * e.chosen",
    ),
    "the weights of another rank": ("experts.h", "weight = weights[k]", "weight = weights[FAULT ? 0 : k]"),
    "ties broken by the last": ("experts.h", "return x > y ||", "return (FAULT ? x >= y : x > y) ||"),
    "NaN that is best": ("experts.h", "(y != y && x == x)", "(FAULT ? x != x : y != y && x == x)"),
    "groups by their first": ("experts.h", "k < of_group; k++) sums", "k < (FAULT ? 1 : of_group); k++) sums"),
    "a choice without its bias": (
        "experts.h",
        "scores[i] + e.choice_bias[i]",
        "scores[i] + (FAULT ? 0 : e.choice_bias[i])",
    ),
    "weights with the bias of the choice": (
        "experts.h",
        "weights[k] = scores[",
        "weights[k] = (FAULT ? keys : scores)[",
    ),
    "the weight of a dropped expert kept": (
        "experts.h",
        "  const float factor = e.times",
        "  for (int32_t i = FAULT ? 0 : e.count; i < e.count; i++) sum += i == chosen[0] ? 0 : scores[i];\n"
        "  const float factor = e.times",
    ),
    "a shared expert for the first row alone": (
        "experts.h",
        "y[i] = sum[i] + factor",
        "y[i] = sum[i] + (FAULT && row ? 0 : factor)",
    ),
    "a row of another pair": ("experts.h", "s.row_of[first + r]", "s.row_of[first + (FAULT ? 0 : r)]"),
    "a row alone that is not its own": (
        "experts.h",
        "from_row(s.normed, s.row_of[first])",
        "from_row(s.normed, FAULT ? 0 : s.row_of[first])",
    ),
    "scales of the row before": ("experts.h", "x.scales + at / each", "x.scales + (FAULT ? 0 : at / each)"),
    "gates of the rows before": (
        "experts.h",
        "at = (first + r) * to.stride",
        "at = (FAULT ? r : first + r) * to.stride",
    ),
    "a limit on one side": ("experts.h", "up < -e.limit ?", "!FAULT && up < -e.limit ?"),
    "what the router reads": ("experts.h", "else if (renews)", "else if (renews && !FAULT)"),
    # The second thread is late, while the first, which waits for it in the first layer alone, is layers further.
    LATE: (
        "experts.h",
        "s.num_groups[index]",
        "s.num_groups[FAULT ? 0 : index]",
        "  const int groups =",
        "  const int rounds = !FAULT ? 0 : me.id ? 10000000 : index ? 0 : 5000000;\n"
        "  for (volatile int i = 0; i < rounds; i = i + 1) {}\n  const int groups =",
    ),
}
