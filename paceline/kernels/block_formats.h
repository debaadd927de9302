// Quantised weights, most of them in formats of llama.cpp's files: what their blocks hold, and how they lie in memory.
//
// A weight is  d * scale * code + e * min.  d and e are floats of 16 bits, for `each` inputs of an output; scale and min are
// integers for `sub` inputs, where there are any (otherwise 1). Formats may have an `offset`, of every code:
// d * scale * (code - offset) + e * min. Layouts of the files: ggml-common.h of ggml. INT4, INT3 and INT2 are ours.
//
// In memory a record holds `each` inputs of sixteen outputs, one after another in the order of inputs; two columns of
// sixteen outputs are a block:
//
//     d [16]   e [16]   scales [each / sub / 2, 16, 2]   mins, as scales   for every 32 inputs: planes
//
// A plane is a vector of 64 bytes, four for each output, and every byte is that of one input of each four. Of 32 inputs,
// which are eight fours:
//
//     4 bits    4 planes: in plane p the lower four bits are of four 2 p, the upper ones of four 2 p + 1
//     2 bits    2 planes: in plane p bits 2 j are of four 4 p + j
//     1 bit     1 plane: bit j is of four j
//     8 bits    8 planes
//
// Codes of 3, 5 and 6 bits are planes of their lower bits (2, 4, 4), then planes of their upper ones (1, 1, 2).
#pragma once
#include <stdint.h>
#include <string.h>

#include "abi.h"
#include "simd.h"

struct BlockFormat {
  int bits;        // of a code
  int each;        // inputs that share d
  int sub;         // inputs that share a scale, 0: there are none
  bool has_mins;   // e, and with scales an integer for each
  int offset;      // of codes
  const int8_t* values;  // what codes stand for, less `offset`; null: themselves
  int bytes;       // of a block in the file
  bool is_bf16;    // d and e: bfloat16 in the place of float16
};

// What four bits stand for; of FP4 twice the numbers, and twelve more, so that none is negative.
static const int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t FP4_VALUES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

constexpr BlockFormat block_format(int format) {
  switch (format) {
    case Q4_0: return {4, 32, 0, false, 8, nullptr, 18};
    case Q4_1: return {4, 32, 0, true, 0, nullptr, 20};
    case Q5_0: return {5, 32, 0, false, 16, nullptr, 22};
    case Q5_1: return {5, 32, 0, true, 0, nullptr, 24};
    case Q8_0: return {8, 32, 0, false, 0, nullptr, 34};
    case Q2_K: return {2, 256, 16, true, 0, nullptr, 84};
    case Q3_K: return {3, 256, 16, false, 4, nullptr, 110};
    case Q4_K: return {4, 256, 32, true, 0, nullptr, 144};
    case Q5_K: return {5, 256, 32, true, 0, nullptr, 176};
    case Q6_K: return {6, 256, 16, false, 32, nullptr, 210};
    case IQ4_NL: return {4, 32, 0, false, 0, IQ4_VALUES, 18};
    case IQ4_XS: return {4, 256, 32, false, 0, IQ4_VALUES, 136};
    case MXFP4: return {4, 32, 0, false, 12, FP4_VALUES, 17, true};
    case INT2: return {2, 32, 0, true, 2, nullptr, 20, true};
    case INT3: return {3, 32, 0, true, 4, nullptr, 20, true};
    case INT4: return {4, 32, 0, true, 8, nullptr, 20, true};
    default: return {};
  }
}

inline bool is_block_format(int format) { return format >= BLOCK_FORMATS; }
constexpr int COLUMN = 16;  // outputs of a record
constexpr int64_t scale_bytes(const BlockFormat& f) { return f.sub ? f.each / f.sub * COLUMN : 0; }
constexpr int64_t plane_bytes(const BlockFormat& f) { return 64 * f.bits; }  // of 32 inputs
constexpr int64_t record_bytes(const BlockFormat& f) {
  return (2 * COLUMN + scale_bytes(f)) * (1 + f.has_mins) + f.each / 32 * plane_bytes(f);
}

// One block of a file, or its place in a record.
struct BlockCodes {
  uint8_t codes[256];
  int8_t scales[16];
  uint8_t mins[16];
  uint16_t d, e;
};

inline void six_bits(const uint8_t* s, int j, int8_t* scale, uint8_t* min) {  // the scales of Q4_K and Q5_K
  *scale = (int8_t)(j < 4 ? s[j] & 63 : (s[j + 4] & 15) | s[j - 4] >> 6 << 4);
  *min = (uint8_t)(j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | s[j] >> 6 << 4);
}

// Reads a block of a file.
static void read_block(int format, const uint8_t* from, BlockCodes* to) {
  const auto two = [&](int at) { return (uint16_t)(from[at] | from[at + 1] << 8); };
  const auto nibbles = [&](const uint8_t* qs, int first, int count) {  // lower halves, then upper ones
    for (int j = 0; j < count; j++) to->codes[first + j] = qs[j] & 15, to->codes[first + count + j] = qs[j] >> 4;
  };
  const auto each_32 = [](auto code) {
    UNROLL for (int g = 0; g < 8; g++)
      for (int k = 0; k < 32; k++) code(g, k);
  };
  switch (format) {
    case Q4_0:
    case IQ4_NL:
      to->d = two(0);
      nibbles(from + 2, 0, 16);
      break;
    case Q4_1:
    case INT2:  // these are not in files
    case INT3:
    case INT4:
      to->d = two(0), to->e = two(2);
      nibbles(from + 4, 0, 16);
      break;
    case Q5_0:
    case Q5_1: {
      const uint8_t *high = from + (format == Q5_0 ? 2 : 4), *qs = high + 4;
      to->d = two(0), to->e = two(2);
      nibbles(qs, 0, 16);
      for (int j = 0; j < 8; j++) {  // four bits, each to a byte
        uint32_t four;
        memcpy(&four, to->codes + 4 * j, 4);
        four |= ((high[j / 2] >> j % 2 * 4 & 15) * 0x204081u & 0x01010101u) << 4;
        memcpy(to->codes + 4 * j, &four, 4);
      }
      break;
    }
    case Q8_0:
      to->d = two(0);
      memcpy(to->codes, from + 2, 32);
      break;
    case Q2_K:
      to->d = two(80), to->e = two(82) ^ 0x8000;
      for (int j = 0; j < 16; j++) to->scales[j] = from[j] & 15, to->mins[j] = from[j] >> 4;
      each_32([&](int g, int k) { to->codes[32 * g + k] = from[16 + g / 4 * 32 + k] >> g % 4 * 2 & 3; });
      break;
    case Q3_K: {
      const uint8_t *high = from, *low = from + 32, *s = from + 96;
      to->d = two(108);
      for (int j = 0; j < 16; j++)
        to->scales[j] = (int8_t)((s[j % 8] >> j / 8 * 4 & 15) | (s[8 + j % 4] >> j / 4 * 2 & 3) << 4) - 32;
      each_32([&](int g, int k) {
        to->codes[32 * g + k] = (low[g / 4 * 32 + k] >> g % 4 * 2 & 3) | (high[k] >> g & 1) << 2;
      });
      break;
    }
    case Q4_K:
    case Q5_K: {
      const uint8_t *high = from + 16, *qs = high + (format == Q5_K ? 32 : 0);
      to->d = two(0), to->e = two(2) ^ 0x8000;
      for (int j = 0; j < 8; j++) six_bits(from + 4, j, to->scales + j, to->mins + j);
      for (int j = 0; j < 4; j++) nibbles(qs + 32 * j, 64 * j, 32);
      if (format == Q5_K) each_32([&](int g, int k) { to->codes[32 * g + k] |= (high[k] >> g & 1) << 4; });
      break;
    }
    case Q6_K:
      to->d = two(208);
      memcpy(to->scales, from + 192, 16);
      each_32([&](int g, int k) {
        to->codes[32 * g + k] = (from[64 * (g / 4) + 32 * (g % 2) + k] >> g % 4 / 2 * 4 & 15) |
                                (from[128 + 32 * (g / 4) + k] >> 2 * (g % 4) & 3) << 4;
      });
      break;
    case IQ4_XS:
      to->d = two(0);
      for (int j = 0; j < 8; j++)
        to->scales[j] = (int8_t)((from[4 + j / 2] >> j % 2 * 4 & 15) | (two(2) >> 2 * j & 3) << 4) - 32;
      UNROLL for (int j = 0; j < 8; j++) nibbles(from + 8 + 16 * j, 32 * j, 16);
      break;
    case MXFP4:  // an exponent of 8 bits, as half of a bfloat16
      to->d = from[0] > 1 ? (uint16_t)((from[0] - 1) << 7) : (uint16_t)(0x20 << from[0]);
      nibbles(from + 1, 0, 16);
      break;
  }
}

// The lower and the upper bits of codes of 3, 5 and 6 bits.
constexpr int low_bits(int bits) { return bits == 3 ? 2 : bits > 4 && bits < 8 ? 4 : bits; }

// Where the bits of a code lie: the byte in the planes of its 32 inputs, and the shift. k: of these inputs.
struct BitPlace {
  int byte, shift;
};
constexpr BitPlace place_of_bits(int bits, int k, int out) {
  const int four = k / 4, per = 8 / bits;  // fours that share a plane
  const int shift = bits == 4 ? four % 2 * 4 : bits == 8 ? 0 : four % per * bits;
  return {four / per * 64 + 4 * out + k % 4, shift};
}

// Writes BITS bits of 32 codes, from bit `from` on, into the planes of output `out`. A word is those of four inputs.
template <int BITS> INLINE void write_planes(const uint8_t* codes, int from, int out, uint8_t* planes) {
  constexpr int PER = 8 / BITS;  // fours that share a plane
  for (int p = 0; p < BITS; p++) {
    uint32_t plane = 0;
    for (int j = 0; j < PER; j++) {
      uint32_t four;
      memcpy(&four, codes + 4 * (PER * p + j), 4);
      plane |= (four >> from & 0x01010101u * ((1 << BITS) - 1)) << BITS * j;
    }
    memcpy(planes + 64 * p + 4 * out, &plane, 4);
  }
}
INLINE void write_planes(int bits, const uint8_t* codes, int from, int out, uint8_t* planes) {
  if (bits == 1) write_planes<1>(codes, from, out, planes);
  else if (bits == 2) write_planes<2>(codes, from, out, planes);
  else if (bits == 4) write_planes<4>(codes, from, out, planes);
  else if (bits == 8) write_planes<8>(codes, from, out, planes);
}

// Writes a block into a record, as that of output `out`.
INLINE void write_record(const BlockFormat& f, const BlockCodes& from, int out, uint8_t* record) {
  memcpy(record + 2 * out, &from.d, 2);
  if (f.has_mins) memcpy(record + 2 * (COLUMN + out), &from.e, 2);
  uint8_t* at = record + 2 * COLUMN * (1 + f.has_mins);
  for (int part = 0; f.sub && part < 1 + f.has_mins; part++, at += scale_bytes(f))
    for (int j = 0; j < f.each / f.sub; j += 2)
      memcpy(at + (j / 2 * COLUMN + out) * 2, part ? (const void*)(from.mins + j) : from.scales + j, 2);
  const int low = low_bits(f.bits);
  for (int k = 0; k < f.each; k += 32, at += plane_bytes(f)) {
    write_planes(low, from.codes + k, 0, out, at);
    write_planes(f.bits - low, from.codes + k, low, out, at + 64 * low);
  }
}

static void read_record(const BlockFormat& f, const uint8_t* record, int out, BlockCodes* to) {
  memcpy(&to->d, record + 2 * out, 2);
  if (f.has_mins) memcpy(&to->e, record + 2 * (COLUMN + out), 2);
  const uint8_t* at = record + 2 * COLUMN * (1 + f.has_mins);
  for (int part = 0; f.sub && part < 1 + f.has_mins; part++, at += scale_bytes(f))
    for (int j = 0; j < f.each / f.sub; j++) {
      const uint8_t byte = at[(j / 2 * COLUMN + out) * 2 + j % 2];
      if (part) to->mins[j] = byte;
      else to->scales[j] = (int8_t)byte;
    }
  const int low = low_bits(f.bits), high = f.bits - low;
  for (int k = 0; k < f.each; k++) {
    const uint8_t* planes = at + k / 32 * plane_bytes(f);
    const BitPlace lower = place_of_bits(low, k % 32, out);
    to->codes[k] = planes[lower.byte] >> lower.shift & ((1 << low) - 1);
    if (!high) continue;
    const BitPlace upper = place_of_bits(high, k % 32, out);
    to->codes[k] |= (planes[64 * low + upper.byte] >> upper.shift & ((1 << high) - 1)) << low;
  }
}

// The weights of output `out` in float32. data: columns of records.
static void float_row(int format, const uint8_t* data, int64_t ins, int64_t out, float* to) {
  const BlockFormat f = block_format(format);
  const uint8_t* record = data + out / COLUMN * (ins / f.each) * record_bytes(f);
  BlockCodes b = {};
  for (int64_t first = 0; first < ins; first += f.each, record += record_bytes(f)) {
    read_record(f, record, (int)(out % COLUMN), &b);
    const float d = f.is_bf16 ? from_bf16(b.d) : from_half(b.d), e = f.is_bf16 ? from_bf16(b.e) : from_half(b.e);
    for (int k = 0; k < f.each; k++) {
      const int code = f.values ? f.values[b.codes[k]] : f.bits == 8 ? (int8_t)b.codes[k] : b.codes[k];
      const float x = d * (float)((code - f.offset) * (f.sub ? b.scales[k / f.sub] : 1));
      to[first + k] = f.has_mins ? x + e * (float)(f.sub ? b.mins[k / f.sub] : 1) : x;
    }
  }
}
