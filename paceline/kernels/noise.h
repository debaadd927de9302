// The noise of core/rng.py, and the Gumbel-max draw without the noise that cannot win.
#include <math.h>
#include <stdint.h>
#include <string.h>

constexpr uint64_t WEYL = 0x9E3779B97F4A7C15, MIX_1 = 0xBF58476D1CE4E5B9, MIX_2 = 0x94D049BB133111EB;

static inline uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * MIX_1;
  x = (x ^ x >> 27) * MIX_2;
  return x ^ x >> 31;
}

static inline uint64_t noise_key(int64_t seed, int64_t position, int64_t purpose) {
  return mix(mix((uint64_t)seed + (uint64_t)position * WEYL) ^ (uint64_t)purpose * MIX_2);
}

static inline uint64_t noise_bits(uint64_t key, int64_t column) { return mix(key + (uint64_t)(column + 1) * WEYL); }

// The noise g = -log(-log u), in double.
static inline double noise_of(uint64_t bits) { return -log(-log(((double)(bits >> 12) + 0.5) * 0x1p-52)); }

// argmax of scores + noise, or -1: where the two largest sums are so close that rounding decides, or where scores are NaN
// or infinite, which is left to the caller.
//
// Since -log u >= 1 - u, a sum s + g can only reach a bound b where 1 - u <= exp(s - b). Of 1 - u the upper 24 bits are
// read, and their logarithm to base 2 from the bits of the float, which are never above it: so nothing that could reach
// the bound is passed over, and little else is looked at.
static inline bool can_reach(float bound, float score, uint64_t bits) {
  constexpr float ULPS = 0x1p-23f;
  const float rest = (float)(int32_t)(~bits >> 40);  // at most (1 - u) 2^24
  int32_t log_2;
  memcpy(&log_2, &rest, 4);
  return !((float)log_2 * ULPS - (127 + 24) > score - bound);
}

static int64_t noisy_argmax(const float* scores, int64_t size, uint64_t key) {
  const float infinity = __builtin_inff();
  float top = -infinity;
  bool sound = true;
  for (int64_t i = 0; i < size; i++) {
    sound &= scores[i] < infinity;  // false of NaN
    top = scores[i] > top ? scores[i] : top;
  }
  if (!sound || !(top > -infinity)) return -1;
  int64_t winner = 0;
  while (scores[winner] != top) winner++;
  const int64_t first = winner;
  const double close = 1e-3 + 1e-6 * fabs((double)top);
  double best = top + noise_of(noise_bits(key, first)), second = -infinity;
  constexpr float BASE_2 = 1.44269504f;
  float bound = (float)((best - close) * BASE_2);
  constexpr int64_t MANY = 256;  // are tested at once
  for (int64_t begin = 0; begin < size; begin += MANY) {
    const int64_t end = begin + MANY < size ? begin + MANY : size;
    int any = 0;
    for (int64_t i = begin; i < end; i++) any |= can_reach(bound, scores[i] * BASE_2, noise_bits(key, i));
    for (int64_t i = begin; any && i < end; i++) {
      const uint64_t bits = noise_bits(key, i);
      if (!can_reach(bound, scores[i] * BASE_2, bits) || i == first) continue;
      const double sum = scores[i] + noise_of(bits);
      if (sum > best) {
        second = best, best = sum, winner = i;
        bound = (float)((best - close) * BASE_2);
      } else if (sum > second) {
        second = sum;
      }
    }
  }
  return best - second > close ? winner : -1;
}
