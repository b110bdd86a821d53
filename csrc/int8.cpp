// Eight-bit integers with one bfloat16 scale per group.
#include <cfloat>

#include "grouped.h"
#include "scale.h"

// 1.5 * 2^23: a float this large has no fraction bits, so adding it rounds a small float to the
// nearest integer, ties to even, and leaves that integer in the low bits. Unlike rint() it
// vectorises on every instruction set.
static constexpr float kRounder = 12582912.0f;

struct Int8 : ScaleHead {
  static constexpr int64_t kBits = 8;
  static constexpr bool kSigned = true;

  SHARDLAB_INLINE_MEMBER static Head head_of(const float* given, int64_t count) {
    const uint16_t word = scale_of(largest_of(given, count), 127.0f, FLT_MIN);
    return {word, widened(word)};
  }
  SHARDLAB_INLINE_MEMBER static void encode(const float* given, int64_t count, Head head, Random,
                                            uint8_t* __restrict codes) {
    if (has_no_codes(head)) {
      for (int64_t i = 0; i < count; ++i) codes[i] = 0;
      return;
    }
    const float reciprocal = 1.0f / head.value;
    for (int64_t i = 0; i < count; ++i)
      codes[i] = static_cast<uint8_t>(bits_of(given[i] * reciprocal + kRounder));
  }
  SHARDLAB_INLINE_MEMBER static Product value(Ints codes, Head head) {
    return {converted(codes), head.value};
  }
};

SHARDLAB_GROUPED(int8, Int8)
