// A stand-in: which instruction sets this CPU has, and the kernels of the chosen one.
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

typedef float Dot(const uint16_t*, const uint16_t*, int64_t);
namespace portable { Dot dot; }
namespace avx2 { Dot dot; }
namespace avx512 { Dot dot; }
namespace avx512_bf16 { Dot dot; }

static Dot* chosen = portable::dot;

static uint32_t bits(unsigned leaf, unsigned sub, int reg) {
    unsigned r[4] = {0, 0, 0, 0};
#if defined(__x86_64__)
    __get_cpuid_count(leaf, sub, &r[0], &r[1], &r[2], &r[3]);
#endif
    return r[reg];
}

static bool saved(uint32_t mask) {  // the system keeps these registers
    if (!(bits(1, 0, 2) >> 27 & 1)) return false;
    uint32_t low = 0, high = 0;
#if defined(__x86_64__)
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
#endif
    return (low & mask) == mask;
}

static void* work(void* at) {
    float* x = (float*)at;
    x[1] = expf(x[0]);
    return 0;
}

extern "C" {

const char* paceline_source_hash() { return PACELINE_SOURCE_HASH; }

int paceline_select(const char* name) {
    const uint32_t one = bits(1, 0, 2), seven = bits(7, 0, 1);
    const bool has_avx2 = saved(6) && (seven >> 5 & 1) && (one >> 12 & 1) && (one >> 29 & 1);
    const bool has_512 = has_avx2 && saved(0xe6) && (seven >> 16 & seven >> 17 & seven >> 30 & seven >> 31 & 1);
    const bool has_bf16 = has_512 && (bits(7, 0, 2) >> 11 & 1) && (bits(7, 1, 0) >> 5 & 1);
    (void)has_avx2, (void)has_512, (void)has_bf16;
    Dot* found = 0;
    if (!strcmp(name, "portable")) found = portable::dot;
#if defined(PACELINE_HAS_AVX2)
    if (!strcmp(name, "avx2") && has_avx2) found = avx2::dot;
#endif
#if defined(PACELINE_HAS_AVX512)
    if (!strcmp(name, "avx512") && has_512) found = avx512::dot;
#endif
#if defined(PACELINE_HAS_AVX512_BF16)
    if (!strcmp(name, "avx512_bf16") && has_bf16) found = avx512_bf16::dot;
#endif
    if (found) chosen = found;
    return found != 0;
}

float paceline_dot(const uint16_t* a, const uint16_t* b, int64_t n) { return chosen(a, b, n); }

float paceline_thread_exp(float x) {  // computed by another thread
    float cell[2] = {x, 0.0f};
    pthread_t thread;
    if (pthread_create(&thread, 0, work, cell)) return -1.0f;
    pthread_join(thread, 0);
    return cell[1];
}
}
