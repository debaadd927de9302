// Latent attention (MLA); included by pass.h.
//
// A column is what the keys and values of all heads are made of: a latent, and a rotated key. The matrix that makes a head's
// keys is applied to its query, and the one that makes its values to its mean of latents, so that no column is ever widened
// (DeepSeek-V2, arXiv 2405.04434). A row of `qkv` holds the widened queries of each head, the column, and what q makes.

static void rotate_row(const Pass* pass, const Scratch& s, const Layer& l, int64_t row, float* x) {
  const int64_t at = s.position[row] * l.rotary_dim;
  if (l.rotary_dim) rotate(x, pass->cos[l.rope] + at, pass->sin[l.rope] + at, l.rotary_dim, l.rotary_pairs);
}

// Writes the column of a row to the cache, and norms what the layer's q reads.
static void place_latent(const Model* model, const Pass* pass, const Scratch& s, const Layer& l, int index, int64_t row) {
  const Latent& m = *l.latent;
  const int64_t d = l.head_dim, b = s.place[row] / pass->nodes, n = s.place[row] % pass->nodes;
  float* column = s.qkv + row * qkv_width(l) + l.heads * d;
  norm_row(m.kv_norm, column, column, m.rank);
  rotate_row(pass, s, l, row, column + m.rank);
  const int64_t at = pass->slots[b] * pass->capacity + pass->starts[b] + pass->old + n;
  const int format = kv_format(model);
  store_row((char*)pass->keys[index] + at * row_bytes(d, format), column, d, format);
  if (!m.q_in.data) return;
  float* x = s.attended.wide + row * s.attended.stride;
  norm_row(m.q_norm, x, x, m.q_in.outs);
  finish_input(s.attended, row, m.q_in.outs);
}

// Takes a row's queries apart: what is rotated goes to its place behind the latent, the rest to the rows of each head.
static void split_queries(const Pass* pass, const Scratch& s, const Layer& l, bool pairs, int64_t row) {
  const Latent& m = *l.latent;
  float *to = s.qkv + row * qkv_width(l), *q = to + (l.heads + 1) * l.head_dim;
  for (int64_t h = 0; h < l.heads; h++, q += m.nope_dim + m.rope_dim, to += l.head_dim) {
    memcpy(s.by_head.wide + (h * s.rows + row) * s.by_head.stride, q, 4 * m.nope_dim);
    finish_input(s.by_head, h * s.rows + row, m.nope_dim);
    rotate_row(pass, s, l, row, q + m.nope_dim);
    memcpy(to + m.rank, q + m.nope_dim, 4 * m.rope_dim);
    if (pairs) narrow_row(to + m.rank, s.queries + (row * l.heads + h) * l.head_dim + m.rank, m.rope_dim);
  }
}

// Multiplies the rows of each head with its own matrix: finish(head, row, output, outputs, sums).
template <class F> INLINE void product_by_head(const Scratch& s, const Layer& l, const Matrix* matrices, Worker& me, F finish) {
  const int blocks = num_blocks(matrices[0]);
  phase(me, l.heads * blocks, [&](int piece) {
    const int64_t head = piece / blocks, out = piece % blocks * BLOCK;
    const Matrix& m = matrices[head];
    const Input in = from_row(s.by_head, head * s.rows);
    multiply_block(m, in, s.rows, piece % blocks, [&](int64_t first, int64_t count, float* sums) {
      for (int64_t r = 0; r < count; r++) finish(head, first + r, out, min_(BLOCK, m.outs - out), sums + r * BLOCK);
    });
  });
}

// ends: whether nothing is wanted but the columns.
static void run_latent(const Model* model, const Pass* pass, const Scratch& s, const Layer& l, int index, bool ends,
                       Worker& me) {
  const Latent& m = *l.latent;
  const int64_t d = l.head_dim, width = qkv_width(l), before = l.heads * d;
  const bool pairs = HAS_DP && kv_format(model) == BF16;
  const Matrix* inputs[] = {&m.kv, m.q_in.data ? &m.q_in : &l.q};
  product(me, s, inputs, ends ? 1 : 2, s.normed, s.rows,
          [&](int64_t first, int64_t count, int64_t out, int64_t outs, float* sums) {
            for (int64_t r = 0; r < count; r++) {
              float *column = s.qkv + (first + r) * width + before, *in = s.attended.wide + (first + r) * s.attended.stride;
              memcpy(m.q_in.data && out >= d ? in + out - d : column + out, sums + r * BLOCK, 4 * outs);
            }
          });
  phase(me, (int)s.rows, [&](int row) { place_latent(model, pass, s, l, index, row); });
  if (ends) return;
  const Matrix* q[] = {&l.q};
  if (m.q_in.data)
    product(me, s, q, 1, s.attended, s.rows, [&](int64_t first, int64_t count, int64_t out, int64_t outs, float* sums) {
      for (int64_t r = 0; r < count; r++) memcpy(s.qkv + (first + r) * width + before + d + out, sums + r * BLOCK, 4 * outs);
    });
  phase(me, (int)s.rows, [&](int row) { split_queries(pass, s, l, pairs, row); });
  product_by_head(s, l, m.k, me, [&](int64_t head, int64_t row, int64_t out, int64_t outs, const float* sums) {
    memcpy(s.qkv + row * width + head * d + out, sums, 4 * outs);
    if (pairs) narrow_row(sums, s.queries + (row * l.heads + head) * d + out, outs);
  });
  attend_layer(model, pass, s, l, index, me);
  product_by_head(s, l, m.v, me, [&](int64_t head, int64_t row, int64_t out, int64_t outs, const float* sums) {
    memcpy(s.attended.wide + row * s.attended.stride + head * m.value_dim + out, sums, 4 * outs);
  });
  phase(me, (int)s.rows, [&](int row) { finish_input(s.attended, row, l.heads * m.value_dim); });
}
