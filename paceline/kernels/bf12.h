// BF12: weights of bfloat16 in twelve bits, without loss; included by body.cpp.
//
// The high byte of a bfloat16, its sign and seven bits of its exponent, takes few values in a matrix. The sixteen most
// frequent ones are a table, and a weight holds its low byte and a code of four bits; a patch gives the high byte of a
// weight that the table lacks. A unit holds two pairs of inputs of 32 outputs: the low bytes of each pair [2, 64], then the
// codes [64], the first pair's in the lower four bits. Bytes lie in the order in which interleaving low and high ones
// leaves the words in theirs: words [2, 4, 8] as [4, 2, 8].

constexpr int64_t UNIT = 192;

// The patches of a part of a block, in the order of its units.
struct Patches {
  const int32_t *next, *end;

  // The unit of the next patch, counted from pair `first` on.
  int64_t unit(int64_t first) const { return next < end ? (*next >> 15) - first / 2 : INT64_MAX; }

  // Puts the next one into words that begin at pair `first`.
  void apply(half_t* words, int64_t first) {
    half_t& word = words[(*next >> 8) - 64 * first];
    word = (half_t)(*next++ << 8 | (word & 255));
  }

  // Those before pair `last`, which begins a unit; they are taken off.
  Patches take_before(int64_t last) {
    const int32_t* begin = next;
    while (next < end && *next >> 8 < 64 * last) next++;
    return {begin, next};
  }
};

INLINE Patches patches_of(const Matrix& m, int64_t block) {
  if (m.format != BF12) return {};
  const int32_t* all = m.patches + num_blocks(m) + 1;
  return {all + m.patches[block], all + m.patches[block + 1]};
}

#if defined(__AVX512F__)
struct Words {
  __m512i first, second;  // of outputs 0 .. 15 and 16 .. 31
};
template <int PAIR> INLINE Words words_of(const uint8_t* unit, __m512i table) {
  __m512i codes = _mm512_loadu_si512(unit + 128);
  codes = _mm512_and_si512(PAIR ? _mm512_srli_epi16(codes, 4) : codes, _mm512_set1_epi8(15));
  const __m512i low = _mm512_loadu_si512(unit + 64 * PAIR), high = _mm512_shuffle_epi8(table, codes);
  return {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
}
INLINE __m512i load_table(const Matrix& m) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)m.table)); }
INLINE Words load_words(const half_t* from) { return {_mm512_loadu_si512(from), _mm512_loadu_si512(from + 32)}; }
INLINE void store_words(Words words, half_t* to) {
  _mm512_storeu_si512(to, words.first);
  _mm512_storeu_si512(to + 32, words.second);
}
#endif

// The words [2, 32, 2] of a unit.
INLINE void widen_unit(const Matrix& m, const uint8_t* unit, half_t* to) {
#if defined(__AVX512F__)
  store_words(words_of<0>(unit, load_table(m)), to);
  store_words(words_of<1>(unit, load_table(m)), to + 64);
#else
  for (int pair = 0; pair < 2; pair++)
    for (int i = 0; i < 64; i++) {
      const int code = unit[128 + i] >> 4 * pair & 15, word = 32 * (i / 8 % 2) + 8 * (i / 16) + i % 8;
      to[64 * pair + word] = (half_t)(m.table[code] << 8 | unit[64 * pair + i]);
    }
#endif
}

// The words of pairs [first, first + pairs), whose first unit is at `from`. first: even.
static void widen_panel(const Matrix& m, const char* from, int64_t first, int64_t pairs, Patches patches, half_t* to) {
  for (int64_t u = 0; u < (pairs + 1) / 2; u++) widen_unit(m, (const uint8_t*)from + u * UNIT, to + 128 * u);
  while (patches.next < patches.end) patches.apply(to, first);
}
