// Products in tiles (AMX); included by body.cpp.
//
// A tile is a register of up to 16 rows of 64 bytes. An instruction multiplies the rows of one tile by the columns of
// another and adds the products to a third one: up to 16 rows, 16 outputs and 64 bytes of inputs. An element of the third
// depends on its own row, its own column and itself, so it has the same bits whatever lies beside it. Intel's manual and its
// guide to intrinsics differ in the order in which one instruction adds products of bfloat16; nothing here depends on it.
//
// Nothing is padded: shapes end where rows, inputs and buffers do.

#if defined(__AMX_TILE__)
constexpr bool HAS_TILES = true;
#else
constexpr bool HAS_TILES = false;
#endif
constexpr int TILED_ROWS = 32, TILED_PAIRS = 16;  // what `multiply_pairs` takes at once
constexpr int TILED_SUMS = 16 * 16;               // from part to part of what `multiply_fours` makes

#if defined(__AMX_TILE__)
// The shapes of this thread's tiles, which are free again at the end of the scope. 0, 1: sums of the first rows, 2, 3: of
// further ones; 4 and 5: these rows; 6, 7: weights.
struct TileShapes {
  alignas(64) struct {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16];  // of a row
    uint8_t rows[16];
  } to = {};

  // fours: of bytes of inputs that are multiplied by one instruction. Tiles that had other shapes are empty afterwards.
  void set(int first, int further, int fours) {
    if (to.rows[0] == first && (!further || to.rows[2] == further) && to.rows[6] == fours) return;
    const int rows[8] = {first, first, further, further, first, further, fours, fours};
    for (int t = 0; t < 8; t++) {
      to.rows[t] = (uint8_t)rows[t];
      to.bytes[t] = (uint16_t)(!rows[t] ? 0 : t / 2 == 2 ? 4 * fours : 64);
    }
    to.palette = 1;
    finish_writing(&to);
    _tile_loadconfig(&to);
  }
  ~TileShapes() {
    if (to.palette) _tile_release();
  }

  // GCC does not know how much of the memory the instructions for tiles read.
  static void finish_writing(const void* at) { __asm__ volatile("" : : "r"(at) : "memory"); }
};

// out [rows, 32] += x [rows, 2 pairs] times so many pairs of a block of bfloat16; at most TILED_ROWS rows.
static void multiply_pairs(TileShapes& shapes, const char* w, const half_t* x, int64_t stride, int rows, int64_t pairs,
                           Ahead ahead, float* out) {
  constexpr int LINE_OF_SUMS = 4 * BLOCK, PAIR = 2 * 2 * BLOCK;  // bytes
  const int first = (int)min_(rows, 16), further = rows - first;
  const half_t* rest = x + first * stride;
  float* rest_out = out + first * BLOCK;
  while (pairs) {
    const int64_t deep = min_(pairs, TILED_PAIRS), steps = pairs / deep;
    shapes.set(first, further, (int)deep);
    TileShapes::finish_writing(out);
    _tile_loadd(0, out, LINE_OF_SUMS);
    _tile_loadd(1, out + 16, LINE_OF_SUMS);
    if (further) {
      _tile_loadd(2, rest_out, LINE_OF_SUMS);
      _tile_loadd(3, rest_out + 16, LINE_OF_SUMS);
    }
    for (int64_t step = 0; step < steps; step++, w += PAIR * deep, x += 2 * deep, rest += 2 * deep) {
      UNROLL for (int i = 0; i < TILED_PAIRS; i++) ahead.fetch<2>();
      _tile_loadd(6, w, PAIR);
      _tile_loadd(4, x, 2 * stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, w + 64, PAIR);
      _tile_dpbf16ps(1, 4, 7);
      if (further) {
        _tile_loadd(5, rest, 2 * stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, out, LINE_OF_SUMS);
    _tile_stored(1, out + 16, LINE_OF_SUMS);
    if (further) {
      _tile_stored(2, rest_out, LINE_OF_SUMS);
      _tile_stored(3, rest_out + 16, LINE_OF_SUMS);
    }
    pairs -= steps * deep;
  }
}

// sums [parts, 16, 16] of `rows` rows: in each part, the products of N fours of bytes of rows `x` and of `codes` without a
// sign [parts, N, 16, 4].
template <int N>
static void multiply_fours(TileShapes& shapes, const uint8_t* codes, const int8_t* x, int64_t stride, int rows, int parts,
                           int32_t (*sums)[16][16]) {
  shapes.set(rows, rows, N);
  TileShapes::finish_writing(codes);
#define PART(I, SUM, ROWS, CODES)                        \
  if (part + I < parts) {                                \
    _tile_zero(SUM);                                     \
    _tile_loadd(ROWS, x + 4 * N * (part + I), stride);   \
    _tile_loadd(CODES, codes + 64 * N * (part + I), 64); \
    _tile_dpbsud(SUM, ROWS, CODES);                      \
    _tile_stored(SUM, sums[part + I], 64);               \
  }
  for (int part = 0; part < parts; part += 4) {
    PART(0, 0, 4, 6)
    PART(1, 1, 5, 7)
    PART(2, 2, 4, 6)
    PART(3, 3, 5, 7)
  }
#undef PART
}
#else
struct TileShapes {};
template <int N>
INLINE void multiply_fours(TileShapes&, const uint8_t*, const int8_t*, int64_t, int, int, int32_t (*)[16][16]) {}
INLINE void multiply_pairs(TileShapes&, const char*, const half_t*, int64_t, int, int64_t, Ahead, float*) {}
#endif
