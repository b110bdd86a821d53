// Integers with a scale per group: shardlab/kernels/integers.py.
#pragma once

#include "grouped.h"
#include "scales.h"

// `Scale` makes the head of a group. Codes of less than 8 bits are stored with kZero, their upper bit,
// added.
template <class Scale, int64_t kWidth, bool kStochastic>
struct Integers {
  static constexpr int64_t kHeadBytes = 2, kBits = kWidth;
  static constexpr bool kSigned = true;
  static constexpr int32_t kTop = (1 << (kBits - 1)) - 1, kZero = kBits == 8 ? 0 : kTop + 1;
  using Head = ScaleHead;

  SHARDLAB_INLINE_MEMBER static Head head_of(const float* given, int64_t count) {
    return Head::of(Scale::of(given, count));
  }
  SHARDLAB_INLINE_MEMBER static void store(Head head, uint8_t* to) { store_word(to, head.word); }
  SHARDLAB_INLINE_MEMBER static Head load(const uint8_t* from) { return Head::of(load_word(from)); }

  SHARDLAB_INLINE_MEMBER static void encode(const float* given, int64_t count, Head head,
                                            Random random, uint8_t* codes) {
    const float reciprocal = 1.0f / head.scale;
    RandomLanes lanes(random);
    write_codes<kBits, kZero>(count, codes, [&](uint8_t* to) SHARDLAB_INLINE_LAMBDA {
      if (head.blank())
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
    return {converted(codes - kZero), head.scale};
  }
};
