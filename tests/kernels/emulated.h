// The instructions of AVX-512, AVX-VNNI and AMX that the kernels use, for processors that have only AVX2.
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define EMULATED static inline __attribute__((always_inline))

template <class Half, class Whole> EMULATED Half half(const Whole& x, int at) {
  Half y;
  memcpy(&y, (const char*)&x + at * sizeof y, sizeof y);
  return y;
}
EMULATED __m512i join(__m256i low, __m256i high) {
  __m512i x;
  memcpy(&x, &low, 32), memcpy((char*)&x + 32, &high, 32);
  return x;
}
EMULATED __m512 join(__m256 low, __m256 high) {
  __m512 x;
  memcpy(&x, &low, 32), memcpy((char*)&x + 32, &high, 32);
  return x;
}

#define OF_SCALAR(V, T, name) EMULATED V emulated_##name(T x) { return join(_mm256_##name(x), _mm256_##name(x)); }
OF_SCALAR(__m512, float, set1_ps)
OF_SCALAR(__m512i, int32_t, set1_epi32)
OF_SCALAR(__m512i, char, set1_epi8)

#define OF_HALF(V, name) \
  EMULATED V emulated_##name(__m256i x) { \
    return join(_mm256_##name(half<__m128i>(x, 0)), _mm256_##name(half<__m128i>(x, 1))); \
  }
OF_HALF(__m512, cvtph_ps)
OF_HALF(__m512i, cvtepu16_epi32)
OF_HALF(__m512i, cvtepi8_epi16)

// These stay within 128 bits, so that halves are independent.
#define OF_TWO(name) \
  EMULATED __m512i emulated_##name(__m512i a, __m512i b) { \
    return join(_mm256_##name(half<__m256i>(a, 0), half<__m256i>(b, 0)), \
                _mm256_##name(half<__m256i>(a, 1), half<__m256i>(b, 1))); \
  }
OF_TWO(add_epi16)
OF_TWO(add_epi32)
OF_TWO(madd_epi16)
OF_TWO(maddubs_epi16)
OF_TWO(shuffle_epi8)
OF_TWO(unpacklo_epi8)
OF_TWO(unpackhi_epi8)
OF_TWO(unpacklo_epi32)
OF_TWO(unpackhi_epi32)
OF_TWO(unpacklo_epi64)
OF_TWO(unpackhi_epi64)

EMULATED __m512i emulated_abs_epi8(__m512i a) {
  return join(_mm256_abs_epi8(half<__m256i>(a, 0)), _mm256_abs_epi8(half<__m256i>(a, 1)));
}
EMULATED __m512i emulated_srli_epi16(__m512i a, int count) {
  return join(_mm256_srli_epi16(half<__m256i>(a, 0), count), _mm256_srli_epi16(half<__m256i>(a, 1), count));
}
EMULATED __m512i emulated_and_si512(__m512i a, __m512i b) { return a & b; }
EMULATED __m512 emulated_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  return join(_mm256_fmadd_ps(half<__m256>(a, 0), half<__m256>(b, 0), half<__m256>(c, 0)),
              _mm256_fmadd_ps(half<__m256>(a, 1), half<__m256>(b, 1), half<__m256>(c, 1)));
}

EMULATED __m512i emulated_setzero_si512() { return __m512i{}; }
EMULATED __m512 emulated_setzero_ps() { return __m512{}; }
EMULATED __m512i emulated_loadu_si512(const void* p) { return half<__m512i>(*(const char*)p, 0); }
EMULATED __m512 emulated_loadu_ps(const void* p) { return half<__m512>(*(const char*)p, 0); }
EMULATED void emulated_storeu_si512(void* p, __m512i x) { memcpy(p, &x, 64); }
EMULATED void emulated_storeu_ps(void* p, __m512 x) { memcpy(p, &x, 64); }
EMULATED __m512i emulated_broadcast_i32x4(__m128i x) {
  return join(_mm256_broadcastsi128_si256(x), _mm256_broadcastsi128_si256(x));
}

EMULATED __m512i emulated_shuffle_i32x4(__m512i a, __m512i b, int which) {
  __m128i parts[4];
  for (int i = 0; i < 4; i++) parts[i] = half<__m128i>(i < 2 ? a : b, which >> 2 * i & 3);
  return half<__m512i>(parts, 0);
}
EMULATED __m512i emulated_cvtepi8_epi32(__m128i x) {
  return join(_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)));
}
EMULATED __m128i emulated_cvtepi32_epi8(__m512i x) {
  int8_t to[16];
  for (int i = 0; i < 16; i++) to[i] = (int8_t)half<int32_t>(x, i);
  return half<__m128i>(to, 0);
}
EMULATED int emulated_reduce_add_epi32(__m512i x) {
  int sum = 0;
  for (int i = 0; i < 16; i++) sum += half<int32_t>(x, i);
  return sum;
}
EMULATED unsigned emulated_reduce_max_epu32(__m512i x) {
  unsigned most = 0;
  for (int i = 0; i < 16; i++) most = half<uint32_t>(x, i) > most ? half<uint32_t>(x, i) : most;
  return most;
}
EMULATED __mmask64 emulated_movepi8_mask(__m512i x) {
  return (uint32_t)_mm256_movemask_epi8(half<__m256i>(x, 0)) |
         (uint64_t)(uint32_t)_mm256_movemask_epi8(half<__m256i>(x, 1)) << 32;
}
EMULATED __m512i emulated_mask_sub_epi8(__m512i otherwise, __mmask64 mask, __m512i a, __m512i b) {
  int8_t to[64], from[64], less[64];
  memcpy(to, &otherwise, 64), memcpy(from, &a, 64), memcpy(less, &b, 64);
  for (int i = 0; i < 64; i++)
    if (mask >> i & 1) to[i] = (int8_t)(from[i] - less[i]);
  return half<__m512i>(to, 0);
}

// Products of bytes without a sign with bytes with one, which are added in 32 bits: those at even places, then the others.
EMULATED __m256i emulated_mm256_dpbusd_avx_epi32(__m256i sum, __m256i a, __m256i b) {
  const __m256i even = _mm256_madd_epi16(_mm256_srli_epi16(_mm256_slli_epi16(a, 8), 8),
                                         _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
  return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
EMULATED __m512i emulated_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
  return join(emulated_mm256_dpbusd_avx_epi32(half<__m256i>(sum, 0), half<__m256i>(a, 0), half<__m256i>(b, 0)),
              emulated_mm256_dpbusd_avx_epi32(half<__m256i>(sum, 1), half<__m256i>(a, 1), half<__m256i>(b, 1)));
}

// Two fused multiply-adds, the upper one of a pair first; numbers below the normal ones are zeros.
EMULATED float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }
EMULATED float narrow_at(__m512i x, int at) {
  const uint32_t bits = (uint32_t)half<uint16_t>(x, at) << 16;
  return flushed(half<float>(bits, 0));
}
EMULATED __m512 emulated_dpbf16_ps(__m512 sum, __m512i a, __m512i b) {
  float to[16];
  memcpy(to, &sum, 64);
  for (int i = 0; i < 16; i++) {
    to[i] = flushed(__builtin_fmaf(narrow_at(a, 2 * i + 1), narrow_at(b, 2 * i + 1), flushed(to[i])));
    to[i] = flushed(__builtin_fmaf(narrow_at(a, 2 * i), narrow_at(b, 2 * i), to[i]));
  }
  return half<__m512>(to, 0);
}

// Tiles. What a processor refuses ends the process.
struct EmulatedTiles {
  struct {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } shape;
  alignas(64) uint32_t data[8][16][16];
};
static thread_local EmulatedTiles emulated_tiles;
EMULATED void emulated_demand(bool met) {
  if (!met) __builtin_trap();
}

static void emulated_tile_release() { emulated_tiles = EmulatedTiles{}; }
static void emulated_tile_loadconfig(const void* from) {
  emulated_tile_release();
  auto& shape = emulated_tiles.shape;
  memcpy(&shape, from, 64);
  emulated_demand(shape.palette == 1 && !shape.start);
  for (int i = 0; i < 14; i++) emulated_demand(!shape.unused[i]);
  for (int t = 0; t < 16; t++) {
    emulated_demand(shape.rows[t] <= (t < 8 ? 16 : 0) && shape.bytes[t] <= 64 && shape.bytes[t] % 4 == 0);
    emulated_demand(!shape.rows[t] == !shape.bytes[t]);
  }
}
EMULATED void emulated_tile_zero(int t) {
  emulated_demand(emulated_tiles.shape.rows[t]);
  memset(emulated_tiles.data[t], 0, sizeof emulated_tiles.data[t]);
}
EMULATED void emulated_tile_loadd(int t, const void* from, int64_t stride) {
  emulated_tile_zero(t);
  const auto& shape = emulated_tiles.shape;
  for (int r = 0; r < shape.rows[t]; r++) memcpy(emulated_tiles.data[t][r], (const char*)from + r * stride, shape.bytes[t]);
}
EMULATED void emulated_tile_stored(int t, void* to, int64_t stride) {
  const auto& shape = emulated_tiles.shape;
  emulated_demand(shape.rows[t]);
  for (int r = 0; r < shape.rows[t]; r++) memcpy((char*)to + r * stride, emulated_tiles.data[t][r], shape.bytes[t]);
}
EMULATED void emulated_demand_fit(int to, int a, int b) {
  const auto& s = emulated_tiles.shape;
  emulated_demand(to != a && to != b && a != b && s.rows[to] && s.rows[to] == s.rows[a] && s.bytes[to] == s.bytes[b]);
  emulated_demand(s.rows[b] && s.bytes[a] == 4 * s.rows[b]);
}
// Rows with a sign, codes without one.
static void emulated_tile_dpbsud(int to, int a, int b) {
  emulated_demand_fit(to, a, b);
  EmulatedTiles& tiles = emulated_tiles;
  for (int r = 0; r < tiles.shape.rows[to]; r++)
    for (int k = 0; k < tiles.shape.rows[b]; k++)
      for (int i = 0; i < 16; i += 8) {
        __m256i* sum = (__m256i*)(tiles.data[to][r] + i);
        const __m256i codes = _mm256_load_si256((const __m256i*)(tiles.data[b][k] + i));
        *sum = emulated_mm256_dpbusd_avx_epi32(*sum, codes, _mm256_set1_epi32((int)tiles.data[a][r][k]));
      }
}
// As in Intel's manual: a sum of the even inputs and one of the odd ones, from zero on, and then both added to what is there.
__attribute__((noinline)) static void emulated_pairs(int to, int a, int b) {
  EmulatedTiles& tiles = emulated_tiles;
  const __m256i upper = _mm256_set1_epi32((int)0xffff0000);
  for (int r = 0; r < tiles.shape.rows[to]; r++)
    for (int i = 0; i < 16; i += 8) {
      __m256 even = _mm256_setzero_ps(), odd = _mm256_setzero_ps();
      for (int k = 0; k < tiles.shape.rows[b]; k++) {
        const __m256i x = _mm256_set1_epi32((int)tiles.data[a][r][k]);
        const __m256i w = _mm256_load_si256((const __m256i*)(tiles.data[b][k] + i));
        even = _mm256_fmadd_ps((__m256)_mm256_slli_epi32(x, 16), (__m256)_mm256_slli_epi32(w, 16), even);
        odd = _mm256_fmadd_ps((__m256)_mm256_and_si256(x, upper), (__m256)_mm256_and_si256(w, upper), odd);
      }
      __m256* sum = (__m256*)(tiles.data[to][r] + i);
      *sum = _mm256_add_ps(*sum, _mm256_add_ps(even, odd));
    }
}
EMULATED void emulated_tile_dpbf16ps(int to, int a, int b) {
  emulated_demand_fit(to, a, b);
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0x9fc0);  // numbers below the normal ones are zeros
  emulated_pairs(to, a, b);
  _mm_setcsr(before);
}
