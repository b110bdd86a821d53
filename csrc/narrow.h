// Floats of fewer bits than float32, in arithmetic that every compiler vectorises.
#pragma once

#include "bits.h"

// A sign, kExponent bits of exponent with the usual bias, kMantissa bits of mantissa, subnormals.
// Codes of magnitudes are without the sign. No subnormal float32 comes up: they are slow.
template <int kExponent, int kMantissa>
struct Narrow {
  static constexpr int kShift = 23 - kMantissa;
  static constexpr int32_t kBias = (1 << (kExponent - 1)) - 1;
  static constexpr int32_t kRebias = (127 - kBias) << 23;
  static constexpr int32_t kSmallestNormal = kRebias + (1 << 23);
  // the float32 whose last bit is worth the smallest subnormal: adding it rounds subnormals
  static constexpr int32_t kRounder = (127 + 24 - kBias - kMantissa) << 23;

  // The code of the nearest value, ties to even, from the bits of a finite magnitude; above the
  // largest value it runs on as if there were more exponents.
  SHARDLAB_INLINE_MEMBER static int32_t rounded(int32_t magnitude) {
    const int32_t raised = magnitude > kSmallestNormal ? magnitude : kSmallestNormal;
    const int32_t half = (1 << (kShift - 1)) - 1 - kRebias + ((raised >> kShift) & 1);
    const int32_t normal = (raised + half) >> kShift;
    const float tiny = float_of(static_cast<uint32_t>(magnitude)) + float_of(kRounder);
    const int32_t subnormal = static_cast<int32_t>(bits_of(tiny)) - kRounder;
    // the one that is meant is the smaller: among normal numbers the steps grow
    return subnormal < normal ? subnormal : normal;
  }

  // 2^kUp times the magnitude whose code starts at bit kShift, with all bits below it zero. With
  // an exponent of zero the number read is (1 + m) half, half = 2^(kUp - kBias), where (2 m) half
  // is meant: what it lacks from 2 half is to be taken off.
  template <int kUp>
  SHARDLAB_INLINE_MEMBER static float scaled(uint32_t code) {
    const float read = float_of(code + static_cast<uint32_t>(kRebias + (kUp << 23)));
    const float lack = float_of(static_cast<uint32_t>(kSmallestNormal + (kUp << 23))) - read;
    return read - (lack > 0.0f ? lack : 0.0f);
  }
};
