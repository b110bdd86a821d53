// Integers with a scale per group: shardlab/codecs/kernels/integers.py.
#pragma once

#include "grouped.h"
#include "scales.h"

// `Policy` chooses the scale of a group. Codes of less than 8 bits are stored with kZero, their upper bit,
// added.
template <class Policy, int64_t kWidth, bool kStochastic>
struct Integers : ScaleHead {
  static constexpr int64_t kBits = kWidth;
  static constexpr bool kSigned = true;
  static constexpr int32_t kTop = (1 << (kBits - 1)) - 1, kZero = kBits == 8 ? 0 : kTop + 1;

  SHARDLAB_INLINE_MEMBER static Head head_of(const float* given, int64_t count) {
    return of(Policy::of(given, count));
  }

  SHARDLAB_INLINE_MEMBER static void encode(const float* given, int64_t count, Head head,
                                            Random random, uint8_t* codes) {
    const float reciprocal = 1.0f / head.value;
    RandomLanes lanes(random);
    write_codes<kBits, kZero>(count, codes, [&](uint8_t* to) SHARDLAB_INLINE_LAMBDA {
      if (has_no_codes(head))
        std::memset(to, 0, static_cast<size_t>(count));
      else
        write_bytes(given, count, to, [&](Floats some) SHARDLAB_INLINE_LAMBDA {
          const Floats steps = some * reciprocal;
          return kStochastic ? rounded(steps, lanes.next()) : nearest(smaller_of(steps, kTop));
        });
    });
  }
  // floor(steps + random), with 24 bits after the point. Rounding in float32 can take the largest
  // element just above its level.
  SHARDLAB_INLINE_MEMBER static Ints rounded(Floats steps, Words random) {
    const Floats fixed = smaller_of(steps * 0x1p24f, kTop * 0x1p24f);
    return (__builtin_convertvector(fixed, Ints) + reinterpret_cast<Ints>(random >> 8)) >> 24;
  }
  SHARDLAB_INLINE_MEMBER static Product value(Ints codes, Head head) {
    return {converted(codes - kZero), head.value};
  }
};
