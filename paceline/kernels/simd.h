// Vectors of one instruction set: `vf` holds LANES floats, `vi` as many int32. Everything else is written over these.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(PACELINE_NEON)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")  // sums that are kept in an array stay in registers only so

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
#if defined(__AVX512F__) || defined(PACELINE_NEON)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif
#if defined(__AVX512BF16__)
constexpr bool HAS_DP = true;  // products of pairs of bfloat16
#else
constexpr bool HAS_DP = false;
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef uint8_t bytes __attribute__((vector_size(LANES)));
typedef int8_t signed_bytes __attribute__((vector_size(LANES)));
typedef int16_t signed_halves __attribute__((vector_size(2 * LANES)));

template <class V, class T> INLINE V loadu(const T* p) { V v; memcpy(&v, p, sizeof v); return v; }
template <class V, class T> INLINE void storeu(T* p, V v) { memcpy(p, &v, sizeof v); }
INLINE vf load(const float* p) { return loadu<vf>(p); }
INLINE vf set(float x) {
#if defined(__AVX512F__)
  return (vf)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return (vf)_mm256_set1_ps(x);
#else
  return vf{x, x, x, x};
#endif
}
INLINE vf zero() { return vf{}; }
INLINE vf bits(vi x) { vf y; memcpy(&y, &x, sizeof y); return y; }
INLINE vf bits(vu x) { vf y; memcpy(&y, &x, sizeof y); return y; }
INLINE vu ubits(vf x) { vu y; memcpy(&y, &x, sizeof y); return y; }

INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(PACELINE_NEON)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(__aarch64__)
  UNROLL for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}

INLINE vf widen(vh x) {  // bfloat16, exactly
#if defined(__AVX512F__)
  return bits((vu)_mm512_cvtepu16_epi32((__m256i)x) << 16);
#elif defined(__AVX2__)
  return bits((vu)_mm256_cvtepu16_epi32((__m128i)x) << 16);  // which GCC does not make of a conversion by itself
#else
  return bits(__builtin_convertvector(x, vu) << 16);
#endif
}

INLINE vf from_half(vh x) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps((__m256i)x);
#elif defined(__AVX2__)
  return (vf)_mm256_cvtph_ps((__m128i)x);
#elif defined(PACELINE_NEON)
  return (vf)vcvt_f32_f16((float16x4_t)x);
#else
  const vu h = __builtin_convertvector(x, vu), magnitude = (h & 0x7fff) << 13, sign = (h & 0x8000) << 16;
  const vf scaled = bits(magnitude) * 0x1p112f;
  const vu special = (vu)((magnitude >= (0x7c00u << 13))) & 0x7f800000u;
  return bits(ubits(scaled) | special | sign);
#endif
}

// LANES bytes as int16.
INLINE signed_halves widen_bytes(const void* p) {
#if defined(PACELINE_NEON)
  int32_t four;
  memcpy(&four, p, 4);
  return (signed_halves)vget_low_s16(vmovl_s8((int8x8_t)vdup_n_s32(four)));
#else
  return __builtin_convertvector(loadu<signed_bytes>(p), signed_halves);
#endif
}

INLINE vf from_int8(const void* p) {
#if defined(__AVX512F__)
  return __builtin_convertvector((vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)), vf);
#elif defined(__AVX2__)
  return __builtin_convertvector((vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)), vf);
#else
  return __builtin_convertvector(widen_bytes(p), vf);
#endif
}

// e4m3 without infinities. With its bits at the upper end, it is a float16 of 1 / 256 of its value.
INLINE vf from_fp8(const uint8_t* p) {
  const vh h = (vh)widen_bytes(p) << 7 & 0xbf80;
  return from_half(h | ((h + 0x80) & 0x4000)) * 256.0f;  // only NaN carries into the upper bit of the exponent
}

// To the nearest, ties to even; NaN stays NaN.
INLINE uint16_t to_bf16(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 0x40);
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
INLINE vh to_bf16(vf x) {
  const vu u = ubits(x), rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  const vu nan = (vu)((u & 0x7fffffff) > 0x7f800000u);
  return __builtin_convertvector((nan & (u >> 16 | 0x40)) | (~nan & rounded), vh);
}
INLINE float from_bf16(uint16_t x) {
  const uint32_t u = (uint32_t)x << 16;
  float y;
  memcpy(&y, &u, 4);
  return y;
}
INLINE float from_half(uint16_t x) {
  const uint32_t magnitude = (x & 0x7fffu) << 13, sign = (x & 0x8000u) << 16;
  float y;
  memcpy(&y, &magnitude, 4);
  y *= 0x1p112f;
  uint32_t u;
  memcpy(&u, &y, 4);
  u |= sign | (magnitude >= (0x7c00u << 13) ? 0x7f800000u : 0);
  memcpy(&y, &u, 4);
  return y;
}
INLINE float from_fp8(uint8_t x) {
  const uint16_t h = (uint16_t)((x & 0x7f) << 7 | (x & 0x80) << 8);
  return from_half((uint16_t)(h | ((h + 0x80) & 0x4000))) * 256.0f;
}
INLINE uint16_t to_half(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  const uint32_t sign = u >> 16 & 0x8000;
  u &= 0x7fffffff;
  if (u > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (u >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // rounds past the largest
  if (u < 0x38800000) {                                   // subnormal: add 0.5, whose last bit is theirs
    float y;
    memcpy(&y, &u, 4);
    y += 0.5f;
    memcpy(&u, &y, 4);
    return (uint16_t)(sign | (u - 0x3f000000));
  }
  return (uint16_t)(sign | ((u + 0xc8000fff + (u >> 13 & 1)) >> 13));
}

INLINE uint32_t max_lanes(vu x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epu32((__m512i)x);
#elif defined(__AVX2__)
  __m128i y = _mm_max_epu32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
  y = _mm_max_epu32(y, _mm_shuffle_epi32(y, 0x4e));
  return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(y, _mm_shuffle_epi32(y, 0xb1)));
#elif defined(PACELINE_NEON)
  return vmaxvq_u32((uint32x4_t)x);
#else
  uint32_t most = 0;
  for (int i = 0; i < LANES; i++) most = x[i] > most ? x[i] : most;
  return most;
#endif
}
INLINE vf larger(vf a, vf b) { return a > b ? a : b; }
INLINE float sum_lanes(vf x) {
  float v[LANES];
  storeu(v, x);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) v[i] += v[i + width];
  return v[0];
}
INLINE float max_lanes(vf x) {
  float v[LANES];
  storeu(v, x);
  for (int i = 1; i < LANES; i++) v[0] = v[i] > v[0] || v[i] != v[i] ? v[i] : v[0];
  return v[0];
}

// e^x to 2 units in the last place; 0 below e^-87, infinity above e^88.7, NaN of NaN. Polynomial: Cephes expf.
INLINE vf exp_(vf x) {
  const vf magic = set(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  vf y = x > 88.72f ? set(88.72f) : x;
  y = y < -87.0f ? set(-87.0f) : y;
  const vf shifted = fma(y, set(1.44269504088896341f), magic), n = shifted - magic;
  vf r = fma(n, set(-0.693359375f), y);
  r = fma(n, set(2.12194440e-4f), r);
  vf p = set(1.9875691500e-4f);
  p = fma(p, r, set(1.3981999507e-3f));
  p = fma(p, r, set(8.3334519073e-3f));
  p = fma(p, r, set(4.1665795894e-2f));
  p = fma(p, r, set(1.6666665459e-1f));
  p = fma(p, r, set(5.0000001201e-1f));
  p = fma(p, r * r, r + 1.0f);
  const vi power = (vi)((ubits(shifted) - ubits(magic)) << 23);
  const vf result = bits((vi)ubits(p) + power);
  vf out = x < -87.0f ? zero() : result;
  out = x > 88.72f ? set(__builtin_inff()) : out;
  return x == x ? out : x;
}
INLINE vf tanh_(vf x) { return 1.0f - 2.0f / (exp_(2.0f * x) + 1.0f); }
