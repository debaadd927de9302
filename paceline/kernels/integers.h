// Tiles over weights of 8 and 4 bits; included by body.cpp.

INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }

#if defined(__AVX512BF16__)
#define BYTES_DOT 1
#else
#define BYTES_DOT 0
#endif

// INT8: codes [k / 4, 32, 4], one scale an output. With VNNI a row is two rows of bytes, `high` and what it leaves over,
// whose products with the codes are summed in int32, exactly; otherwise codes are widened to float32.
template <int R>
static void tile_int8(const Matrix& m, const char* w, const Input& in, int64_t row, int64_t block, float* out) {
  const int64_t fours = (m.ins + 3) / 4;
  float scales[BLOCK] = {};
  memcpy(scales, (const float*)m.scales + block * BLOCK, 4 * min_(BLOCK, m.outs - block * BLOCK));
#if BYTES_DOT
  const uint8_t* high = in.high + row * in.stride;
  const uint8_t* low = in.low + row * in.stride;
  int32_t code_sums[BLOCK] = {};
  memcpy(code_sums, m.sums + block * BLOCK, 4 * min_(BLOCK, m.outs - block * BLOCK));
  for (int column = 0; column < BLOCK; column += 16) {
    __m512i sums[R][2];
    UNROLL for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = _mm512_setzero_si512();
    for (int64_t k = 0; k < fours; k++) {
      _mm_prefetch(w + 128 * k + 4 * column + 8192, _MM_HINT_T1);
      const __m512i codes = _mm512_loadu_si512(w + 128 * k + 4 * column);
      UNROLL for (int r = 0; r < R; r++) {
        int32_t h, l;
        memcpy(&h, high + r * in.stride + 4 * k, 4);
        memcpy(&l, low + r * in.stride + 4 * k, 4);
        sums[r][0] = _mm512_dpbusd_epi32(sums[r][0], _mm512_set1_epi32(h), codes);
        sums[r][1] = _mm512_dpbusd_epi32(sums[r][1], _mm512_set1_epi32(l), codes);
      }
    }
    const vi offset = 128 * loadu<vi>(code_sums + column);  // bytes are stored with 128 added
    UNROLL for (int r = 0; r < R; r++) {
      const vf h = to_float((vi)sums[r][0] - offset), l = to_float((vi)sums[r][1] - offset);
      storeu(out + r * BLOCK + column, fma(l, set(1.0f / 254), h) * load(scales + column) * in.scales[row + r]);
    }
  }
#else
  const float* x = in.wide + row * in.stride;
  for (int column = 0; column < BLOCK; column += LANES) {
    vf sums[R];
    UNROLL for (int r = 0; r < R; r++) sums[r] = zero();
    for (int64_t k = 0; k < fours; k++) {
      const vu codes = loadu<vu>(w + 128 * k + 4 * column);
      UNROLL for (int j = 0; j < 4; j++) {
        const vf weight = to_float((vi)(codes << (24 - 8 * j)) >> 24);
        UNROLL for (int r = 0; r < R; r++) sums[r] = fma(weight, set(x[r * in.stride + 4 * k + j]), sums[r]);
      }
    }
    UNROLL for (int r = 0; r < R; r++) storeu(out + r * BLOCK + column, sums[r] * load(scales + column));
  }
#endif
}

// INT4: codes [k / 8, 32] of 32 bits, where bits 4 j hold k = 2 j and bits 16 + 4 j hold k = 2 j + 1. A weight is
// (code - 8) scale + zero; within a group sums are taken over codes, then scaled, and `zero` meets the sum of the inputs.
template <int R>
static void tile_int4(const Matrix& m, const char* w, const Input& in, int64_t row, int64_t block, float* out) {
  const int64_t groups = m.ins / m.group, eights = m.group / 8, stride = in.stride;
  const half_t* params = (const half_t*)m.scales + block * groups * BLOCK * 2;
  for (int column = 0; column < BLOCK; column += LANES) {
    vf sums[R];
    UNROLL for (int r = 0; r < R; r++) sums[r] = zero();
    for (int64_t g = 0; g < groups; g++) {
      const vu both = loadu<vu>(params + (g * BLOCK + column) * 2);
      const vf scale = bits(both << 16), zeros = bits(both & 0xffff0000u);
      vf part[R];
      UNROLL for (int r = 0; r < R; r++) part[r] = zero();
      for (int64_t e = 0; e < eights; e++) {
        const int64_t at = g * eights + e;
        const vu codes = loadu<vu>(w + (at * BLOCK + column) * 4);
#if defined(__AVX512BF16__)
        if (e % 4 == 0) _mm_prefetch(w + (at * BLOCK + column) * 4 + 8192, _MM_HINT_T1);
        UNROLL for (int j = 0; j < 4; j++) {  // 0x4300 | code is 128 + code in bfloat16
          const __m512bh weight = (__m512bh)((codes >> (4 * j) & 0x000f000fu) | 0x43004300u);
          UNROLL for (int r = 0; r < R; r++) {
            int32_t pair;
            memcpy(&pair, in.narrow + (row + r) * stride + 8 * at + 2 * j, 4);
            part[r] = (vf)_mm512_dpbf16_ps((__m512)part[r], weight, (__m512bh)_mm512_set1_epi32(pair));
          }
        }
#else
        UNROLL for (int j = 0; j < 4; j++) {
          const vf even = to_float((vi)(codes >> (4 * j) & 15u)), odd = to_float((vi)(codes >> (16 + 4 * j) & 15u));
          UNROLL for (int r = 0; r < R; r++) {
            const float* x = in.wide + (row + r) * stride + 8 * at + 2 * j;
            part[r] = fma(odd, set(x[1]), fma(even, set(x[0]), part[r]));
          }
        }
#endif
      }
      const float offset = HAS_DP ? -136.0f : -8.0f;
      UNROLL for (int r = 0; r < R; r++) {
        const float* own = in.sums + (row + r) * (stride / 32) + g * m.group / 32;
        float total = own[0];
        for (int64_t i = 1; i < m.group / 32; i++) total += own[i];
        sums[r] = fma(scale, fma(set(total), set(offset), part[r]), sums[r]);
        sums[r] = fma(zeros, set(total), sums[r]);
      }
    }
    UNROLL for (int r = 0; r < R; r++) storeu(out + r * BLOCK + column, sums[r]);
  }
}
