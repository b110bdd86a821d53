// Groups of elements as int8 codes with one bfloat16 scale. Each group is read twice, the second
// time from the first-level cache, so memory sees one pass.
#include <cfloat>

#include "bits.h"

// 1.5 * 2^23: a float this large has no fraction bits, so adding it rounds a small float to the
// nearest integer, ties to even, and leaves that integer in the low bits. Unlike rint() it
// vectorises on every instruction set.
static constexpr float kRounder = 12582912.0f;

static constexpr uint16_t kNotFinite = 0x7FC0;  // bfloat16 NaN
static constexpr uint32_t kTooLarge = 0x7F000000u;  // 2^127: code * scale would overflow

// The scale of a group, from the bit pattern of its largest magnitude. Bit patterns of magnitudes
// are ordered as the magnitudes are, with NaN above all.
SHARDLAB_INLINE uint16_t scale_of(uint32_t largest) {
  if (largest >= kTooLarge) return kNotFinite;
  if (largest == 0) return 0;
  float scale = float_of(largest) / 127.0f;
  // no subnormal scale: hosts that flush subnormals to zero must decode the same values
  if (scale < FLT_MIN) scale = FLT_MIN;
  return static_cast<uint16_t>((bits_of(scale) + 0xFFFFu) >> 16);
}

SHARDLAB_INLINE void clear(uint8_t* __restrict codes, int64_t count) {
  for (int64_t i = 0; i < count; ++i) codes[i] = 0;
}

SHARDLAB_INLINE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

void int8_encode(const float* __restrict x, int64_t n, int64_t group,
                 uint8_t* __restrict payload) {
  const int64_t groups = (n + group - 1) / group;
  uint8_t* __restrict codes = payload + 2 * groups;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t start = g * group;
    const int64_t count = n - start < group ? n - start : group;
    const float* __restrict in = x + start;
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; ++i) largest = larger(largest, bits_of(in[i]) & 0x7FFFFFFFu);
    const uint16_t word = scale_of(largest);
    store_word(payload + 2 * g, word);
    if (word == 0 || word == kNotFinite) {
      clear(codes + start, count);
      continue;
    }
    const float reciprocal = 1.0f / widened(word);
    for (int64_t i = 0; i < count; ++i)
      codes[start + i] = static_cast<uint8_t>(bits_of(in[i] * reciprocal + kRounder));
  }
}

void int8_encode_residual(const float* __restrict x, float* __restrict residual, int64_t n,
                          int64_t group, uint8_t* __restrict payload) {
  const int64_t groups = (n + group - 1) / group;
  uint8_t* __restrict codes = payload + 2 * groups;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t start = g * group;
    const int64_t count = n - start < group ? n - start : group;
    const float* __restrict in = x + start;
    float* __restrict kept = residual + start;
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; ++i)
      largest = larger(largest, bits_of(in[i] + kept[i]) & 0x7FFFFFFFu);
    const uint16_t word = scale_of(largest);
    store_word(payload + 2 * g, word);
    if (word == 0 || word == kNotFinite) {
      clear(codes + start, count);
      if (word == 0)
        for (int64_t i = 0; i < count; ++i) kept[i] = in[i] + kept[i];
      continue;
    }
    const float scale = widened(word);
    const float reciprocal = 1.0f / scale;
    for (int64_t i = 0; i < count; ++i) {
      const float wanted = in[i] + kept[i];
      const float shifted = wanted * reciprocal + kRounder;
      codes[start + i] = static_cast<uint8_t>(bits_of(shifted));
      kept[i] = wanted - (shifted - kRounder) * scale;
    }
  }
}

void int8_decode_add(const uint8_t* __restrict payload, int64_t n, int64_t group, float alpha,
                     float* __restrict out) {
  const int64_t groups = (n + group - 1) / group;
  const uint8_t* __restrict codes = payload + 2 * groups;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t start = g * group;
    const int64_t end = n - start < group ? n : start + group;
    const float scale = widened(load_word(payload + 2 * g));
    for (int64_t i = start; i < end; ++i)
      out[i] += alpha * (static_cast<float>(static_cast<int8_t>(codes[i])) * scale);
  }
}
