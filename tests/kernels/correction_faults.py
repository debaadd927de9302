"""Faults of low-rank terms, for `test_mutants`."""

CORRECTIONS = {
    "the correction of the row before": (
        "pass.h",
        "pass->corrected ? pass->corrected[place] : 0;",
        "pass->corrected ? pass->corrected[FAULT && place ? place - 1 : place] : 0;",
    ),
    "the factors of the first correction": (
        "pass.h",
        "factors_of(m, s.corrected[takes - 1])",
        "factors_of(m, s.corrected[FAULT ? 0 : takes - 1])",
    ),
    "the inner row of the layer before": (
        "pass.h",
        "multiply_rows(factors[1], s.inner, which * s.rows",
        "multiply_rows(factors[1], s.inner, (FAULT && which ? which - 1 : which) * s.rows",
    ),
    "a correction that forgets a last row": (
        "pass.h",
        "in, row, run, block, out);",
        "in, row, FAULT && run > 2 ? run - 1 : run, block, out);",
    ),
    "corrections of all rows": (
        "pass.h",
        "s.takes[first + r + run] == takes) run++;",
        "(FAULT || s.takes[first + r + run] == takes)) run++;",
    ),
}
