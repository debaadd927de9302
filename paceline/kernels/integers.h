// Tiles over weights of 8 and 4 bits; included by body.cpp.

INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }

// A row of inputs is rounded to integers of 16 bits, and products are summed in int32, exactly. With VNNI each of these
// is two bytes, `high` and the remainder `low`.
#if defined(__AVX512VNNI__)
#define BYTES_DOT 1
constexpr float STEPS = 127;  // of `high` for the largest number of a row; each of them is 254 steps of `low`
#else
#define BYTES_DOT 0
constexpr float STEPS = 32767;

// Adds the products of two inputs with two codes an output, which are the halves of a word.
INLINE vi dot_words(vi sum, const int16_t* two, vi codes) {
  int32_t pair;
  memcpy(&pair, two, 4);
#if defined(__AVX512F__)
  sum = (vi)_mm512_add_epi32((__m512i)sum, _mm512_madd_epi16((__m512i)codes, _mm512_set1_epi32(pair)));
  __asm__("" : "+v"(sum));
#elif defined(__AVX2__)
  sum = (vi)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16((__m256i)codes, _mm256_set1_epi32(pair)));
  __asm__("" : "+x"(sum));  // otherwise GCC adds products to each other first, and runs out of registers
#else
  sum += (codes << 16 >> 16) * two[0] + (codes >> 16) * two[1];
#endif
  return sum;
}
#endif

// Writes a row in the order of the codes.
INLINE void order_codes(const Input& in, int64_t row) {
  const int64_t begin = row * in.stride, end = begin + in.stride;
#if BYTES_DOT  // a word's bytes under the mask 0x0f0f0f0f hold k = 0, 4, 1, 5, and four bits further on 2, 6, 3, 7
  int8_t* both[] = {in.high4, in.low4};
  for (int8_t* x : both)
    for (int64_t i = begin; in.sums && i < end; i += 8) {
      int8_t from[8];
      memcpy(from, x + i, 8);
      for (int k = 0; k < 4; k++) x[i + 2 * k] = from[k], x[i + 2 * k + 1] = from[k + 4];
    }
#else  // the halves of a word of INT8 hold k = 0 and 2, and then 1 and 3
  for (int64_t i = begin; in.words8 && i < end; i += 4) {
    const int16_t second = in.words8[i + 1];
    in.words8[i + 1] = in.words8[i + 2], in.words8[i + 2] = second;
  }
#endif
}

// INT8: codes [k / 4, 32, 4], one scale an output.

#if BYTES_DOT
INLINE vi dot_bytes(vi sum, const uint8_t* four, vi codes) {
  int32_t bytes;
  memcpy(&bytes, four, 4);
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(bytes), (__m512i)codes);
}
INLINE vi dot_codes(vi sum, vi codes, const int8_t* four) {
  int32_t bytes;
  memcpy(&bytes, four, 4);
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(bytes));
}

// C vectors of outputs, the first at `column`.
template <int R, int C>
INLINE void int8_part(const char* w, const Input& in, int64_t row, int64_t fours, int column, const int32_t* code_sums,
                      const float* scales, Ahead, float* out) {
  const uint8_t *high = in.high + row * in.stride, *low = in.low + row * in.stride;
  const int64_t stride = in.stride;
  vi h[R][C], l[R][C];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int c = 0; c < C; c++) h[r][c] = l[r][c] = vi{};
  for (int64_t k = 0; k < fours; k++) {
    int64_t at_low = 4 * k + (low - high);
    __asm__("" : "+r"(at_low));  // hides its value from the compiler, which then keeps R pointers, not 2 R
    vi codes[C];
    UNROLL for (int c = 0; c < C; c++) {
      const char* at = w + 128 * k + 4 * column + 64 * c;
      _mm_prefetch(at + 8192, _MM_HINT_T1);
      codes[c] = loadu<vi>(at);
    }
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int c = 0; c < C; c++) {
        h[r][c] = dot_bytes(h[r][c], high + r * stride + 4 * k, codes[c]);
        l[r][c] = dot_bytes(l[r][c], high + r * stride + at_low, codes[c]);
      }
  }
  UNROLL for (int c = 0; c < C; c++) {
    const int at = column + c * LANES;
    const vi offset = (vi)(loadu<vu>(code_sums + at) * 128);  // bytes are stored with 128 added
    UNROLL for (int r = 0; r < R; r++) {
      const vf coarse = to_float((vi)((vu)h[r][c] - (vu)offset)), fine = to_float((vi)((vu)l[r][c] - (vu)offset));
      storeu(out + r * BLOCK + at, fma(fine, set(1.0f / 254), coarse) * load(scales + at) * in.scales[row + r]);
    }
  }
}
#else
template <int R, int C>
INLINE void int8_part(const char* w, const Input& in, int64_t row, int64_t fours, int column, const int32_t*,
                      const float* scales, Ahead ahead, float* out) {
  const int16_t* x = in.words8 + row * in.stride;
  const int64_t stride = in.stride;
  vf sums[R][C];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int c = 0; c < C; c++) sums[r][c] = zero();
  for (int64_t first = 0; first < fours; first += 128) {  // int32 holds 512 products of 8 and 16 bits
    vi dots[R][C];
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int c = 0; c < C; c++) dots[r][c] = vi{};
    for (int64_t k = first; k < min_(first + 128, fours); k++) {
      const char* at = w + 128 * k + 4 * column;
      if (C < PER_BLOCK) ahead.fetch<1>();  // the processor itself follows a single sweep
      UNROLL for (int odd = 0; odd < 2; odd++) {
        __asm__("" : "+r"(at));  // forces a second load, which leaves registers for six rows
        vi codes[C];
        UNROLL for (int c = 0; c < C; c++) {
          const vs both = loadu<vs>(at + 4 * c * LANES);
          codes[c] = (vi)(odd ? both >> 8 : both << 8 >> 8);
        }
        UNROLL for (int r = 0; r < R; r++)
          UNROLL for (int c = 0; c < C; c++)
            dots[r][c] = dot_words(dots[r][c], x + r * stride + 4 * k + 2 * odd, codes[c]);
      }
    }
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int c = 0; c < C; c++) sums[r][c] += to_float(dots[r][c]);
  }
  UNROLL for (int c = 0; c < C; c++) {
    const vf scale = load(scales + column + c * LANES);
    UNROLL for (int r = 0; r < R; r++)
      storeu(out + r * BLOCK + column + c * LANES, sums[r][c] * scale * in.scales[row + r]);
  }
}
#endif

template <int R>
static void tile_int8(const Matrix& m, const char* w, const Input& in, int64_t row, int64_t block, Ahead ahead,
                      float* out) {
  constexpr int C = BYTES_DOT ? R <= 6 ? 2 : 1 : columns_of(R, false);
  const int64_t size = 4 * min_(BLOCK, m.outs - block * BLOCK);
  float scales[BLOCK] = {};
  int32_t code_sums[BLOCK] = {};
  memcpy(scales, (const float*)m.scales + block * BLOCK, size);
  if (BYTES_DOT) memcpy(code_sums, m.sums + block * BLOCK, size);
  for (int column = 0; column < BLOCK; column += C * LANES) {
    int8_part<R, C>(w, in, row, (m.ins + 3) / 4, column, code_sums, scales, ahead, out);
    ahead.at += (m.ins + 3) / 4 * ahead.step;
  }
}

// INT4: codes [k / 8, 32] of 32 bits, where bits 4 j hold k = 2 j and bits 16 + 4 j hold k = 2 j + 1. A weight is
// (code - 8) scale + zero. Within a group the products with codes are summed and then scaled; the constant part of the
// weights, zero - 8 scale, is multiplied by the sum of the inputs.

template <int R, int C>
INLINE void int4_part(const Matrix& m, const char* w, const half_t* params, const Input& in, int64_t row, int column,
                      Ahead ahead, float* out) {
  const int64_t span = BYTES_DOT || m.group <= 4096 ? m.group : 32;  // inputs whose products are added as integers
  const int64_t spans = m.ins / span, eights = span / 8, parts = span / 32, stride = in.stride;
  vf sums[R][C];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int c = 0; c < C; c++) sums[r][c] = zero();
  for (int64_t i = 0; i < spans; i++) {
    vi dots[1 + BYTES_DOT][R][C];
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int c = 0; c < C; c++) dots[BYTES_DOT][r][c] = vi{}, dots[0][r][c] = vi{};
    for (int64_t at = i * eights; at < (i + 1) * eights; at++) {
      const char* from = w + (at * BLOCK + column) * 4;
#if BYTES_DOT
      const int8_t* x = in.high4 + row * stride;
      int64_t at_low = 8 * at + (in.low4 - in.high4);
      __asm__("" : "+r"(at_low));
      vu words[C];
      UNROLL for (int c = 0; c < C; c++) {
        words[c] = loadu<vu>(from + 4 * c * LANES);
        __builtin_prefetch(from + 4 * c * LANES + 8192, 0, 2);
      }
      UNROLL for (int half = 0; half < 2; half++) {
        vi codes[C];
        UNROLL for (int c = 0; c < C; c++) codes[c] = (vi)(words[c] >> (4 * half) & 0x0f0f0f0fu);
        UNROLL for (int r = 0; r < R; r++)
          UNROLL for (int c = 0; c < C; c++) {
            const int8_t* high = x + r * stride + 4 * half;
            dots[0][r][c] = dot_codes(dots[0][r][c], codes[c], high + 8 * at);
            dots[1][r][c] = dot_codes(dots[1][r][c], codes[c], high + at_low);
          }
      }
#else
      if (C < PER_BLOCK) ahead.fetch<1>();
      UNROLL for (int j = 0; j < 4; j++) {
        __asm__("" : "+r"(from));
        vi codes[C];
        UNROLL for (int c = 0; c < C; c++) codes[c] = (vi)(loadu<vu>(from + 4 * c * LANES) >> (4 * j) & 0x000f000fu);
        UNROLL for (int r = 0; r < R; r++)
          UNROLL for (int c = 0; c < C; c++)
            dots[0][r][c] = dot_words(dots[0][r][c], in.words4 + (row + r) * stride + 8 * at + 2 * j, codes[c]);
      }
#endif
    }
    UNROLL for (int c = 0; c < C; c++) {
      const half_t* from = params + (i * span / m.group * BLOCK + column + c * LANES) * 2;
      const vu both = loadu<vu>(from);
      if (LANES == 16) __builtin_prefetch((const char*)from + 2048, 0, 2);
      const vf scale = bits(both << 16), lowest = fma(scale, set(-8.0f), bits(both & 0xffff0000u));
      UNROLL for (int r = 0; r < R; r++) {
        const float* own = in.sums + (row + r) * (stride / 32) + i * parts;
        float total = own[0];
        for (int64_t j = 1; j < parts; j++) {
          __asm__("" : "+r"(j));  // mostly one or two, which is too few for the vector loop that GCC would make
          total += own[j];
        }
        vf dot = to_float(dots[0][r][c]);
        if (BYTES_DOT) dot = fma(to_float(dots[BYTES_DOT][r][c]), set(1.0f / 254), dot);
        sums[r][c] = fma(lowest, set(total), fma(scale, dot, sums[r][c]));
      }
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int c = 0; c < C; c++) storeu(out + r * BLOCK + column + c * LANES, sums[r][c] * in.scales[row + r]);
}

template <int R>
static void tile_int4(const Matrix& m, const char* w, const Input& in, int64_t row, int64_t block, Ahead ahead,
                      float* out) {
  // With 32 registers two vectors of outputs share what is loaded of a row, for up to six rows; more are two halves.
  constexpr int SOME = LANES == 16 && R > 6 ? R / 2 : R, REST = R - SOME;
  constexpr int C = columns_of(R, false);
  const half_t* params = (const half_t*)m.scales + block * (m.ins / m.group) * BLOCK * 2;
  for (int column = 0; column < BLOCK; column += C * LANES) {
    int4_part<SOME, C>(m, w, params, in, row, column, ahead, out);
    if constexpr (REST > 0) int4_part<REST, C>(m, w, params, in, row + SOME, column, ahead, out + SOME * BLOCK);
    ahead.at += m.ins / 8 * ahead.step;
  }
}
