// The sixteen levels of NormalFloat with one bfloat16 scale per group: shardlab/kernels/int4.py.
#include "grouped.h"
#include "scale.h"

static constexpr float kLevels[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

struct Nf4 : ScaleHead {
  static constexpr int64_t kBits = 4;

  SHARDLAB_INLINE_MEMBER static Head head_of(const float* given, int64_t count) {
    const uint16_t word = scale_of(largest_of(given, count), 1.0f, 0x1p-120f);
    return {word, widened(word)};
  }
  SHARDLAB_INLINE_MEMBER static void encode(const float* given, int64_t count, Head head, Random,
                                            uint8_t* __restrict codes) {
    const int64_t width = code_bytes(count, kBits);
    // without a scale all codes are that of zero
    const bool empty = has_no_codes(head);
    const float reciprocal = empty ? 0.0f : 1.0f / head.value;
    alignas(64) uint8_t wide[kLargestGroup + 8];
    for (int64_t i = 0; i < count; ++i) {
      const float exact = empty ? 0.0f : given[i] * reciprocal;
      int32_t code = 0;
#pragma GCC unroll 15
      // half-way between two levels is the lower one
      for (int64_t l = 0; l < 15; ++l) code += exact > (kLevels[l] + kLevels[l + 1]) * 0.5f;
      wide[i] = static_cast<uint8_t>(code);
    }
    for (int64_t i = count; i < 2 * width; ++i) wide[i] = 0;
    for (int64_t j = 0; j < width; ++j)
      codes[j] = static_cast<uint8_t>(wide[j] | wide[width + j] << 4);
  }
  SHARDLAB_INLINE_MEMBER static float value(uint32_t word, Head head) {
    return kLevels[word >> 28] * head.value;
  }
  SHARDLAB_INLINE_MEMBER static Floats value(Words words, Head head) {
    constexpr Floats kLow{kLevels[0], kLevels[1], kLevels[2], kLevels[3],
                          kLevels[4], kLevels[5], kLevels[6], kLevels[7]};
    constexpr Floats kHigh{kLevels[8],  kLevels[9],  kLevels[10], kLevels[11],
                           kLevels[12], kLevels[13], kLevels[14], kLevels[15]};
    return __builtin_shuffle(kLow, kHigh, reinterpret_cast<Ints>(words >> 28u)) * head.value;
  }
};

SHARDLAB_GROUPED(nf4, Nf4)
