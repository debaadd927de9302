// Recurrent layers; included by pass.h. A state is walked token by token along every path of a tree, in the order of the
// text, so that its bits are those of plain decoding:
//
//   S = exp(g) S + k d'     d = beta (v - (exp(g) S)' k)  delta rule       d = step v  state space       out = S' q
//
// with g = decay * step, step = softplus(a + bias). Value heads are cut into blocks of 16 columns, each of which stays in
// the first cache while it is walked over all tokens. Sources: Gated DeltaNet (arXiv 2412.06464), Mamba-2 (2405.21060).
//
// A pass walks the columns from `bases` on, whose rows a ring keeps, then its own rows. The first `steps` of these change
// the state itself, all others a copy. At a fork the child with the most descendants takes over the copy, so that
// log2(nodes) + 1 copies are enough.

INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// One step of a block: `to` may be `from`. y: the output, or null.
template <bool DELTA>
static void walk_step(const float* from, float* to, int64_t size, const float* q, const float* k, const float* v, float g,
                      float factor, float skip, float* y) {
  constexpr int V = WIDE / LANES, PARTS = 4;  // sums that do not wait for one another, added in a fixed order
  vf d[V], sums[PARTS][V];
  UNROLL for (int i = 0; i < V; i++) d[i] = load(v + i * LANES);
  if (DELTA) {
    UNROLL for (int p = 0; p < PARTS; p++)
      UNROLL for (int i = 0; i < V; i++) sums[p][i] = zero();
    for (int64_t n = 0; n < size; n += PARTS)
      UNROLL for (int p = 0; p < PARTS; p++) {
        const vf key = set(k[n + p]);
        UNROLL for (int i = 0; i < V; i++) sums[p][i] = fma(load(from + (n + p) * WIDE + i * LANES), key, sums[p][i]);
      }
    UNROLL for (int i = 0; i < V; i++) {
      const vf known = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
      d[i] = (d[i] - known * g) * factor;
    }
  } else {
    UNROLL for (int i = 0; i < V; i++) d[i] *= factor;
  }
  UNROLL for (int p = 0; p < PARTS; p++)
    UNROLL for (int i = 0; i < V; i++) sums[p][i] = zero();
  const vf decay = set(g);
  for (int64_t n = 0; n < size; n += PARTS)
    UNROLL for (int p = 0; p < PARTS; p++) {
      const vf key = set(k[n + p]), query = set(q[n + p]);
      UNROLL for (int i = 0; i < V; i++) {
        const int64_t at = (n + p) * WIDE + i * LANES;
        const vf s = fma(key, d[i], load(from + at) * decay);
        storeu(to + at, s);
        sums[p][i] = fma(s, query, sums[p][i]);
      }
    }
  if (!y) return;
  UNROLL for (int i = 0; i < V; i++)
    storeu(y + i * LANES, fma(load(v + i * LANES), set(skip), (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i])));
}

// Where each node of a tree comes in the walk, and in which copy of the state it is.
static void plan_walks(const Pass* pass, Scratch& s) {
  s.num_waiting = 0;
  for (int64_t b = 0; b < pass->batch; b++) {
    const int64_t size = s.begins[b + 1] - s.begins[b];
    const int64_t* parents = pass->parents ? pass->parents + b * pass->nodes : nullptr;
    Visit* v = s.visits + s.begins[b];
    s.waiting[b] = s.num_waiting;
    s.num_waiting += pass->starts[b] - pass->bases[b];
    const auto parent = [&](int64_t n) { return parents ? parents[n] : n - 1; };
    for (int64_t n = 0; n < size; n++) v[n] = {0, 1, 0, 0, -1, 0};
    for (int64_t n = size - 1; n > 0; n--) v[parent(n)].below += v[n].below;
    for (int64_t n = 1; n < size; n++) {
      int32_t& heir = v[parent(n)].heir;
      if (heir < 0 || v[n].below > v[heir].below) heir = (int32_t)n;
    }
    for (int64_t n = 1; n < size; n++) {  // parents come before their children
      Visit& up = v[parent(n)];
      const bool inherits = up.heir == n;
      v[n].place = inherits ? up.place + up.below - v[n].below : up.place + 1 + up.taken;
      if (!inherits) up.taken += v[n].below;
      v[n].level = up.level + !inherits;
    }
    for (int64_t n = 0; n < size; n++) v[v[n].place].node = (int32_t)n;
  }
}

// Rows before the columns of a pass lie in the ring.
INLINE const float* ring_row(const Pass* pass, const Recurrent& r, int index, int64_t b, int64_t column) {
  const float* rows = (const float*)pass->recurrent_rows[index];
  return rows + (pass->slots[b] * pass->ring + column % pass->ring) * ring_width(r);
}

// The convolution, the norms of q and k, and the factors of each head: all that a step of the walk reads of a row.
static void mix_row(const Recurrent& r, const float* const* taps, const float* own, float* to) {
  for (int64_t i = 0; i < padded(r.channels); i += LANES) {
    vf sum = r.conv_bias ? load(r.conv_bias + i) : zero();
    for (int t = 0; t < r.taps; t++)
      if (taps[t]) sum = fma(load(taps[t] + i), load(r.conv + t * padded(r.channels) + i), sum);
    storeu(to + i, r.kind == SHORT_CONV ? sum : activate(sum, SILU));
  }
  if (r.kind == SHORT_CONV) return;
  if (r.kind == DELTA_RULE)
    for (int h = 0; h < 2 * r.key_heads; h++) {
      const bool is_q = h < r.key_heads;
      float* x = to + (is_q ? r.q_at + h * r.key_dim : r.k_at + (h - r.key_heads) * r.key_dim);
      const float scale = 1.0f / sqrtf(sum_squares(x, r.key_dim, 0) + 1e-6f) / (is_q ? sqrtf((float)r.key_dim) : 1.0f);
      for (int i = 0; i < r.key_dim; i++) x[i] *= scale;
    }
  float *decays = to + padded(r.channels), *factors = decays + padded(r.heads);
  memset(decays, 0, 8 * padded(r.heads));  // the last block of values may reach into them
  for (int h = 0; h < r.heads; h++) {
    float step = softplus(own[h] + r.step_bias[h]);
    step = step < r.least_step ? r.least_step : step > r.most_step ? r.most_step : step;
    decays[h] = expf(step * r.decay[h]);
    factors[h] = r.kind == DELTA_RULE ? r.beta_scale / (1.0f + expf(-own[padded(r.heads) + h])) : step;
  }
}

// Reads what `taps` and `own` of a row are: of this pass in `made` (rows as the ring has them), or of earlier ones.
static void mix_rows(const Pass* pass, const Scratch& s, const Recurrent& r, int index, Worker& me) {
  const int64_t width = ring_width(r);
  phase(me, (int)(s.num_waiting + s.rows), [&](int piece) {
    const float* taps[16];
    int64_t b = 0, column, node = -1;
    if (piece < s.num_waiting) {
      while (b + 1 < pass->batch && s.waiting[b + 1] <= piece) b++;
      column = pass->bases[b] + piece - s.waiting[b];
    } else {
      const int64_t place = s.place[piece - s.num_waiting];
      b = place / pass->nodes;
      node = place % pass->nodes;
      column = pass->starts[b] - 1;  // of the row before the root
    }
    const float* own = nullptr;
    for (int t = r.taps - 1; t >= 0; t--) {
      if (node >= 0) {
        taps[t] = s.made + (s.begins[b] + node) * width;
        node = pass->parents ? pass->parents[b * pass->nodes + node] : node - 1;
      } else {
        taps[t] = column < 0 ? nullptr : ring_row(pass, r, index, b, column);
        column--;
      }
      if (!own) own = taps[t] + padded(r.channels);
    }
    mix_row(r, taps, own, s.mixed + piece * width);
  });
}

template <bool DELTA>
static void walk_block(const Pass* pass, const Scratch& s, const Recurrent& r, int index, int64_t b, int64_t head,
                       int64_t block, float* copies) {
  const int64_t size = r.key_dim * WIDE, width = ring_width(r), blocks = padded(r.value_dim) / WIDE;
  const int64_t waiting = pass->starts[b] - pass->bases[b], first = s.begins[b], total = s.begins[b + 1] - first;
  const int64_t key_head = head / (r.heads / r.key_heads), outs = min_(WIDE, r.value_dim - block * WIDE);
  float* state = (float*)pass->recurrent_states[index] + ((pass->slots[b] * r.heads + head) * blocks + block) * size;
  const float* from = state;
  const auto walk = [&](int64_t row, float* to, float* y) {
    const float* x = s.mixed + row * width;
    const float* decays = x + padded(r.channels);
    float out[WIDE];
    walk_step<DELTA>(from, to, r.key_dim, x + r.q_at + key_head * r.key_dim, x + r.k_at + key_head * r.key_dim,
                     x + r.v_at + head * r.value_dim + block * WIDE, decays[head], decays[padded(r.heads) + head],
                     r.skip ? r.skip[head] : 0.0f, y ? out : nullptr);
    if (y) memcpy(y, out, 4 * outs);
    from = to;
  };
  int64_t step = 0;
  for (; step < waiting; step++) walk(s.waiting[b] + step, step < pass->steps[b] ? state : copies, nullptr);
  const Visit* visits = s.visits + first;
  for (int64_t place = 0; place < total; place++, step++) {
    const int64_t node = visits[place].node, row = first + node;
    float* to = step < pass->steps[b] ? state : copies + visits[node].level * size;
    if (place > 0 && step > pass->steps[b]) {  // its parent's copy; rows of text follow one another in the state itself
      const int64_t up = pass->parents ? pass->parents[b * pass->nodes + node] : node - 1;
      from = copies + visits[up].level * size;
    }
    walk(s.num_waiting + row, to, s.attended.wide + row * s.attended.stride + head * r.value_dim + block * WIDE);
  }
}

// x += times * out(gate(norm(walk(conv(rows)))))
static void run_recurrent(const Pass* pass, const Scratch& s, const Layer& l, int index, bool ends, Worker& me) {
  const Recurrent& r = *l.recurrent;
  const int64_t width = ring_width(r), outs = r.kind == SHORT_CONV ? r.channels : (int64_t)r.heads * r.value_dim;
  const Matrix* in[6];
  for (int i = 0; i < r.num_inputs; i++) in[i] = &r.inputs[i];
  product(me, s, in, r.num_inputs, s.normed, s.rows, [&](int64_t first, int64_t count, int64_t out, int64_t size, float* sums) {
    for (int64_t i = 0; i < count; i++) memcpy(s.qkv + (first + i) * r.width + out, sums + i * BLOCK, 4 * size);
  });
  phase(me, (int)s.rows, [&](int row) {
    float *x = s.qkv + (int64_t)row * r.width, *to = s.made + row * width;
    if (r.scales)
      for (int64_t i = 0; i < r.width; i++) x[i] *= r.scales[i];
    memcpy(to, x + r.channels_at, 4 * r.channels);
    for (int64_t i = r.channels; i < padded(r.channels); i++) to[i] = 0;
    if (r.kind == SHORT_CONV)
      for (int64_t i = 0; i < r.channels; i++) to[i] *= x[r.times_at + i];
    memcpy(to + padded(r.channels), x + r.step_at, 4 * r.heads);
    if (r.kind == DELTA_RULE) memcpy(to + padded(r.channels) + padded(r.heads), x + r.beta_at, 4 * r.heads);
  });
  mix_rows(pass, s, r, index, me);
  if (r.kind != SHORT_CONV) {
    const int64_t blocks = padded(r.value_dim) / WIDE;
    phase(me, (int)(pass->batch * r.heads * blocks), [&](int piece) {
      const int64_t block = piece % blocks, head = piece / blocks % r.heads, b = piece / blocks / r.heads;
      float* copies = (float*)(s.of_thread + me.id * s.thread_bytes);
      if (r.kind == DELTA_RULE) walk_block<true>(pass, s, r, index, b, head, block, copies);
      else walk_block<false>(pass, s, r, index, b, head, block, copies);
    });
  }
  phase(me, (int)s.rows, [&](int row) {
    const int64_t b = s.place[row] / pass->nodes, n = s.place[row] % pass->nodes, column = pass->starts[b] + n;
    if (column >= pass->bases[b] + pass->steps[b] - (r.taps - 1))
      memcpy((float*)ring_row(pass, r, index, b, column), s.made + row * width, 4 * width);
    if (ends) return;
    float* y = s.attended.wide + row * s.attended.stride;
    const float* gate = s.qkv + (int64_t)row * r.width + r.gate_at;
    if (r.kind == SHORT_CONV) {
      const float* mixed = s.mixed + (s.num_waiting + row) * width;
      for (int64_t i = 0; i < outs; i++) y[i] = gate[i] * mixed[i];
    } else {
      const auto times_gate = [&] {
        for (int64_t i = 0; i < outs; i += LANES) storeu(y + i, load(y + i) * activate(load(gate + i), SILU));
      };
      if (r.gate_first) times_gate();
      for (int64_t i = 0; i < outs && r.norm.kind; i += r.norm_size) {
        Norm norm = r.norm;
        if (!r.norm_shared && norm.weight) norm.weight += i;
        norm_row(norm, y + i, y + i, r.norm_size);
      }
      if (!r.gate_first) times_gate();
    }
    finish_input(s.attended, row, outs);
  });
  if (!ends) add_product(s, r.out, l.q.data ? Norm{} : l.after_attention, s.attended, r.times, me);
}
