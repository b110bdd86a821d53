// Integers with a scale per group: shardlab/kernels/integers.py.
#pragma once

#include "grouped.h"
#include "scales.h"

// 1.5 * 2^23: a float this large has no fraction bits, so adding it rounds a small float to the
// nearest integer, ties to even, and leaves that integer in the low bits. Unlike rint() it
// vectorises on every instruction set.
static constexpr float kRounder = 12582912.0f;
static constexpr int32_t kRounderBits = 0x4B400000;

// `Policy` chooses the scale of a group. Codes of less than 8 bits are stored with kZero added.
template <class Policy, int64_t kWidth, bool kStochastic>
struct Integers : ScaleHead {
  static constexpr int64_t kBits = kWidth;
  static constexpr bool kSigned = true;
  static constexpr int32_t kTop = (1 << (kBits - 1)) - 1, kZero = kBits == 8 ? 0 : kTop + 1;

  SHARDLAB_INLINE_MEMBER static Head head_of(const float* given, int64_t count) {
    return of(Policy::of(given, count));
  }

  SHARDLAB_INLINE_MEMBER static Ints nearest(Floats steps) {
    const Ints codes = ints_of(steps + kRounder) - kRounderBits;
    return codes < kTop ? codes : kTop + Ints{};
  }
  // floor(steps + random), with 24 bits after the point
  SHARDLAB_INLINE_MEMBER static Ints stochastic(Floats steps, Words random) {
    const Ints fixed = __builtin_convertvector(steps * 0x1p24f, Ints), top = (kTop << 24) + Ints{};
    // rounding in float32 can take the largest element just above its level
    return ((fixed < top ? fixed : top) + reinterpret_cast<Ints>(random >> 8)) >> 24;
  }

  SHARDLAB_INLINE_MEMBER static void encode(const float* given, int64_t count, Head head,
                                            Random random, uint8_t* codes) {
    const float reciprocal = 1.0f / head.value;
    RandomLanes lanes(random);
    write_codes<kBits>(count, codes, [&](uint8_t* to) SHARDLAB_INLINE_LAMBDA {
      if (has_no_codes(head))
        std::memset(to, kZero, static_cast<size_t>(count));
      else
        write_bytes(given, count, to, [&](Floats some) SHARDLAB_INLINE_LAMBDA {
          const Floats steps = some * reciprocal;
          return kZero + (kStochastic ? stochastic(steps, lanes.next()) : nearest(steps));
        });
    });
  }
  SHARDLAB_INLINE_MEMBER static Product value(Ints codes, Head head) {
    return {converted(codes - kZero), head.value};
  }
};
