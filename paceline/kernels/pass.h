// The phases of a pass; included by body.cpp.

struct Visit {  // of a tree in the walk of a recurrent layer
  int32_t place, below, taken, level, heir, node;  // below: the node and its descendants; node: which comes at this place
};

struct Corrected {  // the rows that take one correction: begin .. end of `rows_by_correction`
  int64_t begin, end;
  const Matrix* factors;  // a and b of each place
};

struct Scratch {
  int64_t rows, hidden, width;  // width: columns that scores have room for
  Reach* reach;                 // of every node [batch, old + nodes]
  Reach* causal;                // ... in layers without a window
  int64_t* place;               // [rows], of each row in [batch, nodes]
  int64_t* begins;              // [batch], the first row of each tree, and their end
  int64_t* head;                // [rows], the place of each row among those whose logits are wanted, or -1
  int64_t* to_logits;           // ... and of each of these in [batch, head_rows]
  int64_t num_heads;
  int64_t* position;            // [rows]
  int32_t* paths;
  int32_t* takes;               // [rows], which correction each row takes, from 1 on; 0: none
  int64_t* rows_by_correction;  // the rows that take one
  Corrected* corrected;         // [num_corrections]
  int64_t num_corrected, num_corrections;  // rows that take one; 0: nothing is corrected
  float* x;                     // [rows, hidden], the residual stream
  float* y;                     // [rows, hidden], what a norm behind a product reads
  float* ple;                   // [rows, num_layers ple_size], per-layer inputs
  float* qkv;                   // [rows, (heads + 2 kv_heads) head_dim], see also latent.h
  half_t* queries;              // [rows, heads head_dim] in bfloat16
  Input by_head;                // [heads rows] of latent attention: what k of each head reads, then what v does
  float* gates;                 // [rows, heads head_dim] of gated attention
  Visit* visits;                // [rows]
  int64_t* waiting;             // [batch], the first of the rows before this pass that states do not hold yet
  int64_t num_waiting;
  // Of a layer with experts. Pairs are a row and an expert that it chose; those of an expert lie in a group.
  float *scores, *weights, *shared;  // [rows, count], [rows, chosen], [rows]
  int32_t *chosen, *expert_of;       // [rows, chosen]; [count], of each group
  int64_t *first_of, *row_of, *place_of;  // [count + 1], the first pair of each group; the row of each pair; [rows, chosen]
  int32_t* num_groups;               // [num_layers]
  float* outputs;                    // [pairs, hidden]
  Input routed, inners;              // of pairs: what experts read, and what their second matrix reads
  float *made, *mixed;          // of recurrent layers, [rows, ring_width] and [waiting and rows, ring_width]
  Input normed, attended, mlp;
  Input inner;                  // [inputs][rows, INNER], the rows times the first factors of corrections
  char* of_thread;              // scores, keys; a row of a table
  int64_t thread_bytes;
};
constexpr int64_t INNER = 256;  // the largest rank of a correction

constexpr int32_t MOST_EXPERTS = 1024;

struct Sizes {
  int64_t normed, attended, mlp, qkv, queries, head_dim, gates, ring, state;
  int64_t latent_heads, by_head;
  int64_t experts, chosen, inner;
  int64_t together;  // layers that read the same rows
  int by_32, by_256;  // parts of rows as integers
};

static void note_format(Sizes& s, const Matrix& m) {
  if (!m.data) return;
  if (!is_block_format(m.format)) return;
  int& parts = block_format(m.format).each == 256 ? s.by_256 : s.by_32;
  parts = (int)max_(parts, m.input_bits / 8);
}

constexpr int WIDE = 16;  // columns of a block of a recurrent state

INLINE int64_t padded(int64_t x) { return round_up(x, WIDE); }

// The numbers of a row of a recurrent layer in its ring, and after the convolution: channels, two for each head.
INLINE int64_t ring_width(const Recurrent& r) { return padded(r.channels) + 2 * padded(r.heads); }

INLINE int64_t qkv_width(const Layer& l) {
  if (l.latent) return (l.heads + 1) * (int64_t)l.head_dim + l.heads * (l.latent->nope_dim + l.latent->rope_dim);
  return (int64_t)(l.heads * (l.is_gated ? 2 : 1) + 2 * l.kv_heads) * l.head_dim;
}

static Sizes sizes_of(const Model* model) {
  Sizes s = {};
  s.normed = model->hidden;
  s.together = 3;
  for (int i = 0; i < model->num_layers; i++) {
    const Layer& l = model->layers[i];
    s.normed = max_(s.normed, l.q.ins);
    s.attended = max_(s.attended, (int64_t)l.heads * (l.latent ? l.latent->value_dim : l.head_dim));
    s.queries = max_(s.queries, (int64_t)l.heads * l.head_dim);
    s.mlp = max_(s.mlp, max_(l.down.ins, l.ple_out.ins));
    s.qkv = max_(s.qkv, qkv_width(l));
    if (l.is_gated) s.gates = max_(s.gates, (int64_t)l.heads * l.head_dim);
    if (l.latent) {
      s.attended = max_(s.attended, l.q.ins);
      s.latent_heads = max_(s.latent_heads, l.heads);
      s.by_head = max_(s.by_head, max_(l.latent->rank, l.latent->nope_dim));
      note_format(s, l.latent->q_in);
      note_format(s, l.latent->kv);
    }
    if (l.recurrent) {
      const Recurrent& r = *l.recurrent;
      s.normed = max_(s.normed, r.inputs[0].ins);
      s.together = max_(s.together, r.num_inputs);
      s.attended = max_(s.attended, r.out.ins);
      s.qkv = max_(s.qkv, r.width + LANES);
      s.ring = max_(s.ring, ring_width(r));
      s.state = max_(s.state, (int64_t)r.key_dim * WIDE);
      for (int k = 0; k < r.num_inputs; k++) note_format(s, r.inputs[k]);
      note_format(s, r.out);
    }
    if (l.experts) {
      const Experts& e = *l.experts;
      s.experts = max_(s.experts, e.count);
      s.chosen = max_(s.chosen, e.chosen);
      s.inner = max_(s.inner, e.down[0].ins);
      if (e.gate) note_format(s, *e.gate);
      note_format(s, *e.up);
      note_format(s, *e.down);
      note_format(s, e.router);
      note_format(s, e.shared_gate);
    }
    s.head_dim = max_(s.head_dim, l.head_dim);
    const Matrix* all[] = {&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down, &l.ple_gate, &l.ple_out};
    for (const Matrix* m : all) note_format(s, *m);
  }
  s.normed = max_(s.normed, model->project.ins);
  note_format(s, model->head);
  note_format(s, model->project);
  note_format(s, model->ple_project);
  return s;
}

struct Arena {  // allocates from one buffer; without a buffer it only counts bytes
  char* at;
  int64_t used;
  template <class T> T* take(int64_t count) {
    T* piece = (T*)(at ? at + used : nullptr);
    used += round_up(count * (int64_t)sizeof(T), LINE);
    return piece;
  }
};

static Bytes allocate_bytes(Arena& arena, int64_t rows, int parts, int64_t size, int64_t each) {
  const int64_t stride = round_up(size, each), count = rows * parts * stride;
  return {arena.take<int8_t>(count), arena.take<float>(count / each), arena.take<int16_t>(count / 32),
          arena.take<int16_t>(count / 16), stride, parts};
}

static Input allocate_input(Arena& arena, int64_t rows, int64_t size, const Sizes& s) {
  Input in = {};
  in.stride = round_up(size, 32);
  in.wide = arena.take<float>(rows * in.stride);
  if (HAS_DP || HAS_TILES) in.narrow = arena.take<half_t>(rows * in.stride + 32);
  if (s.by_32) in.by_32 = allocate_bytes(arena, rows, s.by_32, size, 32);
  if (s.by_256) in.by_256 = allocate_bytes(arena, rows, s.by_256, size, 256);
  return in;
}

// The most columns that rows with spans list.
static int64_t listed(const Pass* pass, int64_t nodes) {
  int64_t all = 0;
  for (int64_t i = 0; pass->spans && i < pass->batch * pass->num_spans; i++)
    all += nodes * (pass->spans[2 * i + 1] - pass->spans[2 * i]);
  return pass->spans ? all + pass->batch * nodes * nodes : 0;
}

static int64_t lay_out(const Model* model, const Pass* pass, int threads, Scratch* s, char* memory) {
  const Sizes sizes = sizes_of(model);
  const int64_t nodes = pass->old + pass->nodes;
  int64_t most = 0, rows = 0;
  for (int64_t b = 0; b < pass->batch; b++) {
    most = max_(most, pass->starts[b]);
    rows += pass->sizes ? pass->sizes[b] : pass->nodes;
  }
  Arena arena = {memory, round_up(sizeof(Scratch), LINE)};
  s->rows = rows;
  s->hidden = model->hidden;
  s->width = round_up(most + nodes + 1, COLUMNS) + COLUMNS;
  if (pass->block_ends)
    for (int64_t t = 0; t < pass->batch * pass->nodes; t++)
      s->width = max_(s->width, round_up(pass->block_ends[t], COLUMNS) + COLUMNS);
  s->reach = arena.take<Reach>(pass->batch * nodes);
  s->causal = pass->windowed_blocks || pass->spans ? arena.take<Reach>(pass->batch * nodes) : s->reach;
  s->place = arena.take<int64_t>(rows);
  s->begins = arena.take<int64_t>(pass->batch + 1);
  s->head = arena.take<int64_t>(rows);
  s->to_logits = arena.take<int64_t>(rows);
  s->position = arena.take<int64_t>(rows);
  s->paths = arena.take<int32_t>((pass->parents ? pass->batch * nodes * nodes : 0) + listed(pass, nodes));
  s->takes = arena.take<int32_t>(rows);
  s->rows_by_correction = arena.take<int64_t>(rows);
  s->corrected = arena.take<Corrected>(pass->num_corrections);
  s->x = arena.take<float>(rows * model->hidden);
  s->y = arena.take<float>(rows * model->hidden);
  s->ple = arena.take<float>(rows * model->ple_project.outs + BLOCK);
  s->qkv = arena.take<float>(rows * sizes.qkv);
  s->queries = arena.take<half_t>(rows * sizes.queries + 32);
  s->by_head = allocate_input(arena, rows * sizes.latent_heads, sizes.by_head, Sizes{});
  s->normed = allocate_input(arena, rows, sizes.normed, sizes);
  s->attended = allocate_input(arena, rows, sizes.attended, sizes);
  s->mlp = allocate_input(arena, rows, sizes.mlp, sizes);
  s->inner = allocate_input(arena, pass->corrected ? sizes.together * rows : 0, INNER, Sizes{});
  s->gates = arena.take<float>(rows * sizes.gates);
  const int64_t pairs = rows * sizes.chosen;
  s->scores = arena.take<float>(rows * sizes.experts);
  s->weights = arena.take<float>(pairs);
  s->shared = arena.take<float>(pairs ? rows : 0);
  s->chosen = arena.take<int32_t>(pairs);
  s->expert_of = arena.take<int32_t>(sizes.experts);
  s->first_of = arena.take<int64_t>(sizes.experts + 1);
  s->row_of = arena.take<int64_t>(pairs);
  s->place_of = arena.take<int64_t>(pairs);
  s->num_groups = arena.take<int32_t>(model->num_layers);
  s->outputs = arena.take<float>(pairs * model->hidden);
  s->routed = allocate_input(arena, rows > 1 ? pairs : 0, sizes.normed, sizes);
  s->inners = allocate_input(arena, pairs, sizes.inner, sizes);
  s->visits = nullptr;
  s->num_waiting = 0;
  if (sizes.ring) {
    int64_t waiting = 0;
    for (int64_t b = 0; b < pass->batch; b++) waiting += pass->starts[b] - pass->bases[b];
    s->visits = arena.take<Visit>(rows);
    s->waiting = arena.take<int64_t>(pass->batch);
    s->made = arena.take<float>(rows * sizes.ring);
    s->mixed = arena.take<float>((waiting + rows) * sizes.ring + WIDE);
  }
  int64_t copies = 1;  // of a block of a state
  while ((int64_t)1 << copies <= pass->nodes) copies++;
  s->thread_bytes = round_up(4 * QUERIES * s->width, LINE) + round_up(4 * COLUMNS * sizes.head_dim, LINE);
  s->thread_bytes = max_(s->thread_bytes, round_up(4 * copies * sizes.state, LINE));
  s->thread_bytes = max_(s->thread_bytes, round_up(4 * (int64_t)model->ple_project.outs, LINE));
  s->of_thread = arena.take<char>(threads * s->thread_bytes);
  return arena.used;
}

static void plan_walks(const Pass* pass, Scratch& s);

// Orders the rows that take corrections by these.
static void plan_corrections(const Pass* pass, Scratch& s) {
  s.num_corrected = 0;
  s.num_corrections = pass->corrected ? pass->num_corrections : 0;
  for (int64_t which = 0; which < s.num_corrections; which++) {
    Corrected& c = s.corrected[which];
    c = {s.num_corrected, 0, pass->corrections[which]};
    for (int64_t row = 0; row < s.rows; row++)
      if (s.takes[row] == which + 1) s.rows_by_correction[s.num_corrected++] = row;
    c.end = s.num_corrected;
  }
}

int64_t scratch_bytes(const Model* model, const Pass* pass, int threads) {
  Scratch s;
  return lay_out(model, pass, threads, &s, nullptr);
}

// At least as many as a pass goes through.
int num_phases(const Model* model) {
  int phases = 12;
  for (int i = 0; i < model->num_layers; i++) {
    const Layer& l = model->layers[i];
    phases += 16 + (l.latent ? 8 : 0) + (l.recurrent ? 12 : 0) + (l.experts ? 16 : 0) + (l.ple_gate.data ? 8 : 0);
  }
  return phases;
}

// What nodes read that see the spans of tree b alone: these columns, then their own path, all but a first span listed.
static void list_spans(const Pass* pass, Scratch& s, int64_t b, int64_t size, int64_t* used) {
  const int64_t nodes = pass->old + pass->nodes, *spans = pass->spans + 2 * b * pass->num_spans;
  Reach *whole = s.reach + b * nodes, *reach = s.causal + b * nodes;
  for (int64_t n = 0; n < size; n++) {
    const int64_t parent = pass->parents ? pass->parents[b * nodes + n] : n - 1;
    Reach& r = reach[n] = whole[n];
    r.path = *used;
    r.straight = spans[0] ? 0 : (int32_t)spans[1];
    if (parent >= 0)
      for (int64_t i = 0; i < reach[parent].count - r.straight; i++) s.paths[(*used)++] = s.paths[reach[parent].path + i];
    else
      for (int64_t i = spans[0] ? 0 : 1; i < pass->num_spans; i++)
        for (int64_t column = spans[2 * i]; column < spans[2 * i + 1]; column++) s.paths[(*used)++] = (int32_t)column;
    s.paths[(*used)++] = (int32_t)(pass->starts[b] + n);
    r.count = r.straight + (int32_t)(*used - r.path);
  }
}

// What each row reads. A row's columns are in order as far as its ancestors lie at the depth that is their index, as in
// a chain; from there on they are listed.
void prepare(const Model* model, const Pass* pass, void* memory, int threads) {
  Scratch& s = *(Scratch*)memory;
  lay_out(model, pass, threads, &s, (char*)memory);
  int64_t used = 0, row = 0;
  s.num_heads = 0;
  const int64_t nodes = pass->old + pass->nodes;
  for (int64_t b = 0; b < pass->batch; b++) {
    const int64_t start = pass->starts[b], size = pass->old + (pass->sizes ? pass->sizes[b] : pass->nodes);
    Reach* reach = s.reach + b * nodes;
    s.begins[b] = row;
    for (int64_t n = 0; n < size; n++) {
      const int64_t parent = pass->parents ? pass->parents[b * nodes + n] : n - 1;
      Reach& r = reach[n];
      r.own = parent < 0 ? (int32_t)start + 1 : reach[parent].own + 1;
      r.straight = parent < 0 ? (int32_t)start : reach[parent].straight;
      r.path = used;
      if (r.straight == r.own - 1 && start + n == r.straight) {
        r.straight = r.own;
      } else {  // listed: the parent's, then its own
        for (int64_t i = 0; parent >= 0 && i < reach[parent].own - reach[parent].straight; i++)
          s.paths[used++] = s.paths[reach[parent].path + i];
        s.paths[used++] = (int32_t)(start + n);
      }
      r.count = r.own;
      if (n < pass->old) continue;
      const int64_t place = b * pass->nodes + n - pass->old;
      r.first = pass->block_firsts ? pass->block_firsts[place] : INT32_MAX;
      if (pass->windowed_blocks) {
        s.causal[b * nodes + n] = r;
        s.causal[b * nodes + n].straight = min_(r.straight, r.count);
      }
      if (pass->block_ends && pass->block_ends[place] > r.count) r.count = r.straight = pass->block_ends[place];
      int64_t position = r.own - 1;
      if (pass->max_position >= 0) position = min_(position, pass->max_position);
      s.position[row] = pass->max_position < 0 ? place : position + (pass->offsets ? pass->offsets[b] : 0);
      s.takes[row] = pass->corrected ? pass->corrected[place] : 0;
      const int64_t wanted = pass->logits ? n - (nodes - pass->head_rows) : -1;
      s.head[row] = wanted < 0 ? -1 : s.num_heads;
      if (wanted >= 0) s.to_logits[s.num_heads++] = b * pass->head_rows + wanted;
      s.place[row++] = place;
    }
    if (pass->spans) list_spans(pass, s, b, size, &used);
  }
  s.begins[pass->batch] = row;
  plan_corrections(pass, s);
  if (s.visits) plan_walks(pass, s);
}

// The places behind the last row of a tree, as far as the largest tree reaches; 0 for all other rows.
static int64_t places_behind(const Pass* pass, const Scratch& s, int64_t row) {
  const int64_t b = s.place[row] / pass->nodes;
  return row + 1 == s.begins[b + 1] ? (b + 1) * pass->nodes - s.place[row] - 1 : 0;
}

// Stores hidden state `index` of a row in the column of its key, in the cache's format.
static void keep_state(const Model* model, const Pass* pass, const Scratch& s, int index, int64_t row, const float* x) {
  if (!pass->states || !pass->states[index]) return;
  const int64_t b = s.place[row] / pass->nodes, n = s.place[row] % pass->nodes;
  const int64_t at = pass->slots[b] * pass->state_columns + pass->starts[b] + pass->old + n;
  char* to = (char*)pass->states[index] + at * pass->state_row * element_bytes(model->cache_format);
  store_row(to, x, s.hidden, model->cache_format);
}

// The factors a and b of a correction for a layer, or null.
INLINE const Matrix* factors_of(const Matrix& m, const Corrected& c) {
  const Matrix* a = m.place ? c.factors + 2 * m.place : nullptr;
  return a && a->data ? a : nullptr;
}

// Rows times the first factors of their corrections of layers that read the same rows, a few rows at a time.
static void correct_inner(const Scratch& s, const Matrix* const* layers, int count, const Input& in, Worker& me) {
  if (!s.num_corrected) return;
  const auto blocks_of = [&](int64_t which, int layer) -> int64_t {
    const Matrix* a = factors_of(*layers[layer], s.corrected[which]);
    return a ? num_blocks(*a) : 0;
  };
  int64_t work = 0;
  for (int64_t which = 0; which < s.num_corrections; which++)
    for (int i = 0; i < count; i++) work += blocks_of(which, i) * (s.corrected[which].end - s.corrected[which].begin);
  if (!work) return;
  const int64_t each = min_(GROUP, (work + me.team->threads - 1) / me.team->threads);
  const auto parts_of = [&](int64_t which) { return (s.corrected[which].end - s.corrected[which].begin + each - 1) / each; };
  int64_t pieces = 0;
  for (int64_t which = 0; which < s.num_corrections; which++)
    for (int i = 0; i < count; i++) pieces += blocks_of(which, i) * parts_of(which);
  phase(me, (int)pieces, [&](int piece) {
    int64_t which = 0;
    int layer = 0;
    for (; piece >= blocks_of(which, layer) * parts_of(which);) {
      piece -= (int)(blocks_of(which, layer) * parts_of(which));
      if (++layer == count) layer = 0, which++;
    }
    const Corrected& c = s.corrected[which];
    const Matrix& a = *factors_of(*layers[layer], c);
    const int64_t parts = parts_of(which), block = piece / parts, rows = c.end - c.begin;
    const int64_t end = c.begin + rows * (piece % parts + 1) / parts;
    float out[GROUP * BLOCK];
    for (int64_t i = c.begin + rows * (piece % parts) / parts; i < end;) {  // rows that follow one another share a tile
      const int64_t row = s.rows_by_correction[i];
      int run = 1;
      while (i + run < end && s.rows_by_correction[i + run] == row + run) run++;
      multiply_rows(a, in, row, run, block, out);
      for (int r = 0; r < run; r++) {
        const int64_t at = (layer * s.rows + row + r) * INNER + block * BLOCK;
        memcpy(s.inner.wide + at, out + r * BLOCK, 4 * BLOCK);
        if (s.inner.narrow) narrow_row(out + r * BLOCK, s.inner.narrow + at, BLOCK);
      }
      i += run;
    }
  });
}

// ... and times the second factors, added to the sums of a block in rows [first, first + count).
static void correct_block(const Scratch& s, const Matrix& m, int which, int64_t block, int64_t first, int64_t count,
                          float* sums) {
  float out[GROUP * BLOCK];
  for (int64_t r = 0; r < count;) {
    const int32_t takes = s.takes[first + r];
    int run = 1;
    while (r + run < count && s.takes[first + r + run] == takes) run++;
    if (const Matrix* factors = takes ? factors_of(m, s.corrected[takes - 1]) : nullptr) {
      multiply_rows(factors[1], s.inner, which * s.rows + first + r, run, block, out);
      for (int i = 0; i < run * BLOCK; i += LANES)
        storeu(sums + r * BLOCK + i, load(sums + r * BLOCK + i) + load(out + i));
    }
    r += run;
  }
}

INLINE vf activate(vf x, int kind) {
  if (kind == SILU) return x / (exp_(-x) + 1.0f);
  if (kind == RELU_SQUARED) return x > 0.0f ? x * x : 0.0f * x;
  const vf inner = 0.7978845608028654f * fma(x * x * x, set(0.044715f), x);
  return 0.5f * x * (1.0f + tanh_(inner));
}

// Runs f(first row, rows, sums) over every block of a layer, with biases and corrections.
template <class F>
INLINE void product(Worker& me, const Scratch& s, const Matrix* const* layers, int count, const Input& in, int64_t rows,
                    F finish) {
  const bool corrects = s.num_corrected > 0;
  correct_inner(s, layers, count, in, me);
  int total = 0;
  for (int i = 0; i < count; i++) total += num_blocks(*layers[i]);
  phase(me, total, [&](int piece) {
    int which = 0;
    int64_t before = 0;
    while (piece >= num_blocks(*layers[which])) {
      piece -= num_blocks(*layers[which]);
      before += layers[which++]->outs;
    }
    const Matrix& m = *layers[which];
    const int64_t outs = min_(BLOCK, m.outs - (int64_t)piece * BLOCK);
    multiply_block(m, in, rows, piece, [&](int64_t first, int64_t number, float* sums) {
      if (corrects && m.place) correct_block(s, m, which, piece, first, number, sums);
      finish(first, number, before + (int64_t)piece * BLOCK, outs, sums);
    });
  });
}

static void load_row(float* to, const void* x, int64_t size, int format) {
  if (format == F32) memcpy(to, x, 4 * size);
  else if (format == BF16)
    for (int64_t i = 0; i < size; i++) to[i] = from_bf16(((const half_t*)x)[i]);
  else
    for (int64_t i = 0; i < size; i++) to[i] = from_half(((const half_t*)x)[i]);
}

// to = row `id` of a table [.., size] times `scale`.
static void look_up(const void* table, int format, int64_t size, int64_t id, float scale, float* to) {
  if (is_block_format(format)) float_row(format, (const uint8_t*)table, size, id, to);
  else load_row(to, (const char*)table + id * size * element_bytes(format), size, format);
  for (int64_t i = 0; i < size; i++) to[i] *= scale;
}

static void embed(const Model* model, const Pass* pass, int64_t place, float* x) {
  look_up(model->embeddings, model->embedding_format, model->hidden, pass->ids[place], model->embedding_scale, x);
}

// Per-layer inputs: a norm of a projection of what the first layer reads, plus a row of a table.
static void make_ple(const Model* model, const Pass* pass, const Scratch& s, Worker& me) {
  const int64_t outs = model->ple_project.outs, size = model->ple_size;
  phase(me, (int)s.rows, [&](int row) {
    float* to = s.normed.wide + row * s.normed.stride;
    if (pass->rows) memcpy(to, pass->rows + s.place[row] * s.hidden, 4 * s.hidden);
    else embed(model, pass, s.place[row], to);
    finish_input(s.normed, row, s.hidden);
  });
  const Matrix* one[] = {&model->ple_project};
  product(me, s, one, 1, s.normed, s.rows, [&](int64_t first, int64_t count, int64_t out, int64_t width, float* sums) {
    for (int64_t r = 0; r < count; r++) memcpy(s.ple + (first + r) * outs + out, sums + r * BLOCK, 4 * width);
  });
  phase(me, (int)s.rows, [&](int row) {
    float *to = s.ple + row * outs, *of_token = (float*)(s.of_thread + me.id * s.thread_bytes);
    look_up(model->ple_table, model->ple_format, outs, pass->ids[s.place[row]], model->ple_scale, of_token);
    for (int64_t i = 0; i < outs; i += size) norm_row(model->ple_norm, to + i, to + i, size);
    for (int64_t i = 0; i < outs; i++) to[i] += of_token[i];
  });
}

INLINE int kv_format(const Model* model) { return model->kv_format ? model->kv_format : model->cache_format; }

// Normalises q and k, applies the rotary embedding, and writes k and v to the cache.
static void place_row(const Model* model, const Pass* pass, const Scratch& s, const Layer& l, int index, int64_t row) {
  const int64_t d = l.head_dim, b = s.place[row] / pass->nodes, n = s.place[row] % pass->nodes;
  float* q = s.qkv + row * qkv_width(l);
  float* k = q + l.heads * d;
  if (l.is_gated) {  // [queries, gate] of each head
    k += l.heads * d;
    float* gates = s.gates + row * l.heads * d;
    for (int h = 0; h < l.heads; h++) {
      memcpy(gates + h * d, q + (2 * h + 1) * d, 4 * d);
      if (h) memcpy(q + h * d, q + 2 * h * d, 4 * d);
    }
  }
  float* v = k + l.kv_heads * d;
  const int64_t own = l.shared_kv ? 0 : l.kv_heads;
  if (l.k.data && !l.v.data) memcpy(v, k, 4 * own * d);
  if (l.norm_whole) {
    norm_row(l.q_norm, q, q, l.heads * d);
    norm_row(l.k_norm, k, k, l.kv_heads * d);
  }
  const float* cos = l.rotary_dim ? pass->cos[l.rope] + s.position[row] * l.rotary_dim : nullptr;
  const float* sin = l.rotary_dim ? pass->sin[l.rope] + s.position[row] * l.rotary_dim : nullptr;
  for (int h = 0; h < l.heads + own; h++) {
    float* x = h < l.heads ? q + h * d : k + (h - l.heads) * d;
    if (!l.norm_whole) norm_row(h < l.heads ? l.q_norm : l.k_norm, x, x, d);
    if (l.rotary_dim) rotate(x, cos, sin, l.rotary_dim, l.rotary_pairs);
  }
  if (HAS_DP && kv_format(model) == BF16) narrow_row(q, s.queries + row * l.heads * d, l.heads * d);
  const int format = kv_format(model);
  const int64_t size = row_bytes(d, format), column = pass->starts[b] + pass->old + n;
  for (int h = 0; h < own; h++) {
    const int64_t at = ((pass->slots[b] * own + h) * pass->capacity + column) * size;
    norm_row(l.v_norm, v + h * d, v + h * d, d);
    store_row((char*)pass->keys[index] + at, k + h * d, d, format);
    store_row((char*)pass->values[index] + at, v + h * d, d, format);
  }
}

static void attend_layer(const Model* model, const Pass* pass, const Scratch& s, const Layer& l, int index, Worker& me) {
  const int64_t d = l.head_dim, groups = l.heads / l.kv_heads, sequences = pass->batch * l.kv_heads;
  const int64_t threads = me.team->threads, width = qkv_width(l), value_dim = l.latent ? l.latent->rank : d;
  const Input& out = l.latent ? s.by_head : s.attended;
  const int format = kv_format(model);
  int64_t parts = (groups + QUERIES - 1) / QUERIES;  // of the queries of one row and key head
  if (sequences * pass->nodes < threads) parts = max_(parts, min_(groups, threads / (sequences * pass->nodes)));
  const int64_t each = (groups + parts - 1) / parts;
  const int64_t wanted = pass->nodes * sequences * parts / (4 * threads);
  const int64_t nodes = max_(1, min_(QUERIES / each, wanted)), chunks = (pass->nodes + nodes - 1) / nodes;
  phase(me, (int)(sequences * chunks * parts), [&](int piece) {
    const int64_t part = piece % parts, chunk = piece / parts % chunks, sequence = piece / parts / chunks;
    const int64_t b = sequence / l.kv_heads, h = sequence % l.kv_heads;
    const int64_t size = row_bytes(d, format);
    const int64_t at = (pass->slots[b] * l.kv_heads + h) * pass->capacity * size;
    const Slot slot = {(char*)pass->keys[index] + at, (char*)(l.latent ? pass->keys : pass->values)[index] + at, size, s.paths};
    const Reach* reach[QUERIES];
    const void* queries[QUERIES];
    float *to[QUERIES], sinks[QUERIES];
    int count = 0;
    const bool pairs = HAS_DP && format == BF16;
    for (int64_t n = chunk * nodes; n < min_(s.begins[b + 1] - s.begins[b], (chunk + 1) * nodes); n++)
      for (int64_t g = part * each; g < min_(groups, (part + 1) * each); g++) {
        const int64_t row = s.begins[b] + n, head = h * groups + g;
        reach[count] = (l.window ? s.reach : s.causal) + b * (pass->old + pass->nodes) + pass->old + n;
        queries[count] = pairs ? (const void*)(s.queries + row * l.heads * d + head * d)
                               : (const void*)(s.qkv + row * width + head * d);
        sinks[count] = l.sinks ? l.sinks[head] : -__builtin_inff();
        to[count++] = out.wide + (l.latent ? (head * s.rows + row) * out.stride : row * out.stride + head * d);
      }
    if (!count) return;
    float* scores = (float*)(s.of_thread + me.id * s.thread_bytes);
    uint32_t* keys = (uint32_t*)((char*)scores + round_up(4 * QUERIES * s.width, LINE));
    const auto run = [&](auto attend) {
      attend(slot, reach, queries, count, d, value_dim, l.window, l.scale, l.softcap, sinks, scores, s.width, keys, to);
    };
    if (pairs) run(attend<true, BF16>);
    else if (format == BF16) run(attend<false, BF16>);
    else if (format == F16) run(attend<false, F16>);
    else if (format == INT8) run(attend<false, INT8>);
    else if (format == FP8) run(attend<false, FP8>);
    else run(attend<false, F32>);
    if (l.is_gated)
      for (int q = 0; q < count; q++) {
        const int64_t row = (to[q] - s.attended.wide) / s.attended.stride;
        const float* gate = s.gates + row * l.heads * d + (to[q] - s.attended.wide - row * s.attended.stride);
        int64_t i = 0;
        for (; i + LANES <= d; i += LANES) storeu(to[q] + i, load(to[q] + i) / (exp_(-load(gate + i)) + 1.0f));
        for (; i < d; i++) to[q][i] /= expf(-gate[i]) + 1.0f;
      }
    if (l.latent)
      for (int q = 0; q < count; q++) finish_input(out, (to[q] - out.wide) / out.stride, value_dim);
    else if (s.attended.narrow && !s.attended.waits_for_rows())
      for (int q = 0; q < count; q++) narrow_row(to[q], s.attended.narrow + (to[q] - s.attended.wide), d);
  });
  if (!l.latent && (s.attended.waits_for_rows() || l.heads * d % 32))
    phase(me, (int)s.rows, [&](int row) { finish_input(s.attended, row, l.heads * d); });
}

// x += times * sums, or times * norm(sums) where a norm follows the product; then x *= scalar.
static void add_product(const Scratch& s, const Matrix& m, const Norm& norm, const Input& in, float times, Worker& me,
                        float scalar = 1) {
  const Matrix* one[] = {&m};
  const bool direct = norm.kind == NO_NORM;
  float* to = direct ? s.x : s.y;
  product(me, s, one, 1, in, s.rows, [&](int64_t first, int64_t count, int64_t out, int64_t outs, float* sums) {
    for (int64_t r = 0; r < count; r++) {
      float* x = to + (first + r) * s.hidden + out;
      for (int64_t i = 0; i < outs; i++)
        x[i] = direct ? (x[i] + times * sums[r * BLOCK + i]) * scalar : sums[r * BLOCK + i];
    }
  });
  if (!direct)
    phase(me, (int)s.rows, [&](int row) {
      float *y = s.y + row * s.hidden, *x = s.x + row * s.hidden;
      norm_row(norm, y, y, s.hidden);
      for (int64_t i = 0; i < s.hidden; i++) x[i] = (x[i] + times * y[i]) * scalar;
    });
}

// Of a layer's own input for each row: x += norm(out(activation(gate(x)) * input)); then x *= scalar.
static void add_ple(const Model* model, const Scratch& s, const Layer& l, int index, Worker& me, float scalar) {
  const int64_t size = model->ple_size, outs = model->ple_project.outs;
  phase(me, (int)s.rows, [&](int row) {
    memcpy(s.normed.wide + row * s.normed.stride, s.x + row * s.hidden, 4 * s.hidden);
    finish_input(s.normed, row, s.hidden);
  });
  const Matrix* one[] = {&l.ple_gate};
  product(me, s, one, 1, s.normed, s.rows, [&](int64_t first, int64_t count, int64_t out, int64_t, float* sums) {
    for (int64_t r = 0; r < count; r++) {
      const float* input = s.ple + (first + r) * outs + index * size + out;
      float* to = s.mlp.wide + (first + r) * s.mlp.stride + out;
      for (int k = 0; k < BLOCK; k += LANES) storeu(to + k, activate(load(sums + r * BLOCK + k), l.activation) * load(input + k));
    }
  });
  phase(me, (int)s.rows, [&](int row) { finish_input(s.mlp, row, size); });
  add_product(s, l.ple_out, l.after_ple, s.mlp, 1, me, scalar);
}

#include "experts.h"
#include "latent.h"
#include "recurrent.h"

// Whether the pass computes anything after the keys and values of the last layer.
static bool wants_end(const Model* model, const Pass* pass) {
  return pass->logits || pass->last_hidden || (pass->states && pass->states[model->num_layers]);
}

// The last layer that the pass needs: one whose keys and values are its own, or whose input is kept.
static int last_layer(const Model* model, const Pass* pass) {
  int last = model->num_layers - 1;
  if (!wants_end(model, pass))
    while (last > 0 && model->layers[last].shared_kv && !(pass->states && pass->states[last])) last--;
  return last;
}

// Makes the rows that the first layer reads from the pass's inputs.
static void project(const Model* model, const Pass* pass, const Scratch& s, Worker& me) {
  const int64_t embedded = model->projects_pairs ? model->hidden : 0, size = model->project.ins - embedded;
  phase(me, (int)s.rows, [&](int row) {
    const int64_t place = s.place[row];
    float *to = s.normed.wide + row * s.normed.stride, *state = to + embedded;
    if (embedded) {
      embed(model, pass, place, to);
      norm_row(model->embedding_norm, to, to, embedded);
    }
    load_row(state, (const char*)pass->inputs + place * size * element_bytes((int)pass->input_format), size,
             (int)pass->input_format);
    norm_row(model->state_norm, state, state, size);
    finish_input(s.normed, row, model->project.ins);
  });
  const Matrix* one[] = {&model->project};
  product(me, s, one, 1, s.normed, s.rows, [&](int64_t first, int64_t count, int64_t out, int64_t outs, float* sums) {
    for (int64_t r = 0; r < count; r++) memcpy(s.x + (first + r) * s.hidden + out, sums + r * BLOCK, 4 * outs);
  });
}

// The MLP of a layer, whose output goes to y where there are experts beside it.
static void run_mlp(const Scratch& s, const Layer& l, float scalar, Worker& me) {
  phase(me, (int)s.rows, [&](int row) {
    norm_row(l.before_mlp, s.x + row * s.hidden, s.normed.wide + row * s.normed.stride, s.hidden);
    finish_input(s.normed, row, s.hidden);
  });
  if (!l.up.data) return;
  const bool corrects = s.num_corrected > 0;
  const Matrix* both[] = {&l.gate, &l.up};
  correct_inner(s, both, 2, s.normed, me);
  const bool whole = s.mlp.waits_for_rows() || l.up.outs % 32;
  phase(me, num_blocks(l.up), [&](int block) {
    const auto times = [&](int i, auto made) {  // made(vector of sums, vector in its place)
      multiply_block(*both[i], s.normed, s.rows, block, [&](int64_t first, int64_t count, float* sums) {
        if (corrects && both[i]->place) correct_block(s, *both[i], i, block, first, count, sums);
        for (int64_t r = 0; r < count; r++) {
          const int64_t at = (first + r) * s.mlp.stride + block * BLOCK;
          for (int k = 0; k < BLOCK; k += LANES) {
            const vf x = made(load(sums + r * BLOCK + k), load(s.mlp.wide + at + k));
            storeu(s.mlp.wide + at + k, x);
            if (i == 1 && s.mlp.narrow && !whole) storeu(s.mlp.narrow + at + k, to_bf16(x));
          }
        }
      });
    };
    if (l.gate.data) times(0, [&](vf gate, vf) { return activate(gate * l.gate_times, l.activation); });
    times(1, [&](vf up, vf gate) { return l.gate.data ? gate * up : activate(up, l.activation); });
  });
  if (whole) phase(me, (int)s.rows, [&](int row) { finish_input(s.mlp, row, l.up.outs); });
  if (!l.experts) return add_product(s, l.down, l.after_mlp, s.mlp, l.mlp_times, me, scalar);
  const Matrix* one[] = {&l.down};
  product(me, s, one, 1, s.mlp, s.rows, [&](int64_t first, int64_t count, int64_t out, int64_t outs, float* sums) {
    for (int64_t r = 0; r < count; r++) memcpy(s.y + (first + r) * s.hidden + out, sums + r * BLOCK, 4 * outs);
  });
}

// ends: whether nothing is wanted of the layer but its keys and values.
static void run_layer(const Model* model, const Pass* pass, const Scratch& s, int index, bool ends, Worker& me) {
  const Layer& l = model->layers[index];
  const bool has_hidden_norm = l.hidden_norm.kind != NO_NORM;
  const int64_t ins = l.recurrent ? l.recurrent->inputs[0].ins : l.latent ? s.hidden : l.q.data ? l.q.ins : l.up.ins;
  phase(me, (int)s.rows, [&](int row) {
    float* x = s.x + row * s.hidden;
    const int64_t place = s.place[row];
    if (index == 0 && pass->rows) memcpy(x, pass->rows + place * s.hidden, 4 * s.hidden);
    else if (index == 0 && !pass->inputs) embed(model, pass, place, x);
    else if (index > 0 && pass->deepstack && pass->deepstack[index - 1])
      for (int64_t i = 0; i < s.hidden; i++) x[i] += pass->deepstack[index - 1][place * s.hidden + i];
    keep_state(model, pass, s, index, row, x);
    float* to = s.normed.wide + row * s.normed.stride;
    if (has_hidden_norm) {
      embed(model, pass, place, to);
      norm_row(l.input, to, to, s.hidden);
      norm_row(l.hidden_norm, x, to + s.hidden, s.hidden);
      if (l.norm_before_residual) memcpy(x, to + s.hidden, 4 * s.hidden);
    } else {
      norm_row(l.input, x, to, s.hidden);
    }
    finish_input(s.normed, row, ins);
  });
  if (l.recurrent) run_recurrent(pass, s, l, index, ends, me);
  if (l.latent) {
    run_latent(model, pass, s, l, index, ends, me);
  } else if (l.q.data) {
    const Matrix* qkv[] = {&l.q, &l.k, &l.v};
    const int64_t width = qkv_width(l);
    product(me, s, qkv, l.v.data ? 3 : l.k.data ? 2 : 1, s.normed, s.rows,
            [&](int64_t first, int64_t count, int64_t out, int64_t outs, float* sums) {
              for (int64_t r = 0; r < count; r++)
                memcpy(s.qkv + (first + r) * width + out, sums + r * BLOCK, 4 * outs);
            });
    phase(me, (int)s.rows, [&](int row) { place_row(model, pass, s, l, index, row); });
    if (!ends) attend_layer(model, pass, s, l, index - l.shared_kv, me);
  }
  if (ends) return;
  if (l.q.data) add_product(s, l.o, l.after_attention, s.attended, l.attention_times, me);
  if (!(l.up.data || l.experts)) return;

  const float scalar = l.scalar ? l.scalar : 1.0f, rest = l.ple_gate.data ? 1.0f : scalar;
  run_mlp(s, l, rest, me);
  if (l.experts) run_experts(pass, s, l, index, rest, me);
  if (l.ple_gate.data) add_ple(model, s, l, index, me, scalar);
}

// The largest of a row of logits, with noise or null added to them, and their log-probabilities.
static void top_row(const float* x, const float* noise, int64_t size, int64_t count, int32_t* ids, float* logps) {
  constexpr int STEP = 8 * LANES;
  const float lowest = -0.25f * 3.4028235e38f, infinity = __builtin_inff();
  const auto lanes = [&](int64_t i) {
    const vf y = noise ? load(x + i) + load(noise + i) : load(x + i);
    return y < infinity ? y : set(lowest);
  };
  const auto one = [&](int64_t i) {
    const float y = noise ? x[i] + noise[i] : x[i];
    return y < infinity ? y : lowest;
  };
  int64_t found = 0;
  const auto take = [&](int64_t i) {
    const float y = one(i);
    if (found == count && !(y > logps[count - 1])) return;
    int64_t at = found < count ? found++ : count - 1;
    for (; at > 0 && y > logps[at - 1]; at--) logps[at] = logps[at - 1], ids[at] = ids[at - 1];
    logps[at] = y;
    ids[at] = (int32_t)i;
  };
  int64_t i = 0;
  for (; i + STEP <= size; i += STEP) {
    vf most = lanes(i);
    for (int j = LANES; j < STEP; j += LANES) most = larger(lanes(i + j), most);
    if (found < count || max_lanes(most) > logps[count - 1])
      for (int j = 0; j < STEP; j++) take(i + j);
  }
  for (; i < size; i++) take(i);
  vf sums = zero();
  float rest = 0;
  const float top = logps[0] > -infinity ? logps[0] : 0.0f;
  for (i = 0; i + LANES <= size; i += LANES) sums += exp_(lanes(i) - top);
  for (; i < size; i++) rest += expf(one(i) - top);
  const float total = logps[0] > -infinity ? top + logf(sum_lanes(sums) + rest) : 0.0f;
  for (int64_t k = 0; k < found; k++) logps[k] -= total;
}

static void find_top(const Model* model, const Pass* pass, Worker& me) {
  if (!pass->top) return;
  phase(me, (int)(pass->batch * pass->head_rows), [&](int row) {
    const int64_t size = model->head.outs;
    const float* noise = pass->noise ? pass->noise + row / pass->head_rows * size : nullptr;
    const int64_t to = row * pass->top;
    top_row(pass->logits + row * size, noise, size, pass->top, pass->top_ids + to, pass->top_logps + to);
  });
}

void run(const Model* model, const Pass* pass, void* memory, Worker* worker) {
  Worker& me = *worker;
  const Scratch& s = *(const Scratch*)memory;
  if (!model->num_layers && !model->head.data) return find_top(model, pass, me);
  const bool continues = wants_end(model, pass);
  const int last = last_layer(model, pass);
  if (pass->inputs) project(model, pass, s, me);
  if (model->ple_project.data) make_ple(model, pass, s, me);
  for (int index = 0; index <= last; index++)
    run_layer(model, pass, s, index, pass->kv_only || (index == last && !continues), me);
  if (!continues) return;
  const bool keeps_last = pass->states && pass->states[model->num_layers];
  phase(me, (int)s.rows, [&](int row) {
    const int64_t place = s.place[row];
    float* x = s.x + (int64_t)row * s.hidden;
    if (pass->deepstack && pass->deepstack[model->num_layers - 1])
      for (int64_t i = 0; i < s.hidden; i++) x[i] += pass->deepstack[model->num_layers - 1][place * s.hidden + i];
    if (pass->last_hidden) memcpy(pass->last_hidden + place * s.hidden, x, 4 * s.hidden);
    const int64_t head = s.head[row];
    float* to = head >= 0 ? s.normed.wide + head * s.normed.stride : s.y + (int64_t)row * s.hidden;
    if (head >= 0 || keeps_last) norm_row(model->final_norm, x, to, s.hidden);
    if (keeps_last) keep_state(model, pass, s, model->num_layers, row, to);
    if (head < 0) return;
    finish_input(s.normed, head, s.hidden);
    memset(pass->logits + (s.to_logits[head] + 1) * model->head.outs, 0, 4 * places_behind(pass, s, row) * model->head.outs);
  });
  if (!pass->logits) return;
  const Matrix* one[] = {&model->head};
  product(me, s, one, 1, s.normed, s.num_heads,
          [&](int64_t first, int64_t count, int64_t out, int64_t outs, float* sums) {
            for (int64_t r = 0; r < count; r++) {
              float* to = pass->logits + s.to_logits[first + r] * model->head.outs + out;
              for (int64_t i = 0; i < outs; i++) {
                const float y = sums[r * BLOCK + i] * model->logit_scale;
                to[i] = model->logit_softcap > 0 ? model->logit_softcap * tanhf(y / model->logit_softcap) : y;
              }
            }
          });
  find_top(model, pass, me);
}

// A product by itself, for modules that are called from Python. Memory: the rows in the forms that it reads.
int64_t multiply_bytes(const Matrix* m, int64_t rows) {
  Sizes sizes = {};
  note_format(sizes, *m);
  Arena arena = {nullptr, 0};
  allocate_input(arena, rows, m->ins, sizes);
  return arena.used;
}

void multiply(const Matrix* m, const float* rows_in, int64_t rows, float* out, void* memory, Worker* worker) {
  Sizes sizes = {};
  note_format(sizes, *m);
  Arena arena = {(char*)memory, 0};
  const Input in = allocate_input(arena, rows, m->ins, sizes);
  phase(*worker, (int)rows, [&](int row) {
    memcpy(in.wide + row * in.stride, rows_in + (int64_t)row * m->ins, 4 * m->ins);
    finish_input(in, row, m->ins);
  });
  phase(*worker, num_blocks(*m), [&](int block) {
    const int64_t outs = min_(BLOCK, m->outs - (int64_t)block * BLOCK);
    multiply_block(*m, in, rows, block, [&](int64_t first, int64_t count, float* sums) {
      for (int64_t r = 0; r < count; r++)
        memcpy(out + (first + r) * m->outs + (int64_t)block * BLOCK, sums + r * BLOCK, 4 * outs);
    });
  });
}
