// Floats of fewer bits than float32, in arithmetic that every compiler vectorises.
#pragma once

#include "lanes.h"

// A sign, kExponent bits of exponent with the usual bias, kMantissa bits of mantissa, subnormals.
// Codes of magnitudes are without the sign. No subnormal float32 comes up: they are slow.
template <int kExponent, int kMantissa>
struct Narrow {
  static constexpr int kShift = 23 - kMantissa;
  static constexpr int32_t kBias = (1 << (kExponent - 1)) - 1;
  static constexpr int32_t kRebias = (127 - kBias) << 23;
  static constexpr int32_t kSmallestNormal = kRebias + (1 << 23);
  // What to add to an exponent for the float32 whose last bit is worth the step between codes
  // there. It has kStart in its last bits, so that they read the code when the magnitude is added
  // and then the exponent, which counts codes too, from bit kShift on.
  static constexpr int32_t kStart =
      -((127 - kBias + kShift + 1) << kMantissa) & ((2 << (kExponent + kMantissa)) - 1);
  static constexpr int32_t kRounder = (kShift << 23) + kStart;
  static constexpr int32_t kLeast = kSmallestNormal + kRounder;

  // The code of the nearest value, ties to even, from the bits of a magnitude that is at most the
  // largest value: in the last bits, with the place of the sign zero; what is above has no meaning.
  SHARDLAB_INLINE_MEMBER static uint32_t rounded(uint32_t magnitude) {
    const int32_t rounder = static_cast<int32_t>(magnitude & 0x7F800000u) + kRounder;
    const uint32_t raised = static_cast<uint32_t>(rounder > kLeast ? rounder : kLeast);
    return bits_of(float_of(magnitude) + float_of(raised)) + (raised >> kShift);
  }

  // 2^kUp times the magnitudes whose code starts at bit kShift, with all bits below it zero. With
  // an exponent of zero the number read is (1 + m) half, half = 2^(kUp - kBias), where (2 m) half
  // is meant: what it lacks from 2 half is to be taken off.
  template <int kUp>
  SHARDLAB_INLINE_MEMBER static Floats scaled(Words code) {
    const Floats read = floats_of(code + static_cast<uint32_t>(kRebias + (kUp << 23)));
    const Floats lack = float_of(static_cast<uint32_t>(kSmallestNormal + (kUp << 23))) - read;
    const Ints bits = reinterpret_cast<Ints>(lack);  // negative as lack is
    return read - reinterpret_cast<Floats>(bits > 0 ? bits : Ints{});
  }
};
