// Products with quantised weights; included by body.cpp.
//
// Inputs are integers of 8 bits, with a scale for every 32 of them or every 256, as many as share d in the weights. The
// sums of such a chunk are integers, so that they are exact, whatever the order; chunks are then added one after another
// in float32. So every instruction set gives the same bits, but for the portable one, which has no fused multiply-add.
//
// Inputs of 16 bits are two rows of 8 bits, whose products are added at the end: the upper part, and the remainder, which
// counts 1 / 254 of it.

#include "bytes.h"

// The scales of 256 inputs of LANES outputs, in formats that have some of less.
struct Scales {
  alignas(64) vi scales[16];  // for each `sub` inputs: as int32, or as two int16, both the same
  alignas(64) vi mins[8];     // two int16, of two times `sub` inputs
  alignas(64) vf d, e;
};

INLINE vf scales_of(const BlockFormat& f, const uint8_t* at) {
  const vh h = loadu<vh>(at);
  return f.is_bf16 ? widen(h) : from_half(h);
}

// Codes of 8 bits with a sign: two of their products with inputs of 8 bits just fit 16 bits.
constexpr bool is_wide(const BlockFormat& f) { return f.bits == 8 || f.values == IQ4_VALUES; }
constexpr int WIDE_OFFSET = UNSIGNED ? 128 : 0;  // makes them positive
constexpr int offset_of(const BlockFormat& f) { return is_wide(f) ? WIDE_OFFSET : f.offset; }

// Fours of inputs whose products are added without a scale: all that share one, or as many as 16 bits hold.
constexpr int fours_of(const BlockFormat& f) {
  if (IN_32_BITS) return (f.sub ? f.sub : 32) / 4;
  const int largest = f.values ? 24 : (1 << f.bits) - 1, fours = is_wide(f) ? 1 : 32767 / (2 * 127 * largest);
  return fours >= 8 && f.sub != 16 ? 8 : fours >= 4 ? 4 : fours >= 2 ? 2 : 1;
}

constexpr int64_t header_bytes(const BlockFormat& f) { return (2 * COLUMN + scale_bytes(f)) * (1 + f.has_mins); }
constexpr int64_t group_stride(const BlockFormat& f) { return f.sub ? plane_bytes(f) : record_bytes(f); }

// The scales of a record, of the outputs from lane `first` of a column on.
template <int FORMAT> INLINE void unpack_scales(const uint8_t* record, int first, Scales& to) {
  constexpr BlockFormat f = block_format(FORMAT);
  to.d = scales_of(f, record + 2 * first);
  if (f.has_mins) to.e = scales_of(f, record + 2 * (COLUMN + first));
  for (int j = 0; j < 128 / f.sub; j++) {
    const uint8_t* pairs = record + 2 * COLUMN * (1 + f.has_mins) + 2 * (COLUMN * j + first);
    const vi both = widen_pairs(pairs);
    to.scales[2 * j] = IN_32_BITS ? both << 16 >> 16 : (both & 0xffff) | both << 16;
    to.scales[2 * j + 1] = IN_32_BITS ? both >> 16 : (vi)((vu)both >> 16) | (both & (int)0xffff0000);
    to.mins[j] = f.has_mins ? widen_pairs(pairs + scale_bytes(f)) : both;
  }
}

// The codes of four inputs of LANES outputs, a byte each. planes: of 32 inputs, at the first output.
template <int FORMAT> INLINE vi codes_of(const uint8_t* planes, int four) {
  constexpr BlockFormat f = block_format(FORMAT);
  constexpr int LOW = low_bits(f.bits), HIGH = f.bits - LOW;
  const BitPlace lower = place_of_bits(LOW, 4 * four, 0);
  vu codes = loadu<vu>(planes + lower.byte);
  if (LOW < 8) codes = take_bits(codes, lower.shift, LOW);
  if constexpr (HIGH > 0) {
    const BitPlace upper = place_of_bits(HIGH, 4 * four, 0);
    codes |= take_bits(loadu<vu>(planes + 64 * LOW + upper.byte), upper.shift, HIGH) << LOW;
  }
  if (f.values) codes = look_up(codes, f.values, is_wide(f) ? WIDE_OFFSET : 0);
  else if (is_wide(f) && WIDE_OFFSET) codes ^= 0x80808080u;
  return (vi)codes;
}

constexpr int HALVES = COLUMN / LANES;  // of a column, which share its lines of the cache
constexpr int64_t AHEAD = 2432;         // bytes that are fetched ahead: about one record of 256 inputs

// sums[r] += the products of 32 inputs with those of R rows, which move on; of C vectors of outputs. TILED: of one row and
// one vector, whose products are there already, see `multiply_tiled`.
template <int FORMAT, int R, int C, bool TILED>
INLINE void dot_group(const uint8_t* planes, const char* fetch, const Scales* w, int sub, const int8_t** rows,
                      const int32_t* tiled, vi (*sums)[C]) {
  constexpr BlockFormat f = block_format(FORMAT);
  constexpr bool WIDE = !IN_32_BITS && is_wide(f);
  constexpr int N = fours_of(f), APART = HALVES / C, SUB = f.sub ? f.sub : 32;
  if (!TILED) UNROLL for (int i = 0; i < (f.bits + APART - 1) / APART; i++) __builtin_prefetch(fetch + 64 * APART * i, 0, 3);
  UNROLL for (int part = 0; part < 8 / N; part++) {
    vi some[R][C];  // as int32, or as two int16 that are still to be added
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int c = 0; c < C; c++) some[r][c] = vi{};
    if (TILED) some[0][0] = loadu<vi>(tiled + TILED_SUMS * part);
    UNROLL for (int n = N * part; n < (TILED ? 0 : N * (part + 1)); n += FOURS) {
      vi fours[FOURS][C];
      UNROLL for (int i = 0; i < FOURS; i++)
        UNROLL for (int c = 0; c < C; c++) fours[i][c] = codes_of<FORMAT>(planes + 4 * LANES * c, n + i);
      add_products<WIDE, R, C>(fours, rows, 4 * n, some);
    }
    part_rows<R, C>(some);
    UNROLL for (int c = 0; c < C; c++) {
      const vi one = set_int(IN_32_BITS ? 1 : 0x00010001);
      const vi scale = f.sub ? w[c].scales[sub + N * part * 4 / SUB] : one;
      UNROLL for (int r = 0; r < R; r++) sums[r][c] += IN_32_BITS ? some[r][c] * scale : dot_pairs(some[r][c], scale);
    }
  }
  UNROLL for (int r = 0; r < R; r++) {
    rows[r] += r < paired(R) ? 64 : 32;
    settle(rows[r]);
  }
}

// out [R, C LANES] += the products of `groups` times 32 inputs, from `begin` on. record: of the first of them, which holds
// all where they share scales; first: the first output. pairs: of rows that are `paired`; tiled: see `dot_group`.
template <int FORMAT, int R, int C, bool TILED = false>
__attribute__((noinline)) static void multiply_chunk(const Scales* w, const uint8_t* record, const char* fetch, int first,
                                                     int groups, const Bytes& in, int64_t row, int64_t begin,
                                                     const int8_t* pairs, float* out, const int32_t* tiled = nullptr) {
  constexpr BlockFormat f = block_format(FORMAT);
  constexpr int OFFSET = offset_of(f), SUB = f.sub ? f.sub : 32;
  const int64_t stride = in.stride, at = row * stride + begin;
  const uint8_t* planes = record + header_bytes(f) + 4 * first;
  const int8_t* rows[R];
  UNROLL for (int r = 0; r < R; r++) rows[r] = r < paired(R) ? pairs + r * 256 : in.codes + at + r * stride;
  vi sums[R][C];
  vf totals[R][C];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int c = 0; c < C; c++) {
      if (f.sub) sums[r][c] = vi{};
      totals[r][c] = load(out + r * BLOCK + c * LANES);
    }
  for (int g = 0; g < groups; g++, planes += group_stride(f), fetch += group_stride(f)) {
    if (!f.sub)
      UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int c = 0; c < C; c++) sums[r][c] = vi{};
    dot_group<FORMAT, R, C, TILED>(planes, fetch, w, 32 / SUB * g, rows, tiled, sums);
    if (TILED) tiled += TILED_SUMS * 8 / fours_of(f);
    if (f.sub) continue;
    vf d[C], e[C];
    UNROLL for (int c = 0; c < C; c++) {
      d[c] = scales_of(f, record + 2 * (first + c * LANES));
      if (f.has_mins) e[c] = scales_of(f, record + 2 * (COLUMN + first + c * LANES));
    }
    record += record_bytes(f);
    UNROLL for (int r = 0; r < R; r++) {
      const int64_t here = (at + r * stride) / 32 + g;
      const vf scale = set(in.scales[here]), sum = set(in.scales[here] * in.sums[here]);
      UNROLL for (int c = 0; c < C; c++) {
        const vi less = OFFSET ? sums[r][c] - set_int(OFFSET * in.sums[here]) : sums[r][c];
        totals[r][c] = fma(to_float(less), d[c] * scale, totals[r][c]);
        if (f.has_mins) totals[r][c] = fma(e[c], sum, totals[r][c]);
      }
    }
  }
  UNROLL for (int r = 0; r < R; r++) {
    const int16_t* parts = (SUB == 16 ? in.halves : in.sums) + (at + r * stride) / SUB;
    UNROLL for (int c = 0; c < C; c++) {
      if (f.sub) {
        const vf scale = set(in.scales[(at + r * stride) / 256]);
        vi low = {};
        if (f.has_mins || OFFSET)
          UNROLL for (int j = 0; j < 128 / SUB; j++) low += dot_pairs(w[c].mins[j], set_word(parts + 2 * j));
        if (f.has_mins) totals[r][c] = fma(to_float(low), w[c].e * scale, totals[r][c]);
        else sums[r][c] -= low * OFFSET;
        totals[r][c] = fma(to_float(sums[r][c]), w[c].d * scale, totals[r][c]);
      }
      storeu(out + r * BLOCK + c * LANES, totals[r][c]);
    }
  }
}

template <int FORMAT, int R, int C> struct RowsOfChunk {
  template <class... Args> static void run(int rows, const Args&... args) {
    if (rows == R) multiply_chunk<FORMAT, R, C>(args...);
    else RowsOfChunk<FORMAT, R - 1, C>::run(rows, args...);
  }
};
template <int FORMAT, int C> struct RowsOfChunk<FORMAT, 0, C> {
  template <class... Args> static void run(int, const Args&...) {}
};

// out [rows, 16] += the products of a chunk with `rows` rows. Tiles of as many rows overlap rather than have another shape.
template <int FORMAT>
__attribute__((noinline)) static void multiply_tiled(TileShapes& shapes, const Scales* w, const uint8_t* record,
                                                     const char* fetch, int groups, const Bytes& in, int64_t row, int rows,
                                                     int64_t begin, float* out) {
  constexpr BlockFormat f = block_format(FORMAT);
  constexpr int N = fours_of(f);
  alignas(64) uint8_t codes[64][64];  // of four inputs, of 16 outputs
  alignas(64) int32_t sums[64 / N][16][16];
  const uint8_t* planes = record + header_bytes(f);
  for (int g = 0; g < groups; g++, planes += group_stride(f), fetch += group_stride(f)) {
    UNROLL for (int i = 0; i < f.bits; i++) __builtin_prefetch(fetch + 64 * i, 0, 3);
    UNROLL for (int four = 0; four < 8; four++) storeu(codes[8 * g + four], codes_of<FORMAT>(planes, four));
  }
  const int tiles = (rows + 15) / 16, each = (rows + tiles - 1) / tiles;
  for (int next = 0; next < rows;) {
    const int first = (int)min_(next, rows - each);
    const int8_t* x = in.codes + (row + first) * in.stride + begin;
    multiply_fours<N>(shapes, codes[0], x, in.stride, each, 8 / N * groups, sums);
    for (; next < first + each; next++)
      multiply_chunk<FORMAT, 1, 1, true>(w, record, fetch, 0, groups, in, row + next, begin, nullptr, out + next * BLOCK,
                                         sums[0][next - first]);
  }
}

// Rows of a tile, and its vectors of outputs: what stays in registers.
constexpr int TILE_ROWS = LANES == 16 ? 6 : LANES == 8 ? 4 : REGISTERS == 16 ? 2 : BYTES_DOT ? 8 : 4;
constexpr int TILE_VECTORS = LANES == 8 ? 2 : 1;
constexpr int FEWEST_TILED = 8;  // rows from which on instructions for tiles are fewer; sums are the same

// out [rows, 32] of one block: the products with rows of 8 bits. A chunk of weights stays in the first cache for all tiles.
template <int FORMAT>
__attribute__((noinline)) static void multiply_codes(const Matrix& m, const Bytes& in, int64_t row, int rows, int64_t block,
                                                     float* out) {
  constexpr BlockFormat f = block_format(FORMAT);
  constexpr int C = TILE_VECTORS;
  const int64_t records = m.ins / f.each, bytes = records * record_bytes(f), at_once = 256 / f.each;
  const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  memset(out, 0, 4 * (size_t)rows * BLOCK);
  Scales scales[C];
  alignas(LINE) int8_t pairs[paired(2) ? 2 * GROUP * 256 : 1];
  TileShapes shapes;
  for (int column = 0; column < BLOCK; column += COLUMN) {
    const uint8_t* record = (const uint8_t*)m.data + (2 * block + column / COLUMN) * bytes;
    for (int64_t i = 0; i < records; i += at_once) {
      const int64_t count = min_(at_once, records - i);
      for (int t = 0; t < tiles && paired(2); t++) {
        const int begin = rows * t / tiles, number = rows * (t + 1) / tiles - begin;
        lay_pairs(in.codes + (row + begin) * in.stride + i * f.each, in.stride, number, count * f.each, pairs + begin * 256);
      }
      for (int first = 0; first < COLUMN; first += C * LANES) {
        if constexpr (f.sub > 0)
          for (int c = 0; c < C; c++) unpack_scales<FORMAT>(record, first + c * LANES, scales[c]);
        const char* fetch = (const char*)record + AHEAD + 64 * first / LANES;
        if constexpr (HAS_TILES)
          if (rows >= FEWEST_TILED) {
            multiply_tiled<FORMAT>(shapes, scales, record, fetch, (int)count * f.each / 32, in, row, rows, i * f.each,
                                   out + column);
            continue;
          }
        for (int t = 0; t < tiles; t++) {
          const int begin = rows * t / tiles, number = rows * (t + 1) / tiles - begin;
          RowsOfChunk<FORMAT, TILE_ROWS, C>::run(number, scales, record, fetch, first, (int)count * f.each / 32, in,
                                                 row + begin, i * f.each, pairs + begin * 256,
                                                 out + begin * BLOCK + column + first);
        }
      }
      record += count * record_bytes(f);
    }
  }
}

static void multiply_codes(const Matrix& m, const Bytes& in, int64_t row, int rows, int64_t block, float* out) {
  switch (m.format) {
#define CASE(FORMAT) case FORMAT: return multiply_codes<FORMAT>(m, in, row, rows, block, out);
    CASE(Q4_0) CASE(Q4_1) CASE(Q5_0) CASE(Q5_1) CASE(Q8_0) CASE(Q2_K) CASE(Q3_K) CASE(Q4_K) CASE(Q5_K) CASE(Q6_K)
    CASE(IQ4_NL) CASE(IQ4_XS) CASE(MXFP4) CASE(INT2) CASE(INT3) CASE(INT4)
#undef CASE
  }
}

// out [rows, 32] of one block, without bias; at most GROUP rows.
static void multiply_blocks(const Matrix& m, const Input& in, int64_t row, int rows, int64_t block, float* out) {
  Bytes x = block_format(m.format).each == 256 ? in.by_256 : in.by_32;
  if (m.input_bits == 8) {
    x.stride *= x.parts;  // past the remainders
    return multiply_codes(m, x, row, rows, block, out);
  }
  alignas(LINE) float both[2 * GROUP * BLOCK];
  multiply_codes(m, x, 2 * row, 2 * rows, block, both);
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < BLOCK; i += LANES)
      storeu(out + r * BLOCK + i, load(both + 2 * r * BLOCK + i) + load(both + (2 * r + 1) * BLOCK + i));
}

// Rounds a row to integers, the largest of each `each` numbers to 127; a second part is the remainder.
static void round_row(const float* row_in, int64_t size, int64_t row, int64_t each, const Bytes& to) {
  const vf magic = set(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, the lowest bits of the sum
  alignas(64) float padded[256] = {};
  for (int64_t first = 0; first < to.stride; first += each) {
    const float* x = row_in + first;
    if (first + each > size) {
      memset(padded, 0, sizeof padded);
      if (first < size) memcpy(padded, x, 4 * (size - first));
      x = padded;
    }
    vu most_bits = {};  // absolute values are ordered as their bits are, infinity and NaN last
    for (int64_t i = 0; i < each; i += LANES) {
      const vu magnitude = loadu<vu>(x + i) & 0x7fffffffu;
      most_bits = magnitude > most_bits ? magnitude : most_bits;
    }
    const uint32_t largest = max_(max_lanes(most_bits), 0x0da24260);  // 1e-30
    float most;
    memcpy(&most, &largest, 4);
    const vf factor = set(127 / most);
    for (int p = 0; p < to.parts; p++) {
      const int64_t at = (row * to.parts + p) * to.stride + first;
      to.scales[at / each] = largest >= 0x7f800000u ? __builtin_nanf("") : p ? most / 127 / 254 : most / 127;
      for (int64_t i = 0; i < each; i += 32) {
        vf rounded[32 / LANES];
        for (int v = 0; v < 32 / LANES; v++) {
          const vf y = load(x + i + v * LANES) * factor, high = y + magic;
          rounded[v] = p ? (y - (high - magic)) * 254.0f + magic : high;
        }
        int16_t* halves = to.halves + (at + i) / 16;
        store_bytes(rounded, to.codes + at + i, halves);
        to.sums[(at + i) / 32] = (int16_t)(halves[0] + halves[1]);
      }
    }
  }
}
