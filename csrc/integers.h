// Integers with a scale per group: shardlab/kernels/integers.py.
#pragma once

#include "grouped.h"
#include "scales.h"

// 1.5 * 2^23: a float this large has no fraction bits, so adding it rounds a small float to the
// nearest integer, ties to even, and leaves that integer in the low bits. Unlike rint() it
// vectorises on every instruction set.
static constexpr float kRounder = 12582912.0f;
static constexpr int32_t kRounderBits = 0x4B400000;

// `Scale` makes the head of a group. Codes of less than 8 bits are stored with kZero added.
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
    const float reciprocal = 1.0f / head.scale;
    RandomLanes lanes(random);
    write_codes<kBits>(count, codes, [&](uint8_t* to) SHARDLAB_INLINE_LAMBDA {
      if (head.blank())
        std::memset(to, kZero, static_cast<size_t>(count));
      else
        write_bytes(given, count, to, [&](Floats some) SHARDLAB_INLINE_LAMBDA {
          const Floats steps = some * reciprocal;
          return kZero + (kStochastic ? stochastic(steps, lanes.next()) : nearest(steps));
        });
    });
  }
  SHARDLAB_INLINE_MEMBER static Product value(Ints codes, Head head) {
    return {converted(codes - kZero), head.scale};
  }
};
