// Integers with a scale per group: shardlab/codecs/integers.py.
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

using Int8 = Integers<LargestOver<127>, 8, false>;
using Int8Stochastic = Integers<LargestOver<127>, 8, true>;
using Int4 = Integers<SignedLargestOver<8>, 4, false>;
using Int4Stochastic = Integers<LargestOver<7>, 4, true>;

// The levels of NormalFloat by code, as multiples of 2^-15, and the borders between them.
static constexpr int kLevels[16] = {-32768, -22813, -17206, -12941, -9321, -6055, -2984, 0,
                                    2608,   5273,   8065,   11073,  14441, 18436, 23690, 32768};
static constexpr float level(int code) { return static_cast<float>(kLevels[code]) * 0x1p-15f; }
static constexpr float border(int below) {
  return static_cast<float>(kLevels[below] + kLevels[below + 1]) * 0x1p-16f;
}

struct NormalFloat4 : ScaleHead {
  static constexpr int64_t kBits = 4;
  static constexpr int kZero = 7;

  SHARDLAB_INLINE_MEMBER static Head head_of(const float* given, int64_t count) {
    return of(LargestOver<1>::of(given, count));
  }

  // how many borders lie below, one bit after another
  SHARDLAB_INLINE_MEMBER static Ints code(Floats value) {
    const Floats quarters{border(3), border(11)};
    const Floats eighths{border(1), border(5), border(9), border(13)};
    const Floats sixteenths{border(0), border(2),  border(4),  border(6),
                            border(8), border(10), border(12), border(14)};
    Ints index = -(value > border(7));
    index = 2 * index - (value > lookup(quarters, index));
    index = 2 * index - (value > lookup(eighths, index));
    return 2 * index - (value > lookup(sixteenths, index));
  }
  SHARDLAB_INLINE_MEMBER static void encode(const float* given, int64_t count, Head head, Random,
                                            uint8_t* codes) {
    const float reciprocal = 1.0f / head.value;
    write_codes<kBits, 0>(count, codes, [&](uint8_t* to) SHARDLAB_INLINE_LAMBDA {
      if (has_no_codes(head))
        std::memset(to, kZero, static_cast<size_t>(count));
      else
        write_bytes(given, count, to, [&](Floats some) SHARDLAB_INLINE_LAMBDA {
          return code(some * reciprocal);
        });
    });
  }
  SHARDLAB_INLINE_MEMBER static Product value(Ints codes, Head head) {
    const Floats lower{level(0), level(1), level(2), level(3),
                       level(4), level(5), level(6), level(7)};
    const Floats upper{level(8),  level(9),  level(10), level(11),
                       level(12), level(13), level(14), level(15)};
    return {codes < 8 ? lookup(lower, codes) : lookup(upper, codes), head.value};
  }
};

SHARDLAB_GROUPED(int8, Int8)
SHARDLAB_GROUPED(int8_stochastic, Int8Stochastic)
SHARDLAB_GROUPED(int4, Int4)
SHARDLAB_GROUPED(int4_stochastic, Int4Stochastic)
SHARDLAB_GROUPED(nf4, NormalFloat4)
