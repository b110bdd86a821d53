// Integers of 2, 4 and 8 bits with one bfloat16 scale per group: shardlab/kernels/{int8,int4,qsgd}.py
// specify them.
#include <cmath>

#include "grouped.h"
#include "scale.h"
#include "signs.h"

// 1.5 * 2^23: a float this large has no fraction bits, so adding it rounds a small float to the
// nearest integer, ties to even, and leaves that integer in the low bits. Unlike rint() it
// vectorises on every instruction set.
static constexpr float kRounder = 12582912.0f;

// Codes of `count` elements in two's complement, one to a byte, as planes of kBits.
template <int64_t kBits>
SHARDLAB_INLINE void pack(uint8_t* __restrict wide, int64_t count, uint8_t* __restrict codes) {
  constexpr int64_t kPlanes = 8 / kBits;
  constexpr uint32_t kMask = (1u << kBits) - 1;
  const int64_t width = code_bytes(count, kBits);
  for (int64_t i = count; i < kPlanes * width; ++i) wide[i] = 0;
  for (int64_t j = 0; j < width; ++j) {
    uint32_t byte = 0;
#pragma GCC unroll 4
    for (int64_t p = 0; p < kPlanes; ++p) byte |= (wide[p * width + j] & kMask) << (p * kBits);
    codes[j] = static_cast<uint8_t>(byte);
  }
}

// kLevels is the largest code. A format adds head_of, the choice of the scale.
template <int64_t kBitsOfCode, int kLevels, bool kStochastic>
struct Integers : ScaleHead {
  static constexpr int64_t kBits = kBitsOfCode;

  SHARDLAB_INLINE_MEMBER static void encode(const float* given, int64_t count, Head head,
                                            Random random, uint8_t* __restrict codes) {
    if (has_no_codes(head)) {
      for (int64_t j = 0; j < code_bytes(count, kBits); ++j) codes[j] = 0;
      return;
    }
    if constexpr (kBits == 8) {
      round(given, count, head, random, codes);
    } else {
      alignas(64) uint8_t wide[kLargestGroup + 8];
      round(given, count, head, random, wide);
      pack<kBits>(wide, count, codes);
    }
  }
  template <class Word>
  SHARDLAB_INLINE_MEMBER static auto value(Word code, Head head) {
    return upper_integer<kBits>(code) * head.value;
  }

 private:
  SHARDLAB_INLINE_MEMBER static void round(const float* given, int64_t count, Head head,
                                           Random random, uint8_t* __restrict codes) {
    const float reciprocal = 1.0f / head.value, limit = static_cast<float>(kLevels);
    for (int64_t i = 0; i < count; ++i) {
      const float exact = given[i] * reciprocal;
      float shifted = exact + kRounder;
      if constexpr (kStochastic) {
        const float within = exact < limit ? (exact > -limit ? exact : -limit) : limit;
        const float nearest = (within + kRounder) - kRounder;
        const float below = nearest > within ? nearest - 1.0f : nearest;
        shifted = (random(i) < within - below ? below + 1.0f : below) + kRounder;
      } else if constexpr (kBits < 8) {
        shifted = (exact < limit ? exact : limit) + kRounder;
      }
      codes[i] = static_cast<uint8_t>(bits_of(shifted));
    }
  }
};

// The largest magnitude of the group has the largest code.
template <int64_t kBits, int kLevels, bool kStochastic>
struct OfLargest : Integers<kBits, kLevels, kStochastic> {
  SHARDLAB_INLINE_MEMBER static Scale head_of(const float* given, int64_t count) {
    const uint16_t word =
        scale_of(largest_of(given, count), static_cast<float>(kLevels), 0x1p-126f);
    return {word, widened(word)};
  }
};

// All 16 codes: the element of largest magnitude has code -8, whatever its sign.
struct Int4 : Integers<4, 7, false> {
  SHARDLAB_INLINE_MEMBER static Scale head_of(const float* given, int64_t count) {
    const uint32_t largest = largest_of(given, count);
    uint16_t word = scale_of(largest, 8.0f, 0x1p-126f);
    float highest = given[0];
    for (int64_t i = 0; i < count; ++i) highest = given[i] > highest ? given[i] : highest;
    if (word != 0 && word != kNotFinite && highest == float_of(largest)) word |= 0x8000u;
    return {word, widened(word)};
  }
};

// The Euclidean norm of the group has the code kLevels.
template <int64_t kBits, int kLevels>
struct OfNorm : Integers<kBits, kLevels, true> {
  SHARDLAB_INLINE_MEMBER static Scale head_of(const float* given, int64_t count) {
    const uint32_t largest = largest_of(given, count);
    if (largest == 0 || largest >= kTooLarge) {
      const uint16_t word = largest == 0 ? 0 : kNotFinite;
      return {word, widened(word)};
    }
    // by a power of two that makes the largest one 1 to 2, so that squares are in range
    const uint32_t exponent = largest < 0x00800000u ? 0x00800000u : largest & 0x7F800000u;
    const float down = float_of(0x7F000000u - exponent), up = float_of(exponent);
    float lanes[kLanes];
    clear(lanes);
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes)
      for (int64_t l = 0; l < kLanes; ++l) {
        const float value = given[i + l] * down;
        lanes[l] += value * value;
      }
    for (int64_t l = 0; i + l < count; ++l) {
      const float value = given[i + l] * down;
      lanes[l] += value * value;
    }
    // sqrtf is rounded correctly, so it is the same everywhere
    const uint32_t norm = bits_of(std::sqrt(folded(lanes)) / static_cast<float>(kLevels) * up);
    const uint16_t word = scale_of(norm, 1.0f, 0x1p-126f);
    return {word, widened(word)};
  }
};

using Int8 = OfLargest<8, 127, false>;
using Int8Stochastic = OfLargest<8, 127, true>;
using Int4Stochastic = OfLargest<4, 7, true>;
using Qsgd1 = OfNorm<2, 1>;
using Qsgd7 = OfNorm<4, 7>;
using Qsgd127 = OfNorm<8, 127>;

SHARDLAB_GROUPED(int8, Int8)
SHARDLAB_GROUPED(int8_stochastic, Int8Stochastic)
SHARDLAB_GROUPED(int4, Int4)
SHARDLAB_GROUPED(int4_stochastic, Int4Stochastic)
SHARDLAB_GROUPED(qsgd1, Qsgd1)
SHARDLAB_GROUPED(qsgd7, Qsgd7)
SHARDLAB_GROUPED(qsgd127, Qsgd127)
