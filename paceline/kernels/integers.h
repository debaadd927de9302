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

INLINE vi dot_bytes(vi sum, vi codes, const int8_t* four) {
  int32_t bytes;
  memcpy(&bytes, four, 4);
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(bytes));
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
// zero - 8 scale, meets the sum of the inputs. With VNNI a row is bytes, as for INT8. Otherwise there are two sums, one for
// j = 0, 1 and one for j = 2, 3.

#if BYTES_DOT
// A word's bytes under the mask 0x0f0f0f0f hold k = 0, 4, 1, 5, and four bits further on 2, 6, 3, 7.
INLINE bytes as_codes(bytes x) {
  return __builtin_shufflevector(x, x, 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
}

template <int R, int C>
INLINE void int4_part(const Matrix& m, const char* w, const half_t* params, const Input& in, int64_t row, int column,
                      float* out) {
  const int64_t groups = m.ins / m.group, eights = m.group / 8, parts = m.group / 32, stride = in.stride;
  const int8_t *high = in.high4 + row * stride, *low = in.low4 + row * stride;
  vf sums[R][C];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int c = 0; c < C; c++) sums[r][c] = zero();
  for (int64_t g = 0; g < groups; g++) {
    vi h[R][C], l[R][C];
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int c = 0; c < C; c++) h[r][c] = l[r][c] = vi{};
    for (int64_t at = g * eights; at < (g + 1) * eights; at++) {
      int64_t at_low = 8 * at + (low - high);
      __asm__("" : "+r"(at_low));
      vu codes[C];
      UNROLL for (int c = 0; c < C; c++) {
        const char* from = w + (at * BLOCK + column + c * LANES) * 4;
        codes[c] = loadu<vu>(from);
        __builtin_prefetch(from + 8192, 0, 2);
      }
      UNROLL for (int half = 0; half < 2; half++) {
        vi four[C];
        UNROLL for (int c = 0; c < C; c++) four[c] = (vi)(codes[c] >> (4 * half) & 0x0f0f0f0fu);
        UNROLL for (int r = 0; r < R; r++)
          UNROLL for (int c = 0; c < C; c++) {
            h[r][c] = dot_bytes(h[r][c], four[c], high + r * stride + 8 * at + 4 * half);
            l[r][c] = dot_bytes(l[r][c], four[c], high + r * stride + at_low + 4 * half);
          }
      }
    }
    UNROLL for (int c = 0; c < C; c++) {
      const half_t* from = params + (g * BLOCK + column + c * LANES) * 2;
      const vu both = loadu<vu>(from);
      __builtin_prefetch((const char*)from + 2048, 0, 2);
      const vf scale = bits(both << 16), lowest = fma(scale, set(-8.0f), bits(both & 0xffff0000u));
      UNROLL for (int r = 0; r < R; r++) {
        const float* own = in.sums + (row + r) * (stride / 32) + g * parts;
        float total = own[0];
        for (int64_t i = 1; i < parts; i++) total += own[i];
        const vf dot = fma(to_float(l[r][c]), set(1.0f / 254), to_float(h[r][c]));
        sums[r][c] = fma(lowest, set(total), fma(scale, dot, sums[r][c]));
      }
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int c = 0; c < C; c++) storeu(out + r * BLOCK + column + c * LANES, sums[r][c] * in.scales[row + r]);
}
constexpr int int4_columns(int rows) { return rows <= 4 ? 2 : 1; }
#else
INLINE bytes as_codes(bytes x) { return x; }

// Add the products with pair j of each eight, of codes plus 128: 0x4300 | code in bfloat16.
template <int R, int C>
INLINE void add_pair(const vu* codes, int j, const Input& in, int64_t row, int64_t k, vf (*part)[C]) {
  UNROLL for (int c = 0; c < C; c++) {
    const vf even = bits(cut(codes[c] << (16 - 4 * j), 0x000f0000, 0x43000000));
    const vf odd = bits(cut(codes[c] >> (4 * j), 0x000f0000, 0x43000000));
    UNROLL for (int r = 0; r < R; r++) {
      const float* x = in.wide + (row + r) * in.stride + k + 2 * j;
      part[r][c] = fma(odd, set(x[1]), fma(even, set(x[0]), part[r][c]));
    }
  }
}

// The two sums of a group are taken side by side where the registers suffice, so that one does not wait for the other.
template <int R, int C>
INLINE void int4_part(const Matrix& m, const char* w, const half_t* params, const Input& in, int64_t row, int column,
                      float* out) {
  constexpr int SIDES = 3 * R * C <= (LANES == 16 ? 24 : 12) ? 2 : 1;
  const int64_t groups = m.ins / m.group, eights = m.group / 8, parts = m.group / 32;
  vf sums[R][C];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int c = 0; c < C; c++) sums[r][c] = zero();
  for (int64_t g = 0; g < groups; g++) {
    vf scale[C], lowest[C];
    UNROLL for (int c = 0; c < C; c++) {
      const half_t* from = params + (g * BLOCK + column + c * LANES) * 2;
      const vu both = loadu<vu>(from);
      scale[c] = bits(both << 16);
      lowest[c] = fma(scale[c], set(-136.0f), bits(both & 0xffff0000u));
      if (LANES == 16) __builtin_prefetch((const char*)from + 2048, 0, 2);
    }
    UNROLL for (int first = 0; first < 2; first += SIDES) {
      vf part[SIDES][R][C];
      UNROLL for (int s = 0; s < SIDES; s++)
        UNROLL for (int r = 0; r < R; r++)
          UNROLL for (int c = 0; c < C; c++) part[s][r][c] = zero();
      for (int64_t at = g * eights; at < (g + 1) * eights; at++) {
        vu codes[C];
        UNROLL for (int c = 0; c < C; c++) {
          const char* from = w + (at * BLOCK + column + c * LANES) * 4;
          codes[c] = loadu<vu>(from);
          if (LANES == 16 && first == 0) __builtin_prefetch(from + 8192, 0, 2);
        }
        UNROLL for (int s = 0; s < SIDES; s++) {
          add_pair<R, C>(codes, 2 * (first + s), in, row, 8 * at, part[s]);
          add_pair<R, C>(codes, 2 * (first + s) + 1, in, row, 8 * at, part[s]);
        }
      }
      UNROLL for (int s = 0; s < SIDES; s++)
        UNROLL for (int r = 0; r < R; r++)
          UNROLL for (int c = 0; c < C; c++) sums[r][c] = fma(scale[c], part[s][r][c], sums[r][c]);
    }
    UNROLL for (int r = 0; r < R; r++) {
      const float* own = in.sums + (row + r) * (in.stride / 32) + g * parts;
      float total = own[0];
      for (int64_t i = 1; i < parts; i++) total += own[i];
      UNROLL for (int c = 0; c < C; c++) sums[r][c] = fma(lowest[c], set(total), sums[r][c]);
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int c = 0; c < C; c++) storeu(out + r * BLOCK + column + c * LANES, sums[r][c]);
}

constexpr int int4_columns(int rows) { return LANES == 16 ? rows <= 6 ? 2 : 1 : rows <= 2 ? 2 : 1; }
#endif

template <int R>
static void tile_int4(const Matrix& m, const char* w, const Input& in, int64_t row, int64_t block, float* out) {
  constexpr int C = int4_columns(R);
  const half_t* params = (const half_t*)m.scales + block * (m.ins / m.group) * BLOCK * 2;
  for (int column = 0; column < BLOCK; column += C * LANES) int4_part<R, C>(m, w, params, in, row, column, out);
}
