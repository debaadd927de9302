// Which instruction sets this processor has. It is also compiled alone, to tell for which of them to compile the rest.
#include <stddef.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

static int always() { return 1; }
#if defined(__x86_64__)
struct Features {
  unsigned leaf1, ebx7, edx7, eax71;
  int ymm, zmm, tiles;
};
static Features features() {
  Features f = {};
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &f.leaf1, &d)) return f;
  if (f.leaf1 & 1u << 27) {  // the system keeps wide registers
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    f.ymm = (low & 6) == 6;
    f.zmm = f.ymm && (low & 0xe0) == 0xe0;
    f.tiles = low >> 17 & low >> 18 & 1;
  }
  if (__get_cpuid_count(7, 0, &a, &f.ebx7, &c, &f.edx7) && a >= 1) __get_cpuid_count(7, 1, &f.eax71, &b, &c, &d);
  return f;
}
static int has_avx2() {
  const Features f = features();
  return f.ymm && f.leaf1 >> 12 & 1 && f.leaf1 >> 29 & 1 && f.ebx7 >> 5 & 1;  // FMA, F16C, AVX2
}
static int has_avx2_vnni() { return has_avx2() && features().eax71 >> 4 & 1; }
static int has_avx512() {
  const Features f = features();
  return has_avx2() && f.zmm && f.ebx7 >> 16 & 1 && f.ebx7 >> 17 & 1 && f.ebx7 >> 30 & 1 && f.ebx7 >> 31 & 1;
}
static int has_avx512_vnni() {
  unsigned a, b, c = 0, d;
  __get_cpuid_count(7, 0, &a, &b, &c, &d);
  return has_avx512() && c >> 11 & 1;
}
static int has_avx512_bf16() { return has_avx512_vnni() && features().eax71 >> 5 & 1; }
static int has_amx() {
  const Features f = features();
  return has_avx512_vnni() && f.tiles && f.edx7 >> 22 & 1 && f.edx7 >> 24 & 1 && f.edx7 >> 25 & 1;  // BF16, TILE, INT8
}
#elif defined(__aarch64__)
// All of them have NEON. Only the system may read which products of bytes they have.
#if defined(__APPLE__)
static int has(const char* name) {
  int value = 0;
  size_t size = sizeof value;
  return !sysctlbyname(name, &value, &size, nullptr, 0) && value;
}
static int has_neon_dotprod() { return has("hw.optional.arm.FEAT_DotProd"); }
static int has_neon_i8mm() { return has_neon_dotprod() && has("hw.optional.arm.FEAT_I8MM"); }
#elif defined(__linux__)
static int has_neon_dotprod() { return getauxval(AT_HWCAP) >> 20 & 1; }  // HWCAP_ASIMDDP
static int has_neon_i8mm() { return has_neon_dotprod() && getauxval(AT_HWCAP2) >> 13 & 1; }  // HWCAP2_I8MM
#else
static int has_neon_dotprod() { return 0; }
static int has_neon_i8mm() { return 0; }
#endif
#endif

static const struct {
  const char* name;
  int (*is_here)();
} sets[] = {
#if defined(__x86_64__)
    {"amx", has_amx},
    {"avx512_bf16", has_avx512_bf16},
    {"avx512_vnni", has_avx512_vnni},
    {"avx512", has_avx512},
    {"avx2_vnni", has_avx2_vnni},
    {"avx2", has_avx2},
#elif defined(__aarch64__)
    {"neon_i8mm", has_neon_i8mm},
    {"neon_dotprod", has_neon_dotprod},
    {"neon", always},
#endif
    {"portable", always},
};

extern "C" int paceline_cpu_has(const char* name) {
  for (const auto& set : sets)
    if (!strcmp(set.name, name)) return set.is_here();
  return 0;
}
