// What Python and the kernels share. Mirrored by `library.py`; sizes are checked when the library is loaded.
#pragma once
#include <stdint.h>

enum Format { BF16 = 0, F16 = 1, F32 = 2, BF12 = 3, INT8 = 4, FP8 = 5 };  // the last two: of keys and values alone
enum BlockFormats {  // see block_formats.h; those of llama.cpp's files have its numbers, and 64
  BLOCK_FORMATS = 64, Q4_0 = 66, Q4_1 = 67, Q5_0 = 70, Q5_1 = 71, Q8_0 = 72, Q2_K = 74, Q3_K = 75, Q4_K = 76, Q5_K = 77,
  Q6_K = 78, IQ4_NL = 84, IQ4_XS = 87, MXFP4 = 103, INT2 = 256, INT3 = 257, INT4 = 258
};
enum NormKind { NO_NORM = 0, RMS_NORM = 1, LAYER_NORM = 2 };
enum Activation { SILU = 0, GELU_TANH = 1, RELU_SQUARED = 2 };
enum Recurrence { DELTA_RULE = 0, STATE_SPACE = 1, SHORT_CONV = 2 };
enum Scoring { SOFTMAX = 0, SIGMOID = 1 };

// A linear layer [outs, ins] in blocks of 32 outputs; the layout of each format is told in `packing.py`.
struct Matrix {
  const void* data;     // null: there is no such layer
  const uint8_t* table;     // BF12: the high byte of each code [16]
  const int32_t* patches;   // BF12: where the patches of each block begin [blocks + 1], then (place << 8 | high byte)
  const float* bias;    // [outs] or null
  int32_t outs, ins, format, input_bits;  // input_bits: of the integers that blocks are multiplied with, 8 or 16
  int32_t place;        // in each list of corrections; 0: it takes none
};

struct Norm {
  const float* weight;
  const float* bias;
  float eps;
  int32_t kind;
};

// A recurrent layer, see recurrent.h. The outputs of `inputs` one after another make a row of `width` numbers: the channels of
// the convolution, the output gate, and for each head what its decay and (DELTA_RULE) its beta come from. SHORT_CONV: the
// channels are a product, of these numbers and as many at `times_at`.
struct Recurrent {
  struct Matrix inputs[6], out;
  const float* conv;       // [taps, channels], the oldest token first; channels are padded to 16
  const float* conv_bias;  // [channels] or null
  const float* scales;     // [width] what the row is multiplied with, or null
  const float* decay;      // [heads], a factor of steps
  const float* step_bias;  // [heads]
  const float* skip;       // [heads] STATE_SPACE: the factor of v that is added to the output, or null
  struct Norm norm;        // of each `norm_size` outputs; its weights are shared by all of these if `norm_shared`
  int32_t kind, num_inputs, width, taps, channels;
  int32_t heads, key_heads, key_dim, value_dim;
  int32_t q_at, k_at, v_at;                                // in the channels
  int32_t channels_at, gate_at, step_at, beta_at, times_at;  // in the row
  int32_t norm_size, norm_shared, gate_first;              // gate_first: the gate is applied before the norm
  float beta_scale, least_step, most_step, times;          // times: of the layer's output
};

// The experts of a layer, MLPs of which each row takes those `chosen` whose scores are best; on a tie the first. An output
// counts as much as its score, divided by the sum of the chosen where `divides`, times `times`.
struct Experts {
  struct Matrix router;                   // [count, hidden]
  struct Matrix shared_gate;              // [1, hidden] whose sigmoid is a factor of the MLP beside the experts, or null
  const struct Matrix *gate, *up, *down;  // [count] each, of one shape and one block format; gate null: plain MLPs
  const float* choice_bias;               // [count] what is added to scores for the choice alone, or null
  const float* scale;                     // [count] a factor of the score of an expert that was chosen, or null
  // Of what the router and the experts read, where it is not what the MLP reads; of the outputs of the MLP and the experts.
  struct Norm router_norm, experts_norm, after_shared, after_experts;
  int32_t count, chosen, scoring, divides;
  int32_t in_file;  // whether their weights are read from a file as they are used
  int32_t groups, chosen_groups, of_group;  // 0, or only those in the groups with the best sums of `of_group` scores
  float least_sum, more_sum, times;         // the sum is at least `least_sum`, plus `more_sum`
  float alpha, limit, plus;  // an expert's inner row: gate sigmoid(alpha gate) (up + plus), both cut to `limit` unless it is 0
};

// Latent attention (MLA), see latent.h: a column of the cache is one vector for all heads, `rank` numbers of which keys and
// values are made, and `rope_dim` of a rotated key. There are no values.
struct Latent {
  struct Matrix q_in, kv;        // q_in: what the layer's q reads, or null
  struct Norm q_norm, kv_norm;   // of the output of q_in; of the `rank` numbers
  const struct Matrix *k, *v;    // [heads] of [rank, nope_dim] and [value_dim, rank], not in blocks
  int32_t rank, nope_dim, rope_dim, value_dim;
};

struct Layer {
  struct Matrix q, k, v, o, gate, up, down;  // gate null: a plain MLP; k, v null: q holds all three; v null: k is both
  struct Matrix ple_gate, ple_out;           // of the per-layer input, or null
  struct Norm input, after_attention, before_mlp, after_mlp, after_ple, q_norm, k_norm, v_norm;
  struct Norm hidden_norm;  // EAGLE-3, first layer only: q, k, v read [input(embedding); hidden_norm(row)]
  int32_t heads, kv_heads, head_dim, rotary_dim;  // rotary_dim 0: no rotation in this layer
  int32_t window;                                 // columns seen, own included; 0: all
  int32_t rope;                                   // which table of the pass
  int32_t norm_whole;  // q_norm and k_norm over all heads together
  int32_t activation;
  int32_t norm_before_residual;  // EAGLE-3: the residual is hidden_norm(row); 0: the row itself
  int32_t rotary_pairs;  // neighbours are rotated together, not the halves of a head
  int32_t is_gated;   // the output of each head is gated: q holds each head's queries and then its gate
  int32_t shared_kv;  // 0: it makes keys and values; else it reads those of the layer so many before, and has no k and v
  float scale, softcap;
  float attention_times, gate_times, mlp_times;  // of what each adds to the residual stream, and of the gate
  float scalar;  // what its output is multiplied with, 0: nothing
  const float* sinks;  // [heads] a score of no column, or null
  const struct Latent* latent;    // null: none. Else kv_heads is 1, head_dim that of the cache, and k and v are null
  const struct Experts* experts;  // null: none. up null: no MLP beside them
  const struct Recurrent* recurrent;  // null: none. q null: no attention; both: side by side. up null: no MLP
};

struct Model {
  const struct Layer* layers;
  struct Matrix head;
  struct Matrix project;   // makes rows of what a pass reads as `inputs`; null where there is none
  struct Norm final_norm, embedding_norm, state_norm;  // the last two: of what `project` reads where it reads pairs
  struct Matrix ple_project;  // per-layer inputs (PLE): [num_layers ple_size, hidden], or null
  struct Norm ple_norm;
  const void* embeddings;  // [vocabulary, hidden] in `embedding_format`, or null: rows are always given
  const void* ple_table;   // [vocabulary, num_layers ple_size] in `ple_format`
  int32_t embedding_format, ple_format, ple_size;
  int32_t num_layers, hidden, vocabulary;  // vocabulary: rows of the embeddings
  float embedding_scale, ple_scale, logit_scale, logit_softcap;
  int32_t cache_format;    // of states, keys and values: BF16, F16 or F32
  int32_t projects_pairs;  // `project` reads [embedding of the token; input]; 0: the input alone
  int32_t kv_format;       // of keys and values: INT8 or FP8; 0: `cache_format`
};

// One pass over batch x nodes rows. Row (b, n) reads `starts[b]` committed columns of its slot, then its path. The first
// `old` nodes of each tree were written by passes before; the rows of this one are the nodes behind them. Trees may be
// smaller than `nodes`: what lies behind their `sizes` is not computed, and its logits are zeros.
struct Pass {
  int64_t batch, nodes, old;
  const int64_t* sizes;    // [batch], each of 1 .. nodes, where all have logits; null: all are `nodes`
  const int64_t* ids;      // [batch, nodes]; null where `rows` says it all, which it does not with per-layer inputs
  const float* rows;       // [batch, nodes, hidden] or null
  const void* inputs;      // in the place of rows: what `project` reads, [batch, nodes, project.ins] or without the
                           // embeddings of pairs [batch, nodes, project.ins - hidden], in `input_format`, or null
  int64_t input_format;
  const int64_t* parents;  // [batch, old + nodes], of each row's tree; null: chains
  const int64_t* starts;   // [batch]
  const int64_t* slots;    // [batch]
  const int64_t* offsets;  // [batch], position less column; null: 0
  const int32_t* block_ends;    // [batch, nodes] a row sees all columns before this one, or null
  const int32_t* block_firsts;  // [batch, nodes] a row sees columns from this one on even outside the window, or null
  const int64_t* spans;    // [batch, num_spans, 2] begins and ends of the committed columns that layers without a window
                           // read, in their order; null: all of them
  const int32_t* corrected;  // [batch, nodes] which of the low-rank corrections each row takes, from 1 on; 0: none; or null
  const struct Matrix* const* corrections;  // for each of these a [rank, ins] and b [outs, rank] of every place, or without
                                            // data: what is added is b (a x); rank <= 256
  const float* const* cos;  // for each rope table [positions, rotary_dim], see `positions`
  const float* const* sin;
  int64_t max_position;    // positions are cut to this; -1: cos, sin hold one row for each row of the pass
  int64_t windowed_blocks;  // whether only layers with a window obey `block_ends`
  int64_t num_spans, num_corrections;
  void* const* keys;       // for each layer [slots, kv_heads, capacity, head_dim], see `row_bytes`
  void* const* values;     // ... which latent attention has none of
  int64_t capacity;
  const int64_t* bases;    // recurrent layers only: [batch] the columns that states hold ...
  const int64_t* steps;    // ... and how many more they take in
  void* const* recurrent_states;  // for each layer float32 [slots, heads, value_dim / 16, key_dim, 16], or null
  void* const* recurrent_rows;    // ... [slots, ring, channels in 16s + 2 heads in 16s]: column c in row c mod ring
  int64_t ring;
  int64_t kv_only;         // whether all layers only make keys and values, of the same rows
  void* const* states;     // for state 0 .. num_layers null, or as keys: [slots, state_columns], `state_row` numbers each
  int64_t state_columns, state_row;
  const float* const* deepstack;  // for each layer what is added to its output [batch, nodes, hidden] or null; may be null
  float* last_hidden;      // the output of the last layer before the final norm [batch, nodes, hidden], or null
  float* logits;           // [batch, head_rows, vocabulary] or null; given where the model has neither layers nor head
  int64_t head_rows;       // of the last nodes of each row
  int64_t top;             // so many of the largest logits of each of them are found, 0: none
  const float* noise;      // [batch, vocabulary] what is added to the logits of all rows before, or null
  int64_t* num_experts;    // the distinct experts that the pass reads, added up over layers, or null
  int32_t* top_ids;        // [batch, head_rows, top], largest first, on a tie the first; NaN and infinity count as lowest
  float* top_logps;        // ... and their log-probabilities
};
