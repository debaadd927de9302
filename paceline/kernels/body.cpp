// A stand-in: compiled once for every instruction set, which its namespace is named after.
#include <stdint.h>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace PACELINE_ISA {

// The sum of n products of bfloat16 numbers.
float dot(const uint16_t* a, const uint16_t* b, int64_t n) {
    float sum = 0.0f;
    int64_t i = 0;
#if defined(__AVX512BF16__)
    __m512 lanes = _mm512_setzero_ps();
    for (; i + 32 <= n; i += 32)
        lanes = _mm512_dpbf16_ps(lanes, (__m512bh)_mm512_loadu_si512(a + i), (__m512bh)_mm512_loadu_si512(b + i));
    sum = _mm512_reduce_add_ps(lanes);
#endif
    for (; i < n; i++) {
        union { uint32_t bits; float value; } x = {(uint32_t)a[i] << 16}, y = {(uint32_t)b[i] << 16};
        sum += x.value * y.value;
    }
    return sum;
}

}  // namespace PACELINE_ISA
