// Eight-bit integers with one bfloat16 scale per group.
#include <cfloat>

#include "grouped.h"

// 1.5 * 2^23: a float this large has no fraction bits, so adding it rounds a small float to the
// nearest integer, ties to even, and leaves that integer in the low bits. Unlike rint() it
// vectorises on every instruction set.
static constexpr float kRounder = 12582912.0f;

static constexpr uint16_t kNotFinite = 0x7FC0;      // bfloat16 NaN
static constexpr uint32_t kTooLarge = 0x7F000000u;  // 2^127: code * scale would overflow

// The scale of a group whose largest code is `levels`, from the bit pattern of its largest magnitude.
SHARDLAB_INLINE uint16_t scale_of(uint32_t largest, float levels) {
  if (largest >= kTooLarge) return kNotFinite;
  if (largest == 0) return 0;
  float scale = float_of(largest) / levels;
  // no subnormal scale: hosts that flush subnormals to zero must decode the same values
  if (scale < FLT_MIN) scale = FLT_MIN;
  return static_cast<uint16_t>((bits_of(scale) + 0xFFFFu) >> 16);
}

// Bit patterns of magnitudes are ordered as the magnitudes are, with NaN above all.
SHARDLAB_INLINE uint32_t largest_of(const float* given, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = bits_of(given[i]) & 0x7FFFFFFFu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

struct Int8 {
  static constexpr int64_t kHeadBytes = 2, kBits = 8;
  static constexpr bool kSigned = true;
  struct Head {
    uint16_t word;
    float scale;
  };

  SHARDLAB_INLINE_MEMBER static Head head_of(const float* given, int64_t count) {
    const uint16_t word = scale_of(largest_of(given, count), 127.0f);
    return {word, widened(word)};
  }
  SHARDLAB_INLINE_MEMBER static void store(Head head, uint8_t* to) { store_word(to, head.word); }
  SHARDLAB_INLINE_MEMBER static Head load(const uint8_t* from) {
    const uint16_t word = load_word(from);
    return {word, widened(word)};
  }
  SHARDLAB_INLINE_MEMBER static void encode(const float* given, int64_t count, Head head, Random,
                                            uint8_t* __restrict codes) {
    if (head.word == 0 || head.word == kNotFinite) {
      for (int64_t i = 0; i < count; ++i) codes[i] = 0;
      return;
    }
    const float reciprocal = 1.0f / head.scale;
    for (int64_t i = 0; i < count; ++i)
      codes[i] = static_cast<uint8_t>(bits_of(given[i] * reciprocal + kRounder));
  }
  SHARDLAB_INLINE_MEMBER static Product value(Ints codes, Head head) {
    return {converted(codes), head.scale};
  }
};

SHARDLAB_GROUPED(int8, Int8)
