"""Every tuned number of the policies: its unit, what it is, and what it was measured on.

`docs/speed.md` shows this table; a test compares the two.
"""

# Costs
PLAIN_ROUNDS = 5
PLAIN_EVERY = 48
MEASURE_SECONDS = 1.2
MAX_PASS_RATIO = 5.0
TREE_ROWS = (16, 32, 64, 8, 17, 9, 33, 4, 5)
CLIP = 1.5
FOLLOW = 0.12
FEW_TOKENS = 8
# Odds
PRIOR = 0.7
WEIGHT = 3.0
REQUEST_WEIGHT = 12.0
HALF_LIFE = 128.0
REQUEST_HALF_LIFE = 16.0
NODES_PER_LEVEL = 3.0
EDGES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 0.7, 0.9)
BUCKETS = len(EDGES) + 1
KNOWN = 4.0
# Plan
MARGIN = 1.05
COUNTED_GAIN = 0.5
PATIENCE = 3
TREE_SIZES = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)
TRIAL_DEPTH = 2
TRIAL_FREE = 1.1
# Ledger
INITIAL = 4.0
ALLOWANCE = 0.008
MOST = 24.0
OUTLIER = 1.6
LOAN = 0.02
# Trials
WAIT = 4
LONGEST = 64
GOOD_ROUNDS = 1.5
BAD_ROUNDS = 2.0
REMEMBERED = 128
