// A pass of a decoder in one instruction set. Compiled once for each, in a namespace of that name.
//
// Every number is computed by the same operations in the same order whatever else is computed beside it: a product is
// one sum over k, a score one sum over the width of a head, a softmax and its mean one sum over columns in the order of
// the text, counted from the first column. Rows, trees, chunks and threads only decide who computes what.
#include <math.h>
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "abi.h"
#include "block_formats.h"
#include "noise.h"
#include "pool.h"
#include "simd.h"

namespace PACELINE_ISA {

typedef uint16_t half_t;  // bits of a bfloat16 or a float16
constexpr int BLOCK = 32;  // outputs of a packed block
constexpr int PER_BLOCK = BLOCK / LANES;

INLINE int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }
INLINE int64_t min_(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max_(int64_t a, int64_t b) { return a > b ? a : b; }

// ---------------------------------------------------------------------------------------------- products

// Rows as integers, for products with blocks.
struct Bytes {
  int8_t* codes;    // null where nothing reads them
  float* scales;    // of every `each` numbers, which are 32 or 256
  int16_t* sums;    // of every 32 codes
  int16_t* halves;  // of every 16
  int64_t stride;   // numbers from part to part, a multiple of `each`
  int parts;        // of a row, 8 bits each: 1, or 2 where a product reads 16 bits
};

// The forms in which a product reads its rows. Rows are padded with zeros to a multiple of 32.
struct Input {
  float* wide;     // float32
  half_t* narrow;  // bfloat16, for products of pairs; null where the processor has none
  Bytes by_32, by_256;
  int64_t stride;  // elements from row to row
  bool waits_for_rows() const { return by_32.codes || by_256.codes; }  // forms that need more than 32 numbers
};

INLINE int num_blocks(const Matrix& m) { return (m.outs + BLOCK - 1) / BLOCK; }

constexpr int MOST_ROWS = LANES == 16 ? 12 : LANES == 4 && REGISTERS == 32 ? 8 : 6;  // of a tile, whose sums stay in registers
constexpr int GROUP = 48;                        // rows whose sums are kept between panels
constexpr int64_t PANEL = 128;                   // pairs of inputs whose weights stay in the first cache

// What is prefetched while a tile is computed: `step` bytes with every iteration (see `pairs_at_once`).
struct Ahead {
  const char* at;
  int64_t step;
  template <int LINES> void fetch() {
    UNROLL for (int i = 0; i < LINES; i++) __builtin_prefetch(at + i * LINE, 0, 2);
    at += step;
  }
};

#include "bf12.h"
#include "amx.h"

#if defined(__AVX512F__) && !defined(__AMX_TILE__)
#if defined(__AVX512BF16__)
typedef half_t factor_t;  // what bfloat16 weights are multiplied with
#else
typedef float factor_t;
#endif

// out [R, 32] += x [R, 2 pairs] times pairs [first, first + pairs) of a block, BF16 or BF12, which is written to `widened`
// as BF16 unless that is null.
template <int R, int FORMAT>
static void tile_pairs(const Matrix& m, const char* w, const factor_t* x, int64_t stride, int64_t first, int64_t pairs,
                       Ahead ahead, Patches patches, half_t* widened, float* out) {
  __m512 sums[R][2];
  UNROLL for (int r = 0; r < R; r++) {
    sums[r][0] = _mm512_loadu_ps(out + r * BLOCK);
    sums[r][1] = _mm512_loadu_ps(out + r * BLOCK + 16);
  }
  const auto add = [&](int64_t k, __m512i w0, __m512i w1) __attribute__((always_inline)) {
#if defined(__AVX512BF16__)
    UNROLL for (int r = 0; r < R; r++) {
      int32_t pair;
      memcpy(&pair, x + r * stride + 2 * k, 4);
      const __m512bh b = (__m512bh)_mm512_set1_epi32(pair);
      sums[r][0] = _mm512_dpbf16_ps(sums[r][0], (__m512bh)w0, b);
      sums[r][1] = _mm512_dpbf16_ps(sums[r][1], (__m512bh)w1, b);
    }
#else
    const vf even[] = {bits((vu)w0 << 16), bits((vu)w1 << 16)};
    const vf odd[] = {bits((vu)w0 & 0xffff0000u), bits((vu)w1 & 0xffff0000u)};
    UNROLL for (int r = 0; r < R; r++) {
      const vf one = set(x[r * stride + 2 * k]), other = set(x[r * stride + 2 * k + 1]);
      UNROLL for (int c = 0; c < 2; c++) sums[r][c] = (__m512)fma(odd[c], other, fma(even[c], one, (vf)sums[r][c]));
    }
#endif
  };
  if (FORMAT == BF16)
    for (int64_t k = 0; k < pairs; k++) {
      ahead.fetch<2>();
      add(k, _mm512_loadu_si512(w + 128 * k), _mm512_loadu_si512(w + 128 * k + 64));
    }
  else {
    const __m512i table = load_table(m);
    alignas(LINE) half_t one[128];
    int64_t patched = patches.unit(first);
    for (int64_t u = 0; 2 * u < pairs; u++) {
      ahead.fetch<3>();
      const uint8_t* unit = (const uint8_t*)w + u * UNIT;
      Words even = words_of<0>(unit, table), odd = words_of<1>(unit, table);
      if (__builtin_expect(u == patched, 0)) {
        store_words(even, one);
        store_words(odd, one + 64);
        for (; u == patched; patched = patches.unit(first)) patches.apply(one, first + 2 * u);
        even = load_words(one);
        odd = load_words(one + 64);
      }
      if (widened) {
        store_words(even, widened + 128 * u);
        store_words(odd, widened + 128 * u + 64);
      }
      add(2 * u, even.first, even.second);
      add(2 * u + 1, odd.first, odd.second);
    }
  }
  UNROLL for (int r = 0; r < R; r++) {
    _mm512_storeu_ps(out + r * BLOCK, sums[r][0]);
    _mm512_storeu_ps(out + r * BLOCK + 16, sums[r][1]);
  }
}
#endif

struct Bf16 {  // [pairs, 32, 2]
  static constexpr int64_t ROW = BLOCK * 2;  // bytes of the weights of one input
  template <int ODD> INLINE vf load_one(const void* w, int64_t k, int column) {
    const vu both = loadu<vu>((const half_t*)w + 64 * k + 2 * column);
    return bits(ODD ? both & 0xffff0000u : both << 16);
  }
};
struct F16s {  // [k, 32]
  static constexpr int64_t ROW = BLOCK * 2;
  template <int ODD> INLINE vf load_one(const void* w, int64_t k, int column) {
    return from_half(loadu<vh>((const half_t*)w + 64 * k + 32 * ODD + column));
  }
};
struct F32s {  // [k, 32]
  static constexpr int64_t ROW = BLOCK * 4;
  template <int ODD> INLINE vf load_one(const void* w, int64_t k, int column) {
    return load((const float*)w + 64 * k + 32 * ODD + column);
  }
};

// Vectors of outputs that a tile computes at once; a tile of fewer than 32 outputs sweeps over its weights again.
constexpr int columns_of(int rows) {
  if (LANES == 16) return 2;
  if (LANES == 4 && REGISTERS == 32) return rows <= 2 ? 8 : rows <= 4 ? 4 : 2;
  return rows <= 3 ? 4 : 2;
}
constexpr int sweeps_of(int rows) { return PER_BLOCK / columns_of(rows); }

// C vectors of outputs, the first at `column`.
template <class Format, int R, int C>
INLINE void tile_part(const char* w, const float* x, int64_t stride, int64_t pairs, int column, Ahead ahead, float* out) {
  vf sums[R][C];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int c = 0; c < C; c++) sums[r][c] = load(out + r * BLOCK + column + c * LANES);
  for (int64_t k = 0; k < pairs; k++) {
    ahead.fetch<(2 * Format::ROW * C / PER_BLOCK + LINE - 1) / LINE>();
    if (LANES < 16 && C == columns_of(1)) {  // few rows: a vector of weights at a time leaves registers for all sums
      UNROLL for (int c = 0; c < C; c++) {
        const vf even = Format::template load_one<0>(w, k, column + c * LANES);
        const vf odd = Format::template load_one<1>(w, k, column + c * LANES);
        UNROLL for (int r = 0; r < R; r++)
          sums[r][c] = fma(odd, set(x[r * stride + 2 * k + 1]), fma(even, set(x[r * stride + 2 * k]), sums[r][c]));
      }
      continue;
    }
    vf even[C], odd[C];
    const char* again = w;
    UNROLL for (int c = 0; c < C; c++) even[c] = Format::template load_one<0>(w, k, column + c * LANES);
    if (LANES == 16) {
      UNROLL for (int c = 0; c < C; c++) odd[c] = Format::template load_one<1>(w, k, column + c * LANES);
      UNROLL for (int r = 0; r < R; r++) {
        const vf first = set(x[r * stride + 2 * k]), second = set(x[r * stride + 2 * k + 1]);
        UNROLL for (int c = 0; c < C; c++) sums[r][c] = fma(odd[c], second, fma(even[c], first, sums[r][c]));
      }
      continue;
    }
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int c = 0; c < C; c++) sums[r][c] = fma(even[c], set(x[r * stride + 2 * k]), sums[r][c]);
    __asm__("" : "+r"(again));  // forces a second load; otherwise 16 registers do not hold six rows
    UNROLL for (int c = 0; c < C; c++) odd[c] = Format::template load_one<1>(again, k, column + c * LANES);
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int c = 0; c < C; c++) sums[r][c] = fma(odd[c], set(x[r * stride + 2 * k + 1]), sums[r][c]);
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int c = 0; c < C; c++) storeu(out + r * BLOCK + column + c * LANES, sums[r][c]);
}

// out [R, 32] += x [R, 2 pairs] times one block of weights.
template <class Format, int R>
static void tile_floats(const char* w, const float* x, int64_t stride, int64_t pairs, Ahead ahead, float* out) {
  constexpr int C = columns_of(R);
  for (int column = 0; column < BLOCK; column += C * LANES) {
    tile_part<Format, R, C>(w, x, stride, pairs, column, ahead, out);
    ahead.at += pairs * ahead.step;
  }
}

#include "blocks.h"

// out [R, 32] of rows from `row` on. Weights of floats, which begin at `w`: the products with inputs
// [2 first, 2 (first + pairs)) are added. format: of `w`, which may be that of m, widened.
//
// Not inlined, since otherwise the caller's variables take registers from its loops. widened: see `tile_pairs`.
template <int R>
__attribute__((noinline)) static void tile(int format, const Matrix& m, const char* w, const Input& in, int64_t row,
                                           int64_t first, int64_t pairs, Ahead ahead, Patches patches, half_t* widened,
                                           float* out) {
  const int64_t stride = in.stride;
  const float* x = in.wide + row * stride + 2 * first;
#if defined(__AVX512BF16__)
  const factor_t* factors = in.narrow + row * stride + 2 * first;
#elif defined(__AVX512F__) && !defined(__AMX_TILE__)
  const factor_t* factors = x;
#endif
  switch (format) {
#if defined(__AMX_TILE__)  // BF16: see `multiply_pairs`
#elif defined(__AVX512F__)
    case BF16: tile_pairs<R, BF16>(m, w, factors, stride, first, pairs, ahead, patches, widened, out); break;
    case BF12: tile_pairs<R, BF12>(m, w, factors, stride, first, pairs, ahead, patches, widened, out); break;
#else
    case BF16: tile_floats<Bf16, R>(w, x, stride, pairs, ahead, out); break;
#endif
    case F16: tile_floats<F16s, R>(w, x, stride, pairs, ahead, out); break;
    case F32: tile_floats<F32s, R>(w, x, stride, pairs, ahead, out); break;
  }
}

INLINE int64_t block_bytes(const Matrix& m) {
  const int64_t even = round_up(m.ins, 2);
  switch (m.format) {
    case BF12: return (m.ins + 3) / 4 * UNIT;
    case F32: return even * BLOCK * 4;
    default: return even * BLOCK * 2;
  }
}

// Of the weights of two inputs in a block.
INLINE int64_t bytes_of_pair(int format) {
  switch (format) {
    case BF12: return UNIT / 2;
    case F32: return 2 * F32s::ROW;
    default: return 2 * F16s::ROW;
  }
}

// Pairs of inputs that an iteration of a tile takes.
INLINE int pairs_at_once(int format) { return format == BF12 ? 2 : 1; }

template <int R> struct Tiles {
  template <class... Args> static void run(int rows, const Args&... args) {
    if (rows == R) tile<R>(args...);
    else Tiles<R - 1>::run(rows, args...);
  }
};
template <> struct Tiles<0> {
  template <class... Args> static void run(int, const Args&...) {}
};

// out [rows, 32] of one block, without bias; at most GROUP rows.
//
// Several tiles, or several sweeps of one, go over the weights panel by panel, so that they are read from memory once;
// meanwhile the next panel is fetched, evenly, so that neither memory nor arithmetic waits for the other. A sum is the
// same whatever the panels: it goes on where it was.
static void multiply_rows(const Matrix& m, const Input& in, int64_t row, int rows, int64_t block, float* out) {
  if (is_block_format(m.format)) return multiply_blocks(m, in, row, rows, block, out);
  const char* w = (const char*)m.data + block * block_bytes(m);
  const int64_t pairs = (m.ins + 1) / 2;
  const bool packed = m.format == BF12, tiled = HAS_TILES && (packed || m.format == BF16);
  const int most = tiled ? TILED_ROWS : MOST_ROWS, tiles = (rows + most - 1) / most;
  const auto begin_of = [&](int t) { return tiled ? (int)min_(rows, most * t) : rows * t / tiles; };
  int sweeps = 0;
  for (int t = 0; t < tiles; t++) sweeps += sweeps_of(begin_of(t + 1) - begin_of(t));
  const bool first_widens = LANES == 16 && !tiled;  // BF12: the first tile does, in its registers, of which there are 32
  const bool once = sweeps <= 1 && (!packed || first_widens);
  const int64_t panels = once ? 1 : (pairs + PANEL - 1) / PANEL;
  const int64_t panel = round_up((pairs + panels - 1) / panels, tiled ? TILED_PAIRS : 2);
  const int64_t bytes = bytes_of_pair(m.format);
  alignas(LINE) half_t widened[64 * PANEL];
  Patches patches = patches_of(m, block);
  TileShapes shapes;
  memset(out, 0, 4 * (size_t)rows * BLOCK);
  for (int64_t first = 0; first < pairs; first += panel) {
    const int64_t count = min_(panel, pairs - first);
    const char* weights = w + first * bytes;
    const char* next = weights + (!once ? count * bytes : LANES == 16 ? 8192 : 2048);
    const Patches here = patches.take_before(first + count);
    if (packed && !first_widens) widen_panel(m, weights, first, count, here, widened);
    for (int t = 0; t < tiles; t++) {
      int format = m.format;
      if (packed && (t > 0 || !first_widens)) format = BF16, weights = (const char*)widened;
      const int begin = begin_of(t), number = begin_of(t + 1) - begin;
      const int each = pairs_at_once(format);
      const Ahead ahead = {next, (each * bytes + sweeps - 1) / sweeps};
      if (tiled)
        multiply_pairs(shapes, weights, in.narrow + (row + begin) * in.stride + 2 * first, in.stride, number, count, ahead,
                       out + begin * BLOCK);
      else
        Tiles<MOST_ROWS>::run(number, format, m, weights, in, row + begin, first, count, ahead, here,
                              tiles > 1 ? widened : nullptr, out + begin * BLOCK);
      next += sweeps_of(number) * (count / each) * ahead.step;
    }
  }
}

// One block of outputs for all rows: finish(row, rows, sums [rows, 32]) for each group, bias included.
template <class F> INLINE void multiply_block(const Matrix& m, const Input& in, int64_t rows, int64_t block, F finish) {
  const int64_t groups = (rows + GROUP - 1) / GROUP;
  float out[GROUP * BLOCK];
  float bias[BLOCK] = {};
  if (m.bias) memcpy(bias, m.bias + block * BLOCK, 4 * min_(BLOCK, m.outs - block * BLOCK));
  for (int64_t g = 0; g < groups; g++) {
    const int64_t first = rows * g / groups, count = rows * (g + 1) / groups - first;
    multiply_rows(m, in, first, (int)count, block, out);
    if (m.bias)
      for (int64_t r = 0; r < count; r++)
        for (int i = 0; i < BLOCK; i += LANES) storeu(out + r * BLOCK + i, load(out + r * BLOCK + i) + load(bias + i));
    finish(first, count, out);
  }
}

// ---------------------------------------------------------------------------------------------- rows

INLINE void narrow_row(const float* x, half_t* to, int64_t size) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) storeu(to + i, to_bf16(load(x + i)));
  for (; i < size; i++) to[i] = to_bf16(x[i]);
}

INLINE float sum_squares(const float* x, int64_t size, float mean) {
  vf sums = zero();
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    const vf y = load(x + i) - mean;
    sums = fma(y, y, sums);
  }
  float rest = 0;
  for (; i < size; i++) rest += (x[i] - mean) * (x[i] - mean);
  return sum_lanes(sums) + rest;
}

// to = norm(x), which may be the same place.
static void norm_row(const Norm& norm, const float* x, float* to, int64_t size) {
  if (norm.kind == NO_NORM) {
    if (to != x) memcpy(to, x, 4 * size);
    return;
  }
  float mean = 0;
  if (norm.kind == LAYER_NORM) {
    vf sums = zero();
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) sums += load(x + i);
    float rest = 0;
    for (; i < size; i++) rest += x[i];
    mean = (sum_lanes(sums) + rest) / size;
  }
  const float scale = 1.0f / sqrtf(sum_squares(x, size, mean) / size + norm.eps);
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    vf y = (load(x + i) - mean) * scale;
    if (norm.weight) y *= load(norm.weight + i);
    storeu(to + i, norm.bias ? y + load(norm.bias + i) : y);
  }
  for (; i < size; i++) {
    const float y = (x[i] - mean) * scale * (norm.weight ? norm.weight[i] : 1.0f);
    to[i] = norm.bias ? y + norm.bias[i] : y;
  }
}

// Makes the other forms of a row from its float32 numbers.
static void finish_input(const Input& in, int64_t row, int64_t size) {
  float* x = in.wide + row * in.stride;
  for (int64_t i = size; i < in.stride; i++) x[i] = 0;
  if (in.narrow) narrow_row(x, in.narrow + row * in.stride, in.stride);
  if (in.by_32.codes) round_row(x, in.stride, row, 32, in.by_32);
  if (in.by_256.codes) round_row(x, in.stride, row, 256, in.by_256);
}

// pairs: whether neighbours are rotated together, not the halves.
INLINE void rotate(float* x, const float* cos, const float* sin, int64_t size, bool pairs) {
  const int64_t half = size / 2;
  for (int64_t i = 0; pairs && i < half; i++) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * cos[i] - b * sin[i];
    x[2 * i + 1] = b * cos[i] + a * sin[i];
  }
  for (int64_t i = 0; !pairs && i < half; i++) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i + half] + a * sin[i + half];
  }
}

// ---------------------------------------------------------------------------------------------- the cache

constexpr int64_t SHARE = 32, SHARE_BYTES = SHARE + 2;  // numbers of INT8 that share a bfloat16 scale, which is before them

INLINE int element_bytes(int format) { return format == F32 ? 4 : 2; }
INLINE int64_t row_bytes(int64_t size, int format) {
  if (format == INT8) return size + 2 * ((size + SHARE - 1) / SHARE);
  return format == FP8 ? size : size * element_bytes(format);
}

// Up to 32 numbers behind their scale, the largest of them over 127. A scale that is not finite makes all of them NaN.
static void store_codes(char* to, const float* x, int64_t size) {
  uint32_t most = 0;  // absolute values are ordered as their bits are, infinity and NaN last
  for (int64_t i = 0; i < size; i++) {
    uint32_t u;
    memcpy(&u, x + i, 4);
    most = (u & 0x7fffffff) > most ? u & 0x7fffffff : most;
  }
  float largest, scale;
  memcpy(&largest, &most, 4);
  largest /= 127;
  memcpy(&most, &largest, 4);
  const uint16_t up = most > 0x7f800000 ? 0x7fc0 : (uint16_t)((most + 0xffff) >> 16);  // so that no code is larger
  memcpy(to, &up, 2);
  scale = from_bf16(up);
  for (int64_t i = 0; i < size; i++) {
    const float shifted = (up && up < 0x7f80 ? x[i] / scale : 0.0f) + 12582912.0f;  // 1.5 * 2^23: see `round_row`
    memcpy(&most, &shifted, 4);
    to[2 + i] = (char)most;
  }
}

// e4m3 without infinities, to the nearest, ties to even; beyond 448 the largest, infinity and NaN: NaN.
INLINE uint8_t to_fp8(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  const uint8_t sign = (uint8_t)(u >> 24 & 0x80);
  u &= 0x7fffffff;
  if (u >= 0x7f800000) return sign | 0x7f;
  if (u >= 0x43e00000) return sign | 0x7e;
  if (u >= 0x3c800000) return (uint8_t)(sign | ((u - 0x3c000000 + 0x7ffff + (u >> 20 & 1)) >> 20));
  float y;  // subnormal: add 2^14, whose last bit is theirs
  memcpy(&y, &u, 4);
  y += 16384.0f;
  memcpy(&u, &y, 4);
  return (uint8_t)(sign | (u - 0x46800000));
}

static void store_row(void* to, const float* x, int64_t size, int format) {
  if (format == F32) memcpy(to, x, 4 * size);
  else if (format == BF16) narrow_row(x, (half_t*)to, size);
  else if (format == INT8)
    for (int64_t i = 0; i < size; i += SHARE) store_codes((char*)to + i / SHARE * SHARE_BYTES, x + i, min_(SHARE, size - i));
  else if (format == FP8)
    for (int64_t i = 0; i < size; i++) ((uint8_t*)to)[i] = to_fp8(x[i]);
  else
    for (int64_t i = 0; i < size; i++) ((half_t*)to)[i] = to_half(x[i]);
}

template <int FORMAT> INLINE vf load_cached(const void* p, int64_t i) {
  if (FORMAT == F32) return load((const float*)p + i);
  if (FORMAT == INT8) {
    const char* at = (const char*)p + i / SHARE * SHARE_BYTES;
    return from_int8(at + 2 + i % SHARE) * bits((vu)set_word(at) << 16);
  }
  if (FORMAT == FP8) return from_fp8((const uint8_t*)p + i);
  const vh h = loadu<vh>((const half_t*)p + i);
  return FORMAT == BF16 ? widen(h) : from_half(h);
}
template <int FORMAT> INLINE float cached(const void* p, int64_t i) {
  if (FORMAT == F32) return ((const float*)p)[i];
  if (FORMAT == INT8) {
    const char* at = (const char*)p + i / SHARE * SHARE_BYTES;
    uint16_t scale;
    memcpy(&scale, at, 2);
    return (float)(int8_t)at[2 + i % SHARE] * from_bf16(scale);
  }
  if (FORMAT == FP8) return from_fp8(((const uint8_t*)p)[i]);
  return FORMAT == BF16 ? from_bf16(((const half_t*)p)[i]) : from_half(((const half_t*)p)[i]);
}

// ---------------------------------------------------------------------------------------------- attention

constexpr int COLUMNS = 16;  // scored at once
constexpr int QUERIES = 24;  // of one piece of work at most

// Which columns a row reads: 0 .. straight - 1, then those of its path.
struct Reach {
  int32_t straight, count;  // columns in order, and all
  int32_t own, first;       // columns up to its own; first column that it sees whatever the window
  int64_t path;             // where its further columns begin in `paths`
};

// Keys of 16 columns side by side: floats [d, 16], or pairs of bfloat16 [d / 2, 16].
template <bool PAIRS, int FORMAT> INLINE void lay(const void* const* columns, int64_t d, uint32_t* to) {
#if defined(__AVX512F__)
  const int64_t words = PAIRS ? d / 2 : d;
  if (words % 16 == 0) {
    for (int64_t part = 0; part < words / 16; part++) {
      __m512i r[16], t[16];
      UNROLL for (int c = 0; c < 16; c++)
        r[c] = PAIRS ? _mm512_loadu_si512((const char*)columns[c] + 64 * part)
                     : (__m512i)load_cached<FORMAT>(columns[c], 16 * part);
      UNROLL for (int c = 0; c < 16; c += 2) {
        t[c] = _mm512_unpacklo_epi32(r[c], r[c + 1]);
        t[c + 1] = _mm512_unpackhi_epi32(r[c], r[c + 1]);
      }
      UNROLL for (int c = 0; c < 16; c += 4) {
        r[c] = _mm512_unpacklo_epi64(t[c], t[c + 2]);
        r[c + 1] = _mm512_unpackhi_epi64(t[c], t[c + 2]);
        r[c + 2] = _mm512_unpacklo_epi64(t[c + 1], t[c + 3]);
        r[c + 3] = _mm512_unpackhi_epi64(t[c + 1], t[c + 3]);
      }
      UNROLL for (int c = 0; c < 4; c++) {
        t[c] = _mm512_shuffle_i32x4(r[c], r[c + 4], 0x88);
        t[c + 4] = _mm512_shuffle_i32x4(r[c], r[c + 4], 0xdd);
        t[c + 8] = _mm512_shuffle_i32x4(r[c + 8], r[c + 12], 0x88);
        t[c + 12] = _mm512_shuffle_i32x4(r[c + 8], r[c + 12], 0xdd);
      }
      UNROLL for (int c = 0; c < 4; c++) {
        _mm512_storeu_si512(to + 16 * (16 * part + c), _mm512_shuffle_i32x4(t[c], t[c + 8], 0x88));
        _mm512_storeu_si512(to + 16 * (16 * part + c + 8), _mm512_shuffle_i32x4(t[c], t[c + 8], 0xdd));
        _mm512_storeu_si512(to + 16 * (16 * part + c + 4), _mm512_shuffle_i32x4(t[c + 4], t[c + 12], 0x88));
        _mm512_storeu_si512(to + 16 * (16 * part + c + 12), _mm512_shuffle_i32x4(t[c + 4], t[c + 12], 0xdd));
      }
    }
    return;
  }
#elif defined(PACELINE_NEON)
  for (int64_t i = 0; i + LANES <= d; i += LANES)
    UNROLL for (int c = 0; c < COLUMNS; c += LANES) {
      float32x4_t r[4], t[4];
      UNROLL for (int j = 0; j < 4; j++) r[j] = (float32x4_t)load_cached<FORMAT>(columns[c + j], i);
      UNROLL for (int j = 0; j < 2; j++) t[2 * j] = vzip1q_f32(r[j], r[j + 2]), t[2 * j + 1] = vzip2q_f32(r[j], r[j + 2]);
      float* at = (float*)to + COLUMNS * i + c;
      UNROLL for (int j = 0; j < 2; j++) {
        vst1q_f32(at + 2 * j * COLUMNS, vzip1q_f32(t[j], t[j + 2]));
        vst1q_f32(at + (2 * j + 1) * COLUMNS, vzip2q_f32(t[j], t[j + 2]));
      }
    }
  if (d % LANES == 0) return;
#elif defined(__AVX2__)
  if (d % 8 == 0) {
    for (int64_t i = 0; i < d; i += 8)
      UNROLL for (int half = 0; half < 2; half++) {
        __m256 r[8], t[8];
        UNROLL for (int c = 0; c < 8; c++) r[c] = (__m256)load_cached<FORMAT>(columns[8 * half + c], i);
        UNROLL for (int c = 0; c < 8; c += 2) {
          t[c] = _mm256_unpacklo_ps(r[c], r[c + 1]);
          t[c + 1] = _mm256_unpackhi_ps(r[c], r[c + 1]);
        }
        UNROLL for (int c = 0; c < 8; c += 4)
          UNROLL for (int j = 0; j < 2; j++) {
            r[c + 2 * j] = _mm256_shuffle_ps(t[c + j], t[c + j + 2], 0x44);
            r[c + 2 * j + 1] = _mm256_shuffle_ps(t[c + j], t[c + j + 2], 0xee);
          }
        UNROLL for (int j = 0; j < 4; j++) {
          float* at = (float*)to + COLUMNS * (i + j) + 8 * half;
          _mm256_storeu_ps(at, _mm256_permute2f128_ps(r[j], r[j + 4], 0x20));
          _mm256_storeu_ps(at + 4 * COLUMNS, _mm256_permute2f128_ps(r[j], r[j + 4], 0x31));
        }
      }
    return;
  }
#endif
  for (int c = 0; c < COLUMNS; c++) {
    if (PAIRS) {
      for (int64_t i = 0; i < d / 2; i++) memcpy(to + i * COLUMNS + c, (const char*)columns[c] + 4 * i, 4);
    } else {
      for (int64_t i = 0; i < d; i++) {
        const float x = cached<FORMAT>(columns[c], i);
        memcpy(to + i * COLUMNS + c, &x, 4);
      }
    }
  }
}

// scores [16] of N queries, which lie `stride` elements apart.
template <bool PAIRS, int N>
INLINE void score(const uint32_t* keys, const void* const* queries, int64_t d, float* const* to) {
#if defined(__AVX512BF16__)
  if (PAIRS) {
    __m512 sums[N];
    UNROLL for (int q = 0; q < N; q++) sums[q] = _mm512_setzero_ps();
    for (int64_t i = 0; i < d / 2; i++) {
      const __m512bh k = (__m512bh)_mm512_loadu_si512(keys + 16 * i);
      UNROLL for (int q = 0; q < N; q++) {
        int32_t pair;
        memcpy(&pair, (const char*)queries[q] + 4 * i, 4);
        sums[q] = _mm512_dpbf16_ps(sums[q], k, (__m512bh)_mm512_set1_epi32(pair));
      }
    }
    UNROLL for (int q = 0; q < N; q++) _mm512_storeu_ps(to[q], sums[q]);
    return;
  }
#endif
  constexpr int V = COLUMNS / LANES;
  vf sums[N][V];
  const float* x[N];
  UNROLL for (int q = 0; q < N; q++) {
    x[q] = (const float*)queries[q];
    UNROLL for (int v = 0; v < V; v++) sums[q][v] = zero();
  }
  for (int64_t i = 0; i < d; i++) {
    vf k[V];
    UNROLL for (int v = 0; v < V; v++) k[v] = load((const float*)keys + COLUMNS * i + v * LANES);
    UNROLL for (int q = 0; q < N; q++)
      UNROLL for (int v = 0; v < V; v++) sums[q][v] = fma(k[v], set(x[q][i]), sums[q][v]);
  }
  UNROLL for (int q = 0; q < N; q++)
    UNROLL for (int v = 0; v < V; v++) storeu(to[q] + v * LANES, sums[q][v]);
}

template <bool PAIRS>
static void score_all(const uint32_t* keys, const void* const* queries, int count, int64_t d, float* const* to) {
  int q = 0;
  for (; q + 6 <= count; q += 6) score<PAIRS, 6>(keys, queries + q, d, to + q);
  for (; q + 3 <= count; q += 3) score<PAIRS, 3>(keys, queries + q, d, to + q);
  for (; q < count; q++) score<PAIRS, 1>(keys, queries + q, d, to + q);
}

// Scores [from, count) to weights that add up to 1 before `scale_out` is applied; columns are counted from 0, so that
// lane and place of a column in the sum are always the same. sink: the score of no column. Returns 1 / sum.
static float soften(float* s, int64_t from, int64_t count, float scale, float softcap, float sink) {
  const int64_t first = from / COLUMNS * COLUMNS, end = round_up(count, COLUMNS);
  for (int64_t i = first; i < end; i += LANES) {
    vf x = load(s + i) * scale;
    if (softcap > 0) x = softcap * tanh_(x / softcap);
    storeu(s + i, x);
  }
  for (int64_t i = first; i < from; i++) s[i] = -__builtin_inff();
  for (int64_t i = count; i < end; i++) s[i] = -__builtin_inff();
  vf top = set(-__builtin_inff());
  for (int64_t i = first; i < end; i += LANES) {
    const vf x = load(s + i);
    top = x > top || x != x ? x : top;
  }
  float most = max_lanes(top);
  if (sink > most) most = sink;
  constexpr int V = COLUMNS / LANES;
  vf sums[V];
  UNROLL for (int v = 0; v < V; v++) sums[v] = zero();
  for (int64_t i = first; i < end; i += COLUMNS)
    UNROLL for (int v = 0; v < V; v++) {
      const vf e = exp_(load(s + i + v * LANES) - most);
      storeu(s + i + v * LANES, e);
      sums[v] += e;
    }
  UNROLL for (int v = 1; v < V; v++) sums[0] += sums[v];
  return 1.0f / (sum_lanes(sums[0]) + expf(sink - most));
}

struct Slot {  // one sequence's columns of one layer and key head
  const char* keys;
  const char* values;
  int64_t row_bytes;
  const int32_t* paths;
  int64_t column(const Reach& r, int64_t i) const { return i < r.straight ? i : paths[r.path + i - r.straight]; }
};

// N queries, V vectors of values from `begin` on: sums over those of columns [first, end) that are in [from, count), one
// after another. adds: to what is there.
template <int FORMAT, int N, int V>
INLINE void mean_part(const Slot& slot, const Reach* const* reach, float* const* weights, const int64_t* from, int64_t first,
                      int64_t end, bool adds, int64_t begin, float* const* to) {
  vf sums[N][V];
  int64_t starts[N], ends[N], most = first, high = end;
  UNROLL for (int q = 0; q < N; q++) {
    UNROLL for (int v = 0; v < V; v++) sums[q][v] = adds ? load(to[q] + begin + v * LANES) : zero();
    starts[q] = max_(first, from[q]);
    ends[q] = min_(end, reach[q]->count);
    most = max_(most, starts[q]);
    high = min_(high, reach[q]->straight);
  }
  const auto add = [&](int q, int64_t i) {
    const char* p = slot.values + slot.column(*reach[q], i) * slot.row_bytes;
    const vf w = set(weights[q][i]);
    UNROLL for (int v = 0; v < V; v++) sums[q][v] = fma(load_cached<FORMAT>(p, begin + v * LANES), w, sums[q][v]);
  };
  if (N > 1)
    UNROLL for (int q = 0; q < N; q++)
      for (int64_t i = starts[q]; i < min_(most, ends[q]); i++) add(q, i);
  bool same = true;
  UNROLL for (int q = 1; q < N; q++) same &= reach[q] == reach[0];
  if (same) high = min_(end, reach[0]->count);
  for (int64_t i = most; i < high; i++) {
    const char* p = slot.values + slot.column(*reach[0], i) * slot.row_bytes;
    vf x[V];
    UNROLL for (int v = 0; v < V; v++) x[v] = load_cached<FORMAT>(p, begin + v * LANES);
    UNROLL for (int q = 0; q < N; q++) {
      const vf w = set(weights[q][i]);
      UNROLL for (int v = 0; v < V; v++) sums[q][v] = fma(x[v], w, sums[q][v]);
    }
  }
  UNROLL for (int q = 0; q < N; q++)
    for (int64_t i = max_(most, high); i < ends[q]; i++) add(q, i);
  UNROLL for (int q = 0; q < N; q++)
    UNROLL for (int v = 0; v < V; v++) storeu(to[q] + begin + v * LANES, sums[q][v]);
}

template <int FORMAT, int N>
INLINE void mean(const Slot& slot, const Reach* const* reach, float* const* weights, const int64_t* from, int64_t d,
                 float* const* to) {
  constexpr int W = REGISTERS == 32 ? 4 : 2, TILE = 128;  // columns that stay in the first cache for all parts
  int64_t i = 0, low = from[0], end = reach[0]->count;
  UNROLL for (int q = 1; q < N; q++) {
    low = min_(low, from[q]);
    end = max_(end, reach[q]->count);
  }
  for (int64_t tile = low; tile < end; tile += TILE) {
    const int64_t last = min_(end, tile + TILE);
    const bool adds = tile > low;
    i = 0;
    for (; i + W * LANES <= d; i += W * LANES)
      mean_part<FORMAT, N, W>(slot, reach, weights, from, tile, last, adds, i, to);
    for (; i + LANES <= d; i += LANES) mean_part<FORMAT, N, 1>(slot, reach, weights, from, tile, last, adds, i, to);
  }
  for (; i < d; i++)
    UNROLL for (int q = 0; q < N; q++) {
      float sum = 0;
      for (int64_t c = from[q]; c < reach[q]->count; c++)
        sum += weights[q][c] * cached<FORMAT>(slot.values + slot.column(*reach[q], c) * slot.row_bytes, i);
      to[q][i] = sum;
    }
}

// Attention of `count` queries of one sequence and key head; `queries` as `score` reads them. values: numbers of a value.
// sinks: of each, see `soften`.
template <bool PAIRS, int FORMAT>
static void attend(const Slot& slot, const Reach* const* reach, const void* const* queries, int count, int64_t d,
                   int64_t values, int window, float scale, float softcap, const float* sinks, float* scores, int64_t width,
                   uint32_t* keys, float* const* to) {
  int64_t from[QUERIES], begin = 1 << 30, end = 0, shared = 1 << 30;
  float* rows[QUERIES];
  for (int q = 0; q < count; q++) {
    const Reach& r = *reach[q];
    from[q] = window ? max_(0, min_(r.own - window, r.first)) : 0;
    begin = min_(begin, from[q]);
    end = max_(end, r.count);
    if (r.count > r.straight) shared = min_(shared, r.straight);
    rows[q] = scores + q * width;
  }
  const void* columns[COLUMNS];
  float* places[QUERIES];
  begin = begin / COLUMNS * COLUMNS;
  int64_t i = begin;
  for (; i < end && (i + COLUMNS <= shared || shared >= end); i += COLUMNS) {  // columns that all read in one place
    for (int c = 0; c < COLUMNS; c++) columns[c] = slot.keys + min_(i + c, end - 1) * slot.row_bytes;
    lay<PAIRS, FORMAT>(columns, d, keys);
    for (int q = 0; q < count; q++) places[q] = rows[q] + i;
    score_all<PAIRS>(keys, queries, count, d, places);
  }
  for (int q = 0; q < count;) {  // columns of its own: the queries of one row share them
    int same = 1;
    while (q + same < count && reach[q + same] == reach[q]) same++;
    const Reach& r = *reach[q];
    for (int64_t j = i; j < r.count; j += COLUMNS) {
      for (int c = 0; c < COLUMNS; c++) columns[c] = slot.keys + slot.column(r, min_(j + c, r.count - 1)) * slot.row_bytes;
      lay<PAIRS, FORMAT>(columns, d, keys);
      for (int s = 0; s < same; s++) places[s] = rows[q + s] + j;
      score_all<PAIRS>(keys, queries + q, same, d, places);
    }
    q += same;
  }
  float factors[QUERIES];
  for (int q = 0; q < count; q++) factors[q] = soften(rows[q], from[q], reach[q]->count, scale, softcap, sinks[q]);
  constexpr int N = LANES >= 8 || REGISTERS == 32 ? 6 : 2;
  int q = 0;
  for (; q + N <= count; q += N) mean<FORMAT, N>(slot, reach + q, rows + q, from + q, values, to + q);
  for (; q + 3 <= count && N >= 3; q += 3) mean<FORMAT, 3>(slot, reach + q, rows + q, from + q, values, to + q);
  for (; q < count; q++) mean<FORMAT, 1>(slot, reach + q, rows + q, from + q, values, to + q);
  for (int s = 0; s < count; s++)
    for (int64_t k = 0; k < values; k++) to[s][k] *= factors[s];
}

#include "pass.h"

// ---------------------------------------------------------------------------------------------- noise

INLINE double from_bits(uint64_t bits) {
  double x;
  memcpy(&x, &bits, 8);
  return x;
}

// The natural logarithm of a positive normal number, relative error 1e-9, without branches so that it is vectorised.
// x = 2^e m with m between the roots of 1/2 and 2; log m = 2 artanh s with s = (m - 1) / (m + 1).
INLINE double logarithm(double x) {
  constexpr uint64_t ROOT = 0x3FE6A09E667F3BCD, MANTISSA = 0xFFFFFFFFFFFFF;  // ROOT: the bits of the root of 1/2
  uint64_t bits;
  memcpy(&bits, &x, 8);
  bits += 0x3FF0000000000000 - ROOT;
  const double e = from_bits(0x4330000000000000 | bits >> 52) - (0x1p52 + 1023);
  const double m = from_bits((bits & MANTISSA) + ROOT), s = (m - 1) / (m + 1), t = s * s;
  return e * 0.69314718055994531 + 2 * s * (1 + t * (1. / 3 + t * (1. / 5 + t * (1. / 7 + t * (1. / 9 + t * (1. / 11))))));
}

int64_t draw(const float* scores, int64_t size, uint64_t key) { return noisy_argmax(scores, size, key); }

// out[i] = the noise of the token ids[i] under a key, up to rounding.
void gumbel(uint64_t key, const int64_t* ids, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i++) {
    const double u = from_bits(0x3FF0000000000000 | noise_bits(key, ids[i]) >> 12) - (1 - 0x1p-53);
    out[i] = -(float)logarithm(-logarithm(u));
  }
}

}  // namespace PACELINE_ISA
