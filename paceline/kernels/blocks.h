// Products with quantised weights; included by body.cpp.
//
// Inputs are integers of 8 bits, with a scale for every 32 of them or every 256, as many as share d in the weights. The
// sums of such a chunk are integers, so that they are exact, whatever the order; chunks are then added one after another
// in float32. So every instruction set gives the same bits, but for the portable one, which has no fused multiply-add.
//
// Inputs of 16 bits are two rows of 8 bits, whose products are added at the end: the upper part, and the remainder, which
// counts 1 / 254 of it.

#if defined(__AVX512VNNI__)
#define BYTES_DOT 1
#else
#define BYTES_DOT 0
#endif

INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }

// The scales of up to 256 inputs of LANES outputs.
struct Scales {
  alignas(64) vi scales[16];  // for each `sub` inputs: as int32, or as two int16, both the same
  alignas(64) vi mins[8];     // two int16, of two times `sub` inputs
  alignas(64) vf d[8], e[8];  // of every `each` inputs
};

// Whether products are summed in 32 bits, and codes have no sign: with AVX2, two products are added in 16 bits, and the
// sign of a code goes to the input.
#if defined(__AVX2__) && !BYTES_DOT
constexpr bool IN_32_BITS = false;
#else
constexpr bool IN_32_BITS = true;
#endif

INLINE vf scales_of(const BlockFormat& f, const uint8_t* at) {
  const vh h = loadu<vh>(at);
  return f.is_bf16 ? widen(h) : from_half(h);
}

// What codes of four bits stand for, `add` added.
INLINE vu look_up(vu codes, const int8_t* values, int add) {
  alignas(64) uint8_t table[16];
  for (int i = 0; i < 16; i++) table[i] = (uint8_t)(values[i] + add);
#if defined(__AVX512F__)
  return (vu)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table)), (__m512i)codes);
#elif defined(__AVX2__)
  return (vu)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table)), (__m256i)codes);
#else
  for (size_t i = 0; i < sizeof codes; i++) ((uint8_t*)&codes)[i] = table[((uint8_t*)&codes)[i]];
  return codes;
#endif
}

// Pairs of bytes as pairs of int16.
template <bool SIGNED> INLINE vi widen_pairs(const uint8_t* at) {
#if defined(__AVX512F__)
  const __m256i x = _mm256_loadu_si256((const __m256i*)at);
  return (vi)(SIGNED ? _mm512_cvtepi8_epi16(x) : _mm512_cvtepu8_epi16(x));
#elif defined(__AVX2__)
  const __m128i x = _mm_loadu_si128((const __m128i*)at);
  return (vi)(SIGNED ? _mm256_cvtepi8_epi16(x) : _mm256_cvtepu8_epi16(x));
#else
  vi pairs;
  for (int i = 0; i < LANES; i++)
    pairs[i] = SIGNED ? ((int8_t)at[2 * i] & 0xffff) | (int8_t)at[2 * i + 1] * 65536 : at[2 * i] | at[2 * i + 1] << 16;
  return pairs;
#endif
}

// Codes of 8 bits with a sign: two of their products with inputs of 8 bits just fit 16 bits.
constexpr bool is_wide(const BlockFormat& f) { return f.bits == 8 || f.values == IQ4_VALUES; }
constexpr int WIDE_OFFSET = IN_32_BITS ? 128 : 0;  // makes them positive
constexpr int offset_of(const BlockFormat& f) { return is_wide(f) ? WIDE_OFFSET : f.offset; }

// Fours of inputs whose products are added without a scale: all that share one, or as many as 16 bits hold.
constexpr int fours_of(const BlockFormat& f) {
  if (IN_32_BITS) return (f.sub ? f.sub : 32) / 4;
  const int largest = f.values ? 24 : (1 << f.bits) - 1, fours = is_wide(f) ? 1 : 32767 / (2 * 127 * largest);
  return fours >= 8 && f.sub != 16 ? 8 : fours >= 4 ? 4 : fours >= 2 ? 2 : 1;
}

constexpr int64_t header_bytes(const BlockFormat& f) { return (2 * COLUMN + scale_bytes(f)) * (1 + f.has_mins); }
constexpr int64_t group_stride(const BlockFormat& f) { return f.sub ? plane_bytes(f) : record_bytes(f); }

// The scales of `groups` times 32 inputs, of the outputs from lane `first` of a column on.
template <int FORMAT> INLINE void unpack_scales(const uint8_t* record, int groups, int first, Scales& to) {
  constexpr BlockFormat f = block_format(FORMAT);
  for (int at = 0; at < groups * 32 / f.each; at++, record += record_bytes(f)) {
    to.d[at] = scales_of(f, record + 2 * first);
    if (f.has_mins) to.e[at] = scales_of(f, record + 2 * (COLUMN + first));
    for (int j = 0; f.sub && j < f.each / f.sub / 2; j++) {
      const uint8_t* pairs = record + 2 * COLUMN * (1 + f.has_mins) + 2 * (COLUMN * j + first);
      const vi both = widen_pairs<true>(pairs);
      to.scales[2 * j] = IN_32_BITS ? both << 16 >> 16 : (both & 0xffff) | both << 16;
      to.scales[2 * j + 1] = IN_32_BITS ? both >> 16 : (vi)((vu)both >> 16) | (both & (int)0xffff0000);
      to.mins[j] = f.has_mins ? widen_pairs<false>(pairs + scale_bytes(f)) : both;
    }
  }
}

// The codes of four inputs of LANES outputs, a byte each. planes: of 32 inputs, at the first output.
template <int FORMAT> INLINE vi codes_of(const uint8_t* planes, int four) {
  constexpr BlockFormat f = block_format(FORMAT);
  constexpr int LOW = low_bits(f.bits), HIGH = f.bits - LOW;
  const BitPlace lower = place_of_bits(LOW, 4 * four, 0);
  vu codes = loadu<vu>(planes + lower.byte);
  if (LOW < 8) codes = codes >> lower.shift & 0x01010101u * ((1 << LOW) - 1);
  if constexpr (HIGH > 0) {
    const BitPlace upper = place_of_bits(HIGH, 4 * four, 0);
    codes |= (loadu<vu>(planes + 64 * LOW + upper.byte) >> upper.shift & 0x01010101u * ((1 << HIGH) - 1)) << LOW;
  }
  if (f.values) codes = look_up(codes, f.values, is_wide(f) ? WIDE_OFFSET : 0);
  else if (is_wide(f) && WIDE_OFFSET) codes ^= 0x80808080u;
  return (vi)codes;
}

INLINE vi set_int(int32_t x) {
#if defined(__AVX512F__)
  return (vi)_mm512_set1_epi32(x);
#elif defined(__AVX2__)
  return (vi)_mm256_set1_epi32(x);
#else
  return vi{x, x, x, x};
#endif
}
template <class T> INLINE vi set_word(const T* at) {
  int32_t x;
  memcpy(&x, at, 4);
  return set_int(x);
}

// Products of two int16 with two others, added.
INLINE vi dot_pairs(vi a, vi b) {
#if defined(__AVX512F__)
  return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// Keeps a value where it is: GCC would otherwise compute many of them ahead, and run out of registers.
#if defined(__AVX512F__)
INLINE void settle(vi& sum) { __asm__("" : "+v"(sum)); }
#elif defined(__AVX2__)
INLINE void settle(vi& sum) { __asm__("" : "+x"(sum)); }
#else
INLINE void settle(vi&) {}
#endif
INLINE void settle(const int8_t*& pointer) { __asm__("" : "+r"(pointer)); }

constexpr int HALVES = COLUMN / LANES;  // of a column, which share its lines of the cache
constexpr int64_t AHEAD = 2432;         // bytes that are fetched ahead: about one record

// sums[r] += the products of 32 inputs with those of R rows, which move on.
template <int FORMAT, int R>
INLINE void dot_group(const uint8_t* planes, const char* fetch, const vi* scales, const int8_t** rows, vi* sums) {
  constexpr BlockFormat f = block_format(FORMAT);
  constexpr bool WIDE = !IN_32_BITS && is_wide(f);
  constexpr int N = fours_of(f);
  UNROLL for (int i = 0; i < (f.bits + HALVES - 1) / HALVES; i++) __builtin_prefetch(fetch + 64 * HALVES * i, 0, 3);
  UNROLL for (int part = 0; part < 8 / N; part++) {
    vi some[R];  // as int32, or as two int16 that are still to be added
    UNROLL for (int n = 0; n < N; n++) {
      const vi four = codes_of<FORMAT>(planes, N * part + n);
#if defined(__AVX512F__) && !BYTES_DOT
      const __m512i size = WIDE ? _mm512_abs_epi8((__m512i)four) : (__m512i)four;
      const __mmask64 negative = WIDE ? _mm512_movepi8_mask((__m512i)four) : 0;
#elif defined(__AVX2__) && !BYTES_DOT
      const __m256i size = WIDE ? _mm256_abs_epi8((__m256i)four) : (__m256i)four;
#endif
      UNROLL for (int r = 0; r < R; r++) {
        const int8_t* at = rows[r] + 4 * (N * part + n);
#if BYTES_DOT
        const __m512i sum = n ? (__m512i)some[r] : _mm512_setzero_si512();
        some[r] = (vi)_mm512_dpbusd_epi32(sum, (__m512i)four, (__m512i)set_word(at));
#elif defined(__AVX512F__)
        __m512i row = (__m512i)set_word(at);
        if (WIDE) row = _mm512_mask_sub_epi8(row, negative, _mm512_setzero_si512(), row);
        const __m512i two = _mm512_maddubs_epi16(size, row);
        some[r] = (vi)(n ? _mm512_add_epi16((__m512i)some[r], two) : two);
#elif defined(__AVX2__)
        const __m256i row = WIDE ? _mm256_sign_epi8((__m256i)set_word(at), (__m256i)four) : (__m256i)set_word(at);
        const __m256i two = _mm256_maddubs_epi16(size, row);
        some[r] = (vi)(n ? _mm256_add_epi16((__m256i)some[r], two) : two);
#else
        if (n == 0) some[r] = vi{};
        UNROLL for (int i = 0; i < 4; i++) some[r] += (four >> 8 * i & 255) * (int32_t)at[i];
#endif
        settle(some[r]);
      }
    }
    const vi scale = f.sub ? scales[N * part * 4 / f.sub] : set_int(IN_32_BITS ? 1 : 0x00010001);
    UNROLL for (int r = 0; r < R; r++) sums[r] += IN_32_BITS ? some[r] * scale : dot_pairs(some[r], scale);
  }
  UNROLL for (int r = 0; r < R; r++) {
    rows[r] += 32;
    settle(rows[r]);
  }
}

// out [R, LANES] += the products of `groups` times 32 inputs, at most 256, from `begin` on. planes: of the first of them.
template <int FORMAT, int R>
__attribute__((noinline)) static void multiply_chunk(const Scales& w, const uint8_t* planes, const char* fetch, int groups,
                                                     const Bytes& in, int64_t row, int64_t begin, float* out) {
  constexpr BlockFormat f = block_format(FORMAT);
  constexpr int OFFSET = offset_of(f), SUB = f.sub ? f.sub : 32;
  const int64_t stride = in.stride, at = row * stride + begin;
  const int8_t* rows[R];
  UNROLL for (int r = 0; r < R; r++) rows[r] = in.codes + at + r * stride;
  vi sums[R];
  if (f.sub) UNROLL for (int r = 0; r < R; r++) sums[r] = vi{};
  for (int g = 0; g < groups; g++, planes += group_stride(f), fetch += group_stride(f)) {
    if (!f.sub) UNROLL for (int r = 0; r < R; r++) sums[r] = vi{};
    dot_group<FORMAT, R>(planes, fetch, w.scales + 32 / SUB * g, rows, sums);
    if (f.sub) continue;
    UNROLL for (int r = 0; r < R; r++) {
      const int64_t here = (at + r * stride) / 32 + g;
      const vi less = OFFSET ? sums[r] - set_int(OFFSET * in.sums[here]) : sums[r];
      vf sum = fma(to_float(less), w.d[g] * set(in.scales[here]), load(out + r * BLOCK));
      if (f.has_mins) sum = fma(w.e[g], set(in.scales[here] * in.sums[here]), sum);
      storeu(out + r * BLOCK, sum);
    }
  }
  if (f.sub) UNROLL for (int r = 0; r < R; r++) {
    const int16_t* totals = (SUB == 16 ? in.halves : in.sums) + (at + r * stride) / SUB;
    const vf scale = set(in.scales[(at + r * stride) / 256]);
    vi low = {};
    if (f.has_mins || OFFSET)
      UNROLL for (int j = 0; j < 128 / SUB; j++) low += dot_pairs(w.mins[j], set_word(totals + 2 * j));
    vf sum = load(out + r * BLOCK);
    if (f.has_mins) sum = fma(to_float(low), w.e[0] * scale, sum);
    else sums[r] -= low * OFFSET;
    storeu(out + r * BLOCK, fma(to_float(sums[r]), w.d[0] * scale, sum));
  }
}

template <int FORMAT, int R> struct RowsOfChunk {
  template <class... Args> static void run(int rows, const Args&... args) {
    if (rows == R) multiply_chunk<FORMAT, R>(args...);
    else RowsOfChunk<FORMAT, R - 1>::run(rows, args...);
  }
};
template <int FORMAT> struct RowsOfChunk<FORMAT, 0> {
  template <class... Args> static void run(int, const Args&...) {}
};

constexpr int BLOCK_ROWS = LANES == 4 ? 2 : 6;  // whose sums stay in registers

// out [rows, 32] of one block: the products with rows of 8 bits.
template <int FORMAT>
__attribute__((noinline)) static void multiply_bytes(const Matrix& m, const Bytes& in, int64_t row, int rows, int64_t block,
                                                     float* out) {
  constexpr BlockFormat f = block_format(FORMAT);
  const int64_t records = m.ins / f.each, bytes = records * record_bytes(f), at_once = 256 / f.each;
  const int tiles = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  memset(out, 0, 4 * (size_t)rows * BLOCK);
  Scales scales;
  for (int column = 0; column < BLOCK; column += COLUMN) {
    const uint8_t* record = (const uint8_t*)m.data + (2 * block + column / COLUMN) * bytes;
    for (int64_t i = 0; i < records; i += at_once) {
      const int64_t count = min_(at_once, records - i);
      const int groups = (int)count * f.each / 32;
      for (int first = 0; first < COLUMN; first += LANES) {
        unpack_scales<FORMAT>(record, groups, first, scales);
        const uint8_t* planes = record + header_bytes(f) + 4 * first;
        const char* fetch = (const char*)record + AHEAD + 64 * first / LANES;
        float* to = out + column + first;
        for (int t = 0; t < tiles; t++) {
          const int begin = rows * t / tiles, number = rows * (t + 1) / tiles - begin;
          RowsOfChunk<FORMAT, BLOCK_ROWS>::run(number, scales, planes, fetch, groups, in, row + begin, i * f.each,
                                               to + begin * BLOCK);
        }
      }
      record += count * record_bytes(f);
    }
  }
}

static void multiply_bytes(const Matrix& m, const Bytes& in, int64_t row, int rows, int64_t block, float* out) {
  switch (m.format) {
#define CASE(FORMAT) case FORMAT: return multiply_bytes<FORMAT>(m, in, row, rows, block, out);
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
    return multiply_bytes(m, x, row, rows, block, out);
  }
  alignas(LINE) float both[2 * GROUP * BLOCK];
  multiply_bytes(m, x, 2 * row, 2 * rows, block, both);
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < BLOCK; i += LANES)
      storeu(out + r * BLOCK + i, load(both + 2 * r * BLOCK + i) + load(both + (2 * r + 1) * BLOCK + i));
}

// Rounds a row to integers, the largest of each `each` numbers to 127; a second part is the remainder.
static void round_row(const float* x, int64_t size, int64_t row, int64_t each, const Bytes& to) {
  const vf magic = set(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, the lowest bits of the sum
  for (int64_t first = 0; first < to.stride; first += each) {
    alignas(64) float part[256] = {};
    if (first < size) memcpy(part, x + first, 4 * min_(each, size - first));
    vu most_bits = {};  // absolute values are ordered as their bits are, infinity and NaN last
    for (int64_t i = 0; i < each; i += LANES) {
      const vu magnitude = loadu<vu>(part + i) & 0x7fffffffu;
      most_bits = magnitude > most_bits ? magnitude : most_bits;
    }
    uint32_t largest = 0x0da24260;  // 1e-30
    for (int i = 0; i < LANES; i++) largest = most_bits[i] > largest ? most_bits[i] : largest;
    float most;
    memcpy(&most, &largest, 4);
    for (int p = 0; p < to.parts; p++) {
      const int64_t at = (row * to.parts + p) * to.stride + first;
      to.scales[at / each] = largest >= 0x7f800000u ? __builtin_nanf("") : p ? most / 127 / 254 : most / 127;
      for (int64_t i = 0; i < each; i += LANES) {
        const vf y = load(part + i) * (127 / most), high = y + magic;
        const vf rounded = p ? (y - (high - magic)) * 254.0f + magic : high;
        storeu(to.codes + at + i, __builtin_convertvector(ubits(rounded) & 0xff, bytes));
      }
      for (int64_t i = 0; i < each; i += 32) {
        int32_t half[2] = {};
        for (int k = 0; k < 32; k++) half[k / 16] += to.codes[at + i + k];
        to.halves[(at + i) / 16] = (int16_t)half[0];
        to.halves[(at + i) / 16 + 1] = (int16_t)half[1];
        to.sums[(at + i) / 32] = (int16_t)(half[0] + half[1]);
      }
    }
  }
}
