// The 512-bit instructions that the kernels use, for processors that lack them: two 256-bit ones each, or a loop.
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

// Products of bytes without a sign with bytes with one.
EMULATED __m512i emulated_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
  uint32_t to[16];
  uint8_t first[64];
  int8_t second[64];
  memcpy(to, &sum, 64), memcpy(first, &a, 64), memcpy(second, &b, 64);
  for (int i = 0; i < 64; i++) to[i / 4] += (uint32_t)(first[i] * second[i]);
  return half<__m512i>(to, 0);
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
