// Tiles over weights of 8 and 4 bits; included by body.cpp.

INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }

#if defined(__AVX512VNNI__)
#define BYTES_DOT 1
#else
#define BYTES_DOT 0
#endif

// INT8: codes [k / 4, 32, 4], one scale an output. With VNNI a row is two rows of bytes, `high` and what it leaves,
// whose products with the codes are summed in int32, exactly; otherwise codes are widened to float32.

#if BYTES_DOT
INLINE vi dot_bytes(vi sum, const uint8_t* four, vi codes) {
  int32_t bytes;
  memcpy(&bytes, four, 4);
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(bytes), (__m512i)codes);
}

// C vectors of outputs from `column` on.
template <int R, int C>
INLINE void int8_part(const char* w, const Input& in, int64_t row, int64_t fours, int column, const int32_t* code_sums,
                      const float* scales, float* out) {
  const uint8_t *high = in.high + row * in.stride, *low = in.low + row * in.stride;
  const int64_t stride = in.stride;
  vi h[R][C], l[R][C];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int c = 0; c < C; c++) h[r][c] = l[r][c] = vi{};
  for (int64_t k = 0; k < fours; k++) {
    int64_t at_low = 4 * k + (low - high);
    __asm__("" : "+r"(at_low));  // unknown to the compiler: it keeps R pointers then, not 2 R
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
                      const float* scales, float* out) {
  const float* x = in.wide + row * in.stride;
  vf sums[R][C];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int c = 0; c < C; c++) sums[r][c] = zero();
  for (int64_t k = 0; k < fours; k++)
    UNROLL for (int c = 0; c < C; c++) {
      const vu codes = loadu<vu>(w + 128 * k + 4 * (column + c * LANES));
      UNROLL for (int j = 0; j < 4; j++) {
        const vf weight = to_float((vi)(codes << (24 - 8 * j)) >> 24);
        UNROLL for (int r = 0; r < R; r++)
          sums[r][c] = fma(weight, set(x[r * in.stride + 4 * k + j]), sums[r][c]);
      }
    }
  UNROLL for (int c = 0; c < C; c++)
    UNROLL for (int r = 0; r < R; r++) {
      const int at = column + c * LANES;
      storeu(out + r * BLOCK + at, sums[r][c] * load(scales + at));
    }
}
#endif

template <int R>
static void tile_int8(const Matrix& m, const char* w, const Input& in, int64_t row, int64_t block, float* out) {
  constexpr int C = BYTES_DOT ? R <= 6 ? 2 : 1 : LANES == 16 ? 2 : R <= 2 ? 4 : 2;
  const int64_t size = 4 * min_(BLOCK, m.outs - block * BLOCK);
  float scales[BLOCK] = {};
  int32_t code_sums[BLOCK] = {};
  memcpy(scales, (const float*)m.scales + block * BLOCK, size);
  if (BYTES_DOT) memcpy(code_sums, m.sums + block * BLOCK, size);
  for (int column = 0; column < BLOCK; column += C * LANES)
    int8_part<R, C>(w, in, row, (m.ins + 3) / 4, column, code_sums, scales, out);
}

// INT4: codes [k / 8, 32] of 32 bits, where bits 4 j hold k = 2 j and bits 16 + 4 j hold k = 2 j + 1. A weight is
// (code - 8) scale + zero. Within a group sums are taken over codes, then scaled, and what was left out of the weights,
// zero - 8 scale, meets the sum of the inputs. A row is two rows of bytes, as for INT8 with VNNI, and sums are integers.

// Adds the products of four codes an output with four inputs. Without VNNI an int32 holds two int16, each of which has room
// for eight such sums.
INLINE void dot_codes(vi& high_sum, vi& low_sum, vi codes, const int8_t* high, const int8_t* low) {
#if defined(__AVX2__)
  int32_t h, l;
  memcpy(&h, high, 4);
  memcpy(&l, low, 4);
#if BYTES_DOT
  high_sum = (vi)_mm512_dpbusd_epi32((__m512i)high_sum, (__m512i)codes, _mm512_set1_epi32(h));
  low_sum = (vi)_mm512_dpbusd_epi32((__m512i)low_sum, (__m512i)codes, _mm512_set1_epi32(l));
#elif defined(__AVX512F__)
  high_sum = (vi)_mm512_add_epi16((__m512i)high_sum, _mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(h)));
  low_sum = (vi)_mm512_add_epi16((__m512i)low_sum, _mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(l)));
#else
  high_sum = (vi)_mm256_add_epi16((__m256i)high_sum, _mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(h)));
  low_sum = (vi)_mm256_add_epi16((__m256i)low_sum, _mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(l)));
#endif
#else
  for (int j = 0; j < 4; j++) low_sum += (codes >> (8 * j) & 15) * (254 * high[j] + low[j]);
#endif
}
INLINE vf sum_codes(vi sum) {
#if defined(__AVX512F__) && !BYTES_DOT
  sum = (vi)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1));
#elif defined(__AVX2__) && !BYTES_DOT
  sum = (vi)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
#endif
  return to_float(sum);
}

// A word's bytes under the mask 0x0f0f0f0f hold k = 0, 4, 1, 5, and four bits further on 2, 6, 3, 7.
static void as_codes(int8_t* x, int64_t size) {
  for (int64_t i = 0; i < size; i += 8) {
    int8_t from[8];
    memcpy(from, x + i, 8);
    for (int k = 0; k < 4; k++) x[i + 2 * k] = from[k], x[i + 2 * k + 1] = from[k + 4];
  }
}

template <int R, int C>
INLINE void int4_part(const Matrix& m, const char* w, const half_t* params, const Input& in, int64_t row, int column,
                      float* out) {
  const int64_t span = BYTES_DOT ? m.group : 32;  // inputs whose products are added as integers
  const int64_t spans = m.ins / span, eights = span / 8, parts = span / 32, stride = in.stride;
  const int8_t *high = in.high4 + row * stride, *low = in.low4 + row * stride;
  vf sums[R][C];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int c = 0; c < C; c++) sums[r][c] = zero();
  for (int64_t i = 0; i < spans; i++) {
    vi h[R][C], l[R][C];
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int c = 0; c < C; c++) h[r][c] = l[r][c] = vi{};
    for (int64_t at = i * eights; at < (i + 1) * eights; at++) {
      int64_t at_low = 8 * at + (low - high);
      __asm__("" : "+r"(at_low));
      vu codes[C];
      UNROLL for (int c = 0; c < C; c++) {
        const char* from = w + (at * BLOCK + column + c * LANES) * 4;
        codes[c] = loadu<vu>(from);
        if (LANES == 16) __builtin_prefetch(from + 8192, 0, 2);
      }
      UNROLL for (int half = 0; half < 2; half++) {
        vi four[C];
        UNROLL for (int c = 0; c < C; c++) four[c] = (vi)(codes[c] >> (4 * half) & 0x0f0f0f0fu);
        UNROLL for (int r = 0; r < R; r++)
          UNROLL for (int c = 0; c < C; c++) {
            const int8_t* from = high + r * stride + 4 * half;
            dot_codes(h[r][c], l[r][c], four[c], from + 8 * at, from + at_low);
          }
      }
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
          __asm__("" : "+r"(j));  // mostly one or two: not worth the vector loop that GCC makes of it
          total += own[j];
        }
        const vf dot = fma(sum_codes(l[r][c]), set(1.0f / 254), sum_codes(h[r][c]));
        sums[r][c] = fma(lowest, set(total), fma(scale, dot, sums[r][c]));
      }
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int c = 0; c < C; c++) storeu(out + r * BLOCK + column + c * LANES, sums[r][c] * in.scales[row + r]);
}

template <int R>
static void tile_int4(const Matrix& m, const char* w, const Input& in, int64_t row, int64_t block, float* out) {
  // With 32 registers two vectors of outputs share what is loaded of a row, for up to six rows; more are two halves.
  constexpr int SOME = LANES == 16 && R > 6 ? R / 2 : R, REST = R - SOME;
  constexpr int C = LANES == 16 ? 2 : R == 1 ? 4 : R == 2 ? 2 : 1;
  const half_t* params = (const half_t*)m.scales + block * (m.ins / m.group) * BLOCK * 2;
  for (int column = 0; column < BLOCK; column += C * LANES) {
    int4_part<SOME, C>(m, w, params, in, row, column, out);
    if constexpr (REST > 0) int4_part<REST, C>(m, w, params, in, row + SOME, column, out + SOME * BLOCK);
  }
}
