// Integers in vectors, codes of weights and rows as bytes; included by blocks.h.

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || (defined(PACELINE_NEON) && defined(__ARM_FEATURE_DOTPROD))
#define BYTES_DOT 1
#else
#define BYTES_DOT 0
#endif

// Whether products are summed in 32 bits; with AVX2, two products are added in 16 bits, and the sign of a code goes to the
// input. Whether codes have no sign then.
#if defined(__AVX2__) && !BYTES_DOT
constexpr bool IN_32_BITS = false, UNSIGNED = false;
#elif defined(PACELINE_NEON)
constexpr bool IN_32_BITS = true, UNSIGNED = false;
#else
constexpr bool IN_32_BITS = true, UNSIGNED = true;
#endif

INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }

INLINE vi set_int(int32_t x) {
#if defined(__AVX512F__)
  return (vi)_mm512_set1_epi32(x);
#elif defined(__AVX2__)
  return (vi)_mm256_set1_epi32(x);
#else
  return vi{x, x, x, x};
#endif
}
template <class T> INLINE vi set_word(const T* at) {
  int32_t x;
  memcpy(&x, at, 4);
  return set_int(x);
}

// Products of two int16 with two others, added.
INLINE vi dot_pairs(vi a, vi b) {
#if defined(__AVX512F__)
  return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(PACELINE_NEON)
  const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
  return (vi)vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
#else
  return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// Of the rows of a tile, so many are multiplied in pairs.
constexpr int paired(int rows) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  return rows / 2 * 2;
#else
  return rows * 0;
#endif
}
// Lays these rows, of at most 256 codes, in pairs: eight codes of one, then eight of the other.
INLINE void lay_pairs(const int8_t* rows, int64_t stride, int count, int64_t size, int8_t* to) {
  for (int r = 0; r < paired(count); r++)
    for (int64_t k = 0; k < size; k += 8) memcpy(to + r / 2 * 512 + 2 * k + r % 2 * 8, rows + r * stride + k, 8);
}

// Keeps a value where it is: GCC would otherwise compute many of them ahead, and run out of registers.
#if defined(__AVX512F__)
INLINE void settle(vi& sum) { __asm__("" : "+v"(sum)); }
#elif defined(__AVX2__)
INLINE void settle(vi& sum) { __asm__("" : "+x"(sum)); }
#elif defined(PACELINE_NEON)
INLINE void settle(vi& sum) { __asm__("" : "+w"(sum)); }
#else
INLINE void settle(vi&) {}
#endif
INLINE void settle(const int8_t*& pointer) { __asm__("" : "+r"(pointer)); }

// `count` bits of every byte, from bit `shift` on.
INLINE vu take_bits(vu x, int shift, int count) {
  const vu mask = vu{} + 0x01010101u * ((1u << count) - 1);
#if defined(PACELINE_NEON)
  const uint8x16_t moved = (uint8x16_t)x >> (uint8_t)shift;
  return shift + count < 8 ? (vu)moved & mask : (vu)moved;
#else
  return x >> shift & mask;
#endif
}

// What codes of four bits stand for, `add` added.
INLINE vu look_up(vu codes, const int8_t* values, int add) {
  alignas(64) uint8_t table[16];
  for (int i = 0; i < 16; i++) table[i] = (uint8_t)(values[i] + add);
#if defined(__AVX512F__)
  return (vu)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table)), (__m512i)codes);
#elif defined(__AVX2__)
  return (vu)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table)), (__m256i)codes);
#elif defined(PACELINE_NEON)
  return (vu)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)codes);
#else
  for (size_t i = 0; i < sizeof codes; i++) ((uint8_t*)&codes)[i] = table[((uint8_t*)&codes)[i]];
  return codes;
#endif
}

// Pairs of bytes as pairs of int16.
INLINE vi widen_pairs(const uint8_t* at) {
#if defined(__AVX512F__)
  const __m256i x = _mm256_loadu_si256((const __m256i*)at);
  return (vi)_mm512_cvtepi8_epi16(x);
#elif defined(__AVX2__)
  const __m128i x = _mm_loadu_si128((const __m128i*)at);
  return (vi)_mm256_cvtepi8_epi16(x);
#elif defined(PACELINE_NEON)
  return (vi)vmovl_s8(vld1_s8((const int8_t*)at));
#else
  vi pairs;
  for (int i = 0; i < LANES; i++)
    pairs[i] = ((int8_t)at[2 * i] & 0xffff) | (int8_t)at[2 * i + 1] * 65536;
  return pairs;
#endif
}

#if defined(PACELINE_NEON)
constexpr int FOURS = 4;  // of inputs that `add_products` takes at once

// sum + the products of fours of bytes with word WORD of `row`.
template <int WORD> INLINE vi add_word(vi sum, vi four, int8x16_t row) {
#if BYTES_DOT
  return (vi)vdotq_laneq_s32((int32x4_t)sum, (int8x16_t)four, row, WORD);
#else  // two products just fit 16 bits
  const int8x16_t codes = (int8x16_t)four, word = (int8x16_t)vdupq_laneq_s32((int32x4_t)row, WORD);
  const int16x8_t low = vmull_s8(vget_low_s8(codes), vget_low_s8(word)), high = vmull_high_s8(codes, word);
  sum = (vi)vpadalq_s16((int32x4_t)sum, vpaddq_s16(low, high));
  settle(sum);
  return sum;
#endif
}

// sums += the products of `fours` with those of R rows, from input `first` on. Those of two rows that lie by turns are
// products of matrices [2, 8] [8, 2], which `part_rows` takes apart.
template <bool WIDE, int R, int C>
INLINE void add_products(const vi (*fours)[C], const int8_t* const* rows, int first, vi (*sums)[C]) {
  constexpr int PAIRED = paired(R);
#if defined(__ARM_FEATURE_MATMUL_INT8)
  if constexpr (PAIRED > 0)
    UNROLL for (int r = 0; r < PAIRED; r += 2)
      UNROLL for (int i = 0; i < FOURS; i += 2) {
        const int8x16_t both = vld1q_s8(rows[r] + 2 * first + 8 * i);
        UNROLL for (int c = 0; c < C; c++) {
          const int32x4_t one = (int32x4_t)fours[i][c], other = (int32x4_t)fours[i + 1][c];
          sums[r][c] = (vi)vmmlaq_s32((int32x4_t)sums[r][c], (int8x16_t)vzip1q_s32(one, other), both);
          sums[r + 1][c] = (vi)vmmlaq_s32((int32x4_t)sums[r + 1][c], (int8x16_t)vzip2q_s32(one, other), both);
        }
      }
#endif
  UNROLL for (int r = PAIRED; r < R; r++) {
    const int8x16_t row = vld1q_s8(rows[r] + first);
    UNROLL for (int c = 0; c < C; c++) {
      sums[r][c] = add_word<0>(sums[r][c], fours[0][c], row);
      sums[r][c] = add_word<1>(sums[r][c], fours[1][c], row);
      sums[r][c] = add_word<2>(sums[r][c], fours[2][c], row);
      sums[r][c] = add_word<3>(sums[r][c], fours[3][c], row);
    }
  }
}
template <int R, int C> INLINE void part_rows(vi (*sums)[C]) {
  constexpr int PAIRED = paired(R);
  if constexpr (PAIRED > 0)
    UNROLL for (int r = 0; r < PAIRED; r += 2)
      UNROLL for (int c = 0; c < C; c++) {
        const int32x4_t low = (int32x4_t)sums[r][c], high = (int32x4_t)sums[r + 1][c];
        sums[r][c] = (vi)vuzp1q_s32(low, high), sums[r + 1][c] = (vi)vuzp2q_s32(low, high);
      }
}
#else
constexpr int FOURS = 1;

// sum + the products of fours of bytes with the four at `row`; not IN_32_BITS: of twos. WIDE: see blocks.h.
template <bool WIDE> INLINE vi add_word(vi sum, vi four, const int8_t* row) {
#if BYTES_DOT && defined(__AVX512F__)
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)four, (__m512i)set_word(row));
#elif BYTES_DOT
  return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)four, (__m256i)set_word(row));
#elif defined(__AVX512F__)
  const __m512i size = WIDE ? _mm512_abs_epi8((__m512i)four) : (__m512i)four;
  __m512i x = (__m512i)set_word(row);
  if (WIDE) x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask((__m512i)four), _mm512_setzero_si512(), x);
  return (vi)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16(size, x));
#elif defined(__AVX2__)
  const __m256i size = WIDE ? _mm256_abs_epi8((__m256i)four) : (__m256i)four;
  const __m256i x = WIDE ? _mm256_sign_epi8((__m256i)set_word(row), (__m256i)four) : (__m256i)set_word(row);
  return (vi)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16(size, x));
#else
  UNROLL for (int i = 0; i < 4; i++) sum += (four >> 8 * i & 255) * (int32_t)row[i];
  return sum;
#endif
}

// sums += the products of `fours` with those of R rows, from input `first` on.
template <bool WIDE, int R, int C>
INLINE void add_products(const vi (*fours)[C], const int8_t* const* rows, int first, vi (*sums)[C]) {
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int c = 0; c < C; c++) {
      sums[r][c] = add_word<WIDE>(sums[r][c], fours[0][c], rows[r] + first);
      settle(sums[r][c]);
    }
}
template <int R, int C> INLINE void part_rows(vi (*)[C]) {}
#endif

// 32 integers, which were added to the magic number of `round_row`, as bytes; and the sums of 16 each.
INLINE void store_bytes(const vf* x, int8_t* to, int16_t* sums) {
#if defined(__AVX512F__)
  for (int i = 0; i < 2; i++) {
    const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)ubits(x[i]));
    _mm_storeu_si128((__m128i*)(to + 16 * i), bytes);
    sums[i] = (int16_t)_mm512_reduce_add_epi32(_mm512_cvtepi8_epi32(bytes));
  }
#elif defined(__AVX2__)
  const __m256i zero = _mm256_set1_epi32(0x4b400000);  // of the magic number itself
  __m256i words[4];
  UNROLL for (int i = 0; i < 4; i++) words[i] = _mm256_sub_epi32((__m256i)ubits(x[i]), zero);
  const __m256i low = _mm256_packs_epi32(words[0], words[1]), high = _mm256_packs_epi32(words[2], words[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
  _mm256_storeu_si256((__m256i*)to, bytes);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
  __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  fours = _mm256_hadd_epi32(fours, fours);
  fours = _mm256_hadd_epi32(fours, fours);
  sums[0] = (int16_t)_mm256_extract_epi16(fours, 0);
  sums[1] = (int16_t)_mm256_extract_epi16(fours, 8);
#elif defined(PACELINE_NEON)
  UNROLL for (int i = 0; i < 2; i++) {  // the lowest bytes of sixteen words
    const uint16x8_t low = vuzp1q_u16((uint16x8_t)x[4 * i], (uint16x8_t)x[4 * i + 1]);
    const uint16x8_t high = vuzp1q_u16((uint16x8_t)x[4 * i + 2], (uint16x8_t)x[4 * i + 3]);
    const int8x16_t bytes = (int8x16_t)vuzp1q_u8((uint8x16_t)low, (uint8x16_t)high);
    vst1q_s8(to + 16 * i, bytes);
    sums[i] = vaddlvq_s8(bytes);
  }
#else
  for (int i = 0; i < 32 / LANES; i++) storeu(to + i * LANES, __builtin_convertvector(ubits(x[i]) & 0xff, bytes));
  int32_t half[2] = {};
  for (int k = 0; k < 32; k++) half[k / 16] += to[k];
  sums[0] = (int16_t)half[0], sums[1] = (int16_t)half[1];
#endif
}
