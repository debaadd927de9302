// Layers with experts; included by pass.h.
//
// A row's choice depends on its own scores alone. The rows that chose an expert are laid side by side, so that its weights
// are read once; a row's outputs are then added in the order of its choice, best first. So the bits of a row depend on no
// other row.

INLINE float sigmoid(float x) { return 1.0f / (expf(-x) + 1.0f); }

// Whether x is better than y, which comes before it: NaN is worst.
INLINE bool is_better(float x, float y) { return x > y || (y != y && x == x); }

// The best `count` of x[0 .. size), best first, without those that are `out`, where it is given; on a tie the first.
static void choose_best(const float* x, int32_t size, const uint8_t* out, int32_t count, int32_t* best) {
  int32_t found = 0;
  for (int32_t i = 0; i < size; i++) {
    if ((out && out[i]) || (found == count && !is_better(x[i], x[best[count - 1]]))) continue;
    int32_t at = found < count ? found++ : count - 1;
    for (; at > 0 && is_better(x[i], x[best[at - 1]]); at--) best[at] = best[at - 1];
    best[at] = i;
  }
}

// Marks all experts but those of the best groups.
static void choose_groups(const Experts& e, const float* keys, uint8_t* out) {
  const int32_t size = e.count / e.groups, of_group = (int32_t)min_(e.of_group, size);
  float sums[MOST_EXPERTS];
  int32_t best[MOST_EXPERTS];
  for (int32_t g = 0; g < e.groups; g++) {
    choose_best(keys + g * size, size, nullptr, of_group, best);
    sums[g] = 0;
    for (int32_t k = 0; k < of_group; k++) sums[g] += keys[g * size + best[k]];
  }
  choose_best(sums, e.groups, nullptr, e.chosen_groups, best);
  memset(out, 1, e.count);
  for (int32_t k = 0; k < e.chosen_groups; k++) memset(out + best[k] * size, 0, size);
}

// Chooses a row's experts by its logits, and what each counts.
static void choose(const Experts& e, const float* logits, int32_t* chosen, float* weights) {
  float keys[MOST_EXPERTS + LANES], scores[MOST_EXPERTS + LANES], sum = 0;
  uint8_t out[MOST_EXPERTS];
  memcpy(keys, logits, 4 * e.count);
  memset(keys + e.count, 0, sizeof(vf));
  if (e.scoring == SIGMOID)
    for (int32_t i = 0; i < e.count; i += LANES) storeu(scores + i, 1.0f / (exp_(-load(keys + i)) + 1.0f));
  else {
    choose_best(keys, e.count, nullptr, 1, chosen);
    for (int32_t i = 0; i < e.count; i += LANES) storeu(scores + i, exp_(load(keys + i) - keys[chosen[0]]));
    for (int32_t i = 0; i < e.count; i++) sum += scores[i];
    for (int32_t i = 0; i < e.count; i++) scores[i] /= sum;
  }
  // Scores round, so that logits tell more of them apart.
  if (e.choice_bias)
    for (int32_t i = 0; i < e.count; i++) keys[i] = scores[i] + e.choice_bias[i];
  if (e.groups) choose_groups(e, e.choice_bias || e.of_group == 1 ? keys : scores, out);
  choose_best(keys, e.count, e.groups ? out : nullptr, e.chosen, chosen);
  sum = 0;
  for (int32_t k = 0; k < e.chosen; k++) sum += weights[k] = scores[chosen[k]];
  const float factor = e.times / (e.divides ? (sum > e.least_sum ? sum : sum == sum ? e.least_sum : sum) + e.more_sum : 1.0f);
  for (int32_t k = 0; k < e.chosen; k++) weights[k] *= factor * (e.scale ? e.scale[chosen[k]] : 1.0f);
}

// Asks the system to read weights that lie in a file, all at once: page by page it would take far longer. Pages that were
// used together leave memory together, so that a few of them tell whether all are there.
static void fetch(const Matrix& m) {
#if defined(__linux__)
  int64_t bytes = 0;  // of a block
  if (!is_block_format(m.format)) bytes = block_bytes(m);
  else bytes = 2 * (m.ins / block_format(m.format).each) * record_bytes(block_format(m.format));
  const uintptr_t page = sysconf(_SC_PAGESIZE), first = (uintptr_t)m.data & -page;
  const uintptr_t last = (uintptr_t)m.data + num_blocks(m) * bytes;
  bool is_there = true;
  for (int i = 0; i < 4 && is_there; i++) {
    unsigned char resident = 0;
    is_there = !mincore((void*)((first + (last - 1 - first) * i / 3) & -page), page, &resident) && resident & 1;
  }
  if (!is_there) madvise((void*)first, last - first, MADV_WILLNEED);
#endif
}

// Lays the rows of each expert side by side, in their order.
static void group_rows(const Experts& e, const Pass* pass, const Scratch& s, int index) {
  int64_t begins[MOST_EXPERTS + 1] = {};
  for (int64_t i = 0; i < s.rows * e.chosen; i++) begins[s.chosen[i] + 1]++;
  int32_t groups = 0;
  for (int32_t i = 0; i < e.count; i++) {
    if (begins[i + 1]) {
      s.expert_of[groups] = i, s.first_of[groups++] = begins[i];
      if (e.in_file && e.gate) fetch(e.gate[i]);
      if (e.in_file) fetch(e.up[i]), fetch(e.down[i]);
    }
    begins[i + 1] += begins[i];
  }
  s.first_of[groups] = s.rows * e.chosen;
  for (int64_t i = 0; i < s.rows * e.chosen; i++) {
    const int64_t at = begins[s.chosen[i]]++;
    s.row_of[at] = i / e.chosen;
    s.place_of[i] = at;
  }
  s.num_groups[index] = groups;
  if (pass->num_experts) *pass->num_experts += groups;
}

INLINE Bytes from_row(Bytes x, int64_t row, int64_t each) {
  if (!x.codes) return x;
  const int64_t at = row * x.parts * x.stride;
  return {x.codes + at, x.scales + at / each, x.sums + at / 32, x.halves + at / 16, x.stride, x.parts};
}

// The rows from one on.
INLINE Input from_row(const Input& in, int64_t row) {
  return {in.wide + row * in.stride, in.narrow ? in.narrow + row * in.stride : nullptr, from_row(in.by_32, row, 32),
          from_row(in.by_256, row, 256), in.stride};
}

static void copy_row(const Bytes& from, const Bytes& to, int64_t each) {
  const int64_t size = from.parts * from.stride;
  if (!from.codes) return;
  memcpy(to.codes, from.codes, size);
  memcpy(to.scales, from.scales, size / each * 4);
  memcpy(to.sums, from.sums, size / 32 * 2);
  memcpy(to.halves, from.halves, size / 16 * 2);
}

// The first row of one as that of another which is laid out alike.
static void copy_row(const Input& from, const Input& to) {
  memcpy(to.wide, from.wide, 4 * from.stride);
  if (from.narrow) memcpy(to.narrow, from.narrow, 2 * from.stride);
  copy_row(from.by_32, to.by_32, 32);
  copy_row(from.by_256, to.by_256, 256);
}

// What the rows of a group read: one row is read where it is.
INLINE Input rows_of_group(const Scratch& s, int group, int64_t count) {
  const int64_t first = s.first_of[group];
  return count == 1 ? from_row(s.normed, s.row_of[first]) : from_row(s.routed, first);
}

INLINE vf inner_of(const Experts& e, int activation, vf gate, vf up) {
  if (e.limit > 0) {
    gate = gate > e.limit ? set(e.limit) : gate;
    up = up > e.limit ? set(e.limit) : up < -e.limit ? set(-e.limit) : up;
  }
  if (activation == SILU) return gate / (exp_(gate * -e.alpha) + 1.0f) * (up + e.plus);
  return activate(gate, activation) * (up + e.plus);
}

// One block of an expert's inner rows. rows: at most GROUP at once, so that a block's gates can wait for it.
static void inner_block(const Layer& l, int32_t expert, const Input& in, int64_t rows, int64_t block, const Input& to) {
  const Experts& e = *l.experts;
  const auto store = [&](const Matrix& m, auto made) {
    multiply_block(m, in, rows, block, [&](int64_t first, int64_t count, float* sums) {
      for (int64_t r = 0; r < count; r++) {
        const int64_t at = (first + r) * to.stride + block * BLOCK;
        for (int k = 0; k < BLOCK; k += LANES) {
          const vf x = made(load(sums + r * BLOCK + k), load(to.wide + at + k));
          storeu(to.wide + at + k, x);
          if (to.narrow) storeu(to.narrow + at + k, to_bf16(x));
        }
      }
    });
  };
  if (!e.gate) return store(e.up[expert], [&](vf up, vf) { return activate(up, l.activation); });
  store(e.gate[expert], [](vf gate, vf) { return gate; });
  store(e.up[expert], [&](vf up, vf gate) { return inner_of(e, l.activation, gate, up); });
}

// Renews what products read.
static void norm_again(const Scratch& s, const Norm& norm, Worker& me) {
  phase(me, (int)s.rows, [&](int row) {
    norm_row(norm, s.x + row * s.hidden, s.normed.wide + row * s.normed.stride, s.hidden);
    finish_input(s.normed, row, s.hidden);
  });
}

// x += times * norm(the experts' outputs, and that of the MLP, which is in y); then x *= scalar. `normed` holds what the
// MLP read.
static void run_experts(const Pass* pass, const Scratch& s, const Layer& l, int index, float scalar, Worker& me) {
  const Experts& e = *l.experts;
  const int64_t pairs = s.rows * e.chosen;
  const Matrix* scored[] = {&e.shared_gate, &e.router};
  if (e.shared_gate.data) {  // before the rows change
    product(me, s, scored, 1, s.normed, s.rows, [&](int64_t first, int64_t count, int64_t, int64_t, float* sums) {
      for (int64_t r = 0; r < count; r++) s.shared[first + r] = sigmoid(sums[r * BLOCK]);
    });
  }
  const bool renews = e.router_norm.kind != NO_NORM;
  if (renews) norm_again(s, e.router_norm, me);
  product(me, s, scored + 1, 1, s.normed, s.rows, [&](int64_t first, int64_t count, int64_t out, int64_t outs, float* sums) {
    for (int64_t r = 0; r < count; r++) memcpy(s.scores + (first + r) * e.count + out, sums + r * BLOCK, 4 * outs);
  });
  phase(me, (int)s.rows, [&](int row) {
    choose(e, s.scores + row * e.count, s.chosen + row * e.chosen, s.weights + row * e.chosen);
    if (s.rows == 1) group_rows(e, pass, s, index);
  });
  if (s.rows > 1) phase(me, 1, [&](int) { group_rows(e, pass, s, index); });
  if (e.experts_norm.kind != NO_NORM) norm_again(s, e.experts_norm, me);
  else if (renews) norm_again(s, l.before_mlp, me);
  // A thread that is late may read this when the others are layers further, so that each layer has its own.
  const int groups = s.num_groups[index];
  if (s.rows > 1)
    phase(me, groups, [&](int group) {
      const int64_t first = s.first_of[group], count = s.first_of[group + 1] - first;
      for (int64_t r = 0; r < count && count > 1; r++)
        copy_row(from_row(s.normed, s.row_of[first + r]), from_row(s.routed, first + r));
    });
  const int inner_blocks = num_blocks(e.up[0]), out_blocks = num_blocks(e.down[0]);
  phase(me, groups * inner_blocks, [&](int piece) {
    const int group = piece / inner_blocks;
    const int64_t first = s.first_of[group], count = s.first_of[group + 1] - first;
    inner_block(l, s.expert_of[group], rows_of_group(s, group, count), count, piece % inner_blocks, from_row(s.inners, first));
  });
  if (s.inners.waits_for_rows() || e.up[0].outs % 32)
    phase(me, (int)pairs, [&](int at) { finish_input(s.inners, at, e.up[0].outs); });
  phase(me, groups * out_blocks, [&](int piece) {
    const int group = piece / out_blocks, block = piece % out_blocks;
    const int64_t first = s.first_of[group], rows = s.first_of[group + 1] - first;
    const Matrix& down = e.down[s.expert_of[group]];
    const int64_t outs = min_(BLOCK, down.outs - (int64_t)block * BLOCK);
    multiply_block(down, from_row(s.inners, first), rows, block, [&](int64_t from, int64_t count, float* sums) {
      for (int64_t r = 0; r < count; r++)
        memcpy(s.outputs + (first + from + r) * s.hidden + block * BLOCK, sums + r * BLOCK, 4 * outs);
    });
  });
  // Where nothing is normed, columns are added up by themselves, so that all threads have some of a row.
  const bool by_columns = !e.after_experts.kind && !e.after_shared.kind && !l.after_mlp.kind;
  const int parts = by_columns && s.rows < me.team->threads ? (int)min_(me.team->threads, num_blocks(e.down[0])) : 1;
  phase(me, (int)s.rows * parts, [&](int piece) {
    const int64_t row = piece / parts, begin = s.hidden * (piece % parts) / parts;
    const int64_t size = s.hidden * (piece % parts + 1) / parts - begin;
    float *x = s.x + row * s.hidden + begin, *y = s.y + row * s.hidden + begin;
    const int64_t* places = s.place_of + row * e.chosen;
    const float* weights = s.weights + row * e.chosen;
    float* sum = s.outputs + places[0] * s.hidden + begin;
    for (int64_t i = 0; i < size; i++) sum[i] *= weights[0];
    for (int32_t k = 1; k < e.chosen; k++) {
      const float *out = s.outputs + places[k] * s.hidden + begin, weight = weights[k];
      for (int64_t i = 0; i < size; i++) sum[i] += weight * out[i];
    }
    norm_row(e.after_experts, sum, sum, size);
    if (l.up.data) {
      const float factor = e.shared_gate.data ? s.shared[row] : 1.0f;
      norm_row(e.after_shared, y, y, size);
      for (int64_t i = 0; i < size; i++) y[i] = sum[i] + factor * y[i];
    } else {
      memcpy(y, sum, 4 * size);
    }
    norm_row(l.after_mlp, y, y, size);
    for (int64_t i = 0; i < size; i++) x[i] = (x[i] + l.mlp_times * y[i]) * scalar;
  });
}
