// One bfloat16 scale per group, from its largest magnitude.
#pragma once

#include "bits.h"

static constexpr uint16_t kNotFinite = 0x7FC0;      // bfloat16 NaN
static constexpr uint32_t kTooLarge = 0x7F000000u;  // 2^127: code * scale could overflow

struct Scale {
  uint16_t word;
  float value;
};

// Whether all elements of the group are coded as 0: there are only zeros, or something not finite.
SHARDLAB_INLINE bool has_no_codes(Scale scale) {
  return scale.word == 0 || scale.word == kNotFinite;
}

// The scale of a group whose largest code is `levels`, from the bit pattern of its largest magnitude;
// no smaller than `smallest`, so that hosts that flush subnormals to zero decode the same values.
SHARDLAB_INLINE uint16_t scale_of(uint32_t largest, float levels, float smallest) {
  if (largest >= kTooLarge) return kNotFinite;
  if (largest == 0) return 0;
  float scale = float_of(largest) / levels;
  if (scale < smallest) scale = smallest;
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

// The head of formats that send a scale and nothing else.
struct ScaleHead {
  static constexpr int64_t kHeadBytes = 2;
  using Head = Scale;

  SHARDLAB_INLINE_MEMBER static void store(Head head, uint8_t* to) { store_word(to, head.word); }
  SHARDLAB_INLINE_MEMBER static Head load(const uint8_t* from) {
    const uint16_t word = load_word(from);
    return {word, widened(word)};
  }
};
