// One bfloat16 scale per group: shardlab/codecs/scales.py.
#pragma once

#include <cfloat>

#include "lanes.h"

static constexpr uint16_t kNotFinite = 0x7FC0;      // bfloat16 NaN
static constexpr uint32_t kTooLarge = 0x7F000000u;  // 2^127: code * scale would overflow

// What the head of a group says: its scale, as it travels and as a float.
struct Scale {
  uint16_t word;
  float value;
};

// Whether all elements of the group have one code: there are only zeros, or something not finite.
SHARDLAB_INLINE bool has_no_codes(Scale scale) {
  return scale.word == 0 || scale.word == kNotFinite;
}

// The head of formats that send a scale and nothing else.
struct ScaleHead {
  static constexpr int64_t kHeadBytes = 2;
  using Head = Scale;

  SHARDLAB_INLINE_MEMBER static Head of(uint16_t word) { return {word, widened(word)}; }
  SHARDLAB_INLINE_MEMBER static void store(Head head, uint8_t* to) { store_word(to, head.word); }
  SHARDLAB_INLINE_MEMBER static Head load(const uint8_t* from) { return of(load_word(from)); }
};

// Rounded up to bfloat16, so that no code is clipped; no smaller than `smallest`, so that hosts that
// flush subnormals to zero decode the same values.
SHARDLAB_INLINE uint16_t rounded_up(float scale, float smallest = FLT_MIN) {
  if (scale < smallest) scale = smallest;
  return static_cast<uint16_t>((bits_of(scale) + 0xFFFFu) >> 16);
}

// The scale of a group whose largest code is `levels`, from the bit pattern of its largest magnitude.
SHARDLAB_INLINE uint16_t scale_of(uint32_t largest, float levels, float smallest = FLT_MIN) {
  if (largest >= kTooLarge) return kNotFinite;
  if (largest == 0) return 0;
  return rounded_up(float_of(largest) / levels, smallest);
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

// The largest magnitude becomes the code `kLevels`.
template <int kLevels>
struct LargestOver {
  SHARDLAB_INLINE_MEMBER static uint16_t of(const float* given, int64_t count) {
    return scale_of(largest_of(given, count), static_cast<float>(kLevels));
  }
};

// The element of largest magnitude becomes the code -kLevels: its sign goes to the scale. Of two
// elements with opposite signs the positive one counts.
template <int kLevels>
struct SignedLargestOver {
  SHARDLAB_INLINE_MEMBER static uint16_t of(const float* given, int64_t count) {
    // as signed integers positive floats come in their order, above all negative ones; as unsigned
    // integers negative floats come in the order of their magnitudes, above all positive ones
    int32_t top = 0;
    uint32_t bottom = 0;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t pattern = bits_of(given[i]);
      top = static_cast<int32_t>(pattern) > top ? static_cast<int32_t>(pattern) : top;
      bottom = pattern > bottom ? pattern : bottom;
    }
    const uint32_t positive = static_cast<uint32_t>(top);
    const uint32_t negative = bottom >> 31 ? bottom & 0x7FFFFFFFu : 0;
    const uint32_t largest = positive > negative ? positive : negative;
    const uint16_t word = scale_of(largest, static_cast<float>(kLevels));
    const bool flip = positive == largest && word && word != kNotFinite;
    return flip ? word | 0x8000u : word;
  }
};
