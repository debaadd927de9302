"""Every tuned number of the policies: its unit, what it is, and by what it was judged ("chosen": by no measurement).

The table in `docs/speed.md` is this one; `tests/policy/test_constants.py` compares the two.
"""

# ruff: noqa: E501
# fmt: off
# Costs
PLAIN_ROUNDS = 5  # rounds | plain ones of a batch size before anything is compared with them | chosen
MEASURE_SECONDS = 1.2  # seconds | after which no further point of T(n) is measured | chosen
MAX_PASS_RATIO = 5.0  # plain passes | larger passes are not measured, since no tree makes up for them | chosen
TREE_ROWS = (16, 32, 64, 8, 17, 9, 33, 4, 5)  # rows | where T(n) is measured for trees, the most telling first | chosen: each way of padding shows between two of them
CLIP = 1.5  # factor | the most by which one time counts as longer than expected, in estimates and in the ledger | simulator: without a limit -25%
FOLLOW = 0.12  # exponent | how far an estimate of a time follows what is seen | chosen
LONG_TEXT = 1024  # tokens | from which on each doubling of the length has estimates of rounds of its own | chosen
FEW_TOKENS = 8  # tokens | so many uncached ones are read within the first drafting step | chosen
# Odds
PRIOR = 0.7  # chance | assumed acceptance of a new drafter, high enough for it to be tried | replay: a head's card is no better start
WEIGHT = 3.0  # rounds | what a prior counts for; a drafter with fewer is new | replay: 6 to 10 gain 0.5%, and fail where requests differ
REQUEST_WEIGHT = 12.0  # rounds | the same for what is known when a request begins | replay and simulator: 8 to 16 within 0.5%
HALF_LIFE = 128.0  # rounds | after which a round of the process counts half | replay: 256 and 400 within 1%
REQUEST_HALF_LIFE = 16.0  # rounds | the same within a request | replay: 32 within 1%
NODES_PER_LEVEL = 3.0  # nodes | assumed of a drafter of trees that has not drafted yet | chosen
EDGES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 0.7, 0.9)  # chance | buckets of the calibration of confidences | chosen
# Plan
MARGIN = 1.05  # factor | drafting must promise so many times the tokens a second of plain decoding | simulator: 1.0 costs 0.3%
TREE_SIZES = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)  # nodes | sizes that are compared | chosen: with the root they fill passes padded to 2, 4, 8 or 16 rows
# Trials
TRIAL_DEPTH = 2  # tokens | how deep a trial drafts | simulator: 1 costs 0.1%, heads 1.6%
WAIT = 4  # rounds | after a failed trial, twice as many after each further one | replay: 16 and 64 within 0.2%
LONGEST = 64  # rounds | the longest wait, and drafts between two plain rounds | chosen
GOOD_ROUNDS = 1.5  # rounds | a known drafter is tried if so many without a rejected token, for each LONGEST that it was not used, would make it the choice | replay: without a limit 1 to 3% slower
BAD_ROUNDS = 2.0  # rounds | reading must pay even after so many in which nothing is accepted | replay: 1% beside EAGLE-3
REMEMBERED = 128  # answers | whose lengths say how long one will get | chosen
# Ledger
INITIAL = 4.0  # passes | what the process, and each request, may lose at first | chosen
ALLOWANCE = 0.008  # passes | what each emitted token adds to that: with INITIAL 2.4% over 256 tokens | chosen
MOST = 24.0  # passes | the highest credit, so that old gains allow no long losses | chosen
# `Dynamic`
FIRST_ACCEPTED = 4.0  # tokens | that a new answer is assumed to accept | chosen
GROWTH = 2  # tokens | added after a draft that was accepted whole | as transformers does
NEWEST_WEIGHT = 0.5  # share | of the newest round in the moving average | chosen
# fmt: on
