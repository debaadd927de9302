// Products in emulated tiles, of buffers that end where their numbers do: the sanitizers see what reads or writes further.
#include "emulated.h"

#include <stdlib.h>

#include <initializer_list>
#define INLINE EMULATED
#define UNROLL _Pragma("GCC unroll 16")
typedef uint16_t half_t;
constexpr int BLOCK = 32;
INLINE int64_t min_(int64_t a, int64_t b) { return a < b ? a : b; }
struct Ahead {
  template <int LINES> void fetch() {}
};
#include "amx.h"

template <class T> T* random_numbers(int64_t count) {
  T* made = (T*)malloc(sizeof(T) * count);
  for (int64_t i = 0; i < count; i++) made[i] = (T)(sizeof(T) == 1 ? rand() : 0x3e80 + rand() % 0x180 + rand() % 2 * 0x8000);
  return made;
}

// Whether each row has the bits that it has alone, in two panels.
static bool pairs_are_right(int rows, int64_t pairs, int64_t stride) {
  half_t *w = random_numbers<half_t>(64 * pairs), *x = random_numbers<half_t>((rows - 1) * stride + 2 * pairs);
  float* out = (float*)calloc(rows, 4 * BLOCK);
  bool right = true;
  TileShapes shapes;
  multiply_pairs(shapes, (const char*)w, x, stride, rows, pairs, {}, out);
  for (int r = 0; r < rows; r++) {
    const int64_t first = pairs / 32 * 16;
    float one[BLOCK] = {};
    if (first) multiply_pairs(shapes, (const char*)w, x + r * stride, stride, 1, first, {}, one);
    multiply_pairs(shapes, (const char*)(w + 64 * first), x + r * stride + 2 * first, stride, 1, pairs - first, {}, one);
    right &= !memcmp(one, out + BLOCK * r, sizeof one);
  }
  free(w), free(x), free(out);
  return right;
}

static bool fours_are_right(int rows, int parts, int64_t stride) {
  int8_t* x = random_numbers<int8_t>((rows - 1) * stride + 16 * parts);
  uint8_t* codes = random_numbers<uint8_t>(256 * parts);
  auto* sums = (int32_t(*)[16][16])malloc(1024 * parts);
  bool right = true;
  TileShapes shapes;
  multiply_fours<4>(shapes, codes, x, stride, rows, parts, sums);
  for (int i = 0; i < parts * rows * 16; i++) {
    const int part = i / 16 / rows, r = i / 16 % rows, out = i % 16;
    int want = 0;
    for (int k = 0; k < 16; k++) want += x[r * stride + 16 * part + k] * codes[256 * part + 64 * (k / 4) + 4 * out + k % 4];
    right &= sums[part][r][out] == want;
  }
  free(x), free(codes), free(sums);
  return right;
}

int main() {
  bool right = true;
  for (int rows : {1, 2, 15, 16, 17, 31, 32})
    for (int64_t pairs : {1, 15, 16, 17, 33, 515})
      for (int more : {0, 6}) right &= pairs_are_right(rows, pairs, 2 * pairs + more);
  for (int rows : {1, 5, 16})
    for (int parts : {1, 2, 3, 8, 16}) right &= fours_are_right(rows, parts, 16 * parts + 3);
  return right && !emulated_tiles.shape.palette ? 0 : 1;
}
