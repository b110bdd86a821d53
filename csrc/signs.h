// One bit per element, and means that every instruction set sums alike: shardlab/kernels/signs.py
// defines both.
#pragma once

#include <cfloat>

#include "bits.h"

static constexpr int64_t kLanes = 32;
static constexpr uint16_t kNoMean = 0x7FC0;  // bfloat16 NaN

SHARDLAB_INLINE float magnitude_of(float value) { return float_of(bits_of(value) & 0x7FFFFFFFu); }

// Lane l holds elements l, l + 32, l + 64, ...; then the upper half is added to the lower one.
SHARDLAB_INLINE float folded(float* lanes) {
  for (int64_t half = kLanes / 2; half; half /= 2)
    for (int64_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  return lanes[0];
}

// Sum of the magnitudes.
SHARDLAB_INLINE float magnitude_sum(const float* given, int64_t count) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int64_t l = 0; l < kLanes; ++l) lanes[l] += magnitude_of(given[i + l]);
  for (int64_t l = 0; i + l < count; ++l) lanes[l] += magnitude_of(given[i + l]);
  return folded(lanes);
}

// The mean as bfloat16, to nearest even: 0 where it would be subnormal, NaN where it is not finite.
SHARDLAB_INLINE uint16_t mean_word(float sum, int64_t count) {
  if (count == 0) return 0;
  const float mean = sum / static_cast<float>(count);
  const uint32_t bits = bits_of(mean), magnitude = bits & 0x7FFFFFFFu;
  if (magnitude < 0x00800000u) return 0;
  const uint32_t word = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return magnitude < 0x7F7F8000u ? static_cast<uint16_t>(word) : kNoMean;
}

// The bits of a group in planes (grouped.h), set for elements below zero.
SHARDLAB_INLINE void pack_signs(const float* given, int64_t count, uint8_t* __restrict codes) {
  const int64_t width = (count + 7) / 8;
  if (count % 8 == 0) {
    for (int64_t j = 0; j < width; ++j) {
      uint32_t byte = 0;
      for (int64_t place = 7; place >= 0; --place)
        byte = byte * 2 + (given[place * width + j] < 0.0f ? 1u : 0u);
      codes[j] = static_cast<uint8_t>(byte);
    }
    return;
  }
  for (int64_t j = 0; j < width; ++j) codes[j] = 0;
  for (int64_t i = 0; i < count; ++i)
    codes[i % width] = static_cast<uint8_t>(codes[i % width] | (given[i] < 0.0f) << (i / width));
}

// values[i] = clear or set, by the bit of element i.
SHARDLAB_INLINE void choose(const uint8_t* codes, int64_t count, float clear, float set,
                            float* __restrict values) {
  const int64_t width = (count + 7) / 8;
  for (int64_t place = 0; place * width < count; ++place) {
    const int64_t rest = count - place * width, size = rest < width ? rest : width;
    float* __restrict plane = values + place * width;
    for (int64_t j = 0; j < size; ++j) {
      const int32_t top = static_cast<int32_t>(static_cast<uint32_t>(codes[j]) << (31 - place));
      plane[j] = top < 0 ? set : clear;
    }
  }
}
