// Eight-bit floats with one bfloat16 scale per group.
#include "grouped.h"
#include "narrow.h"
#include "scale.h"

// kLargest is the largest finite value, kSmallestScale keeps all decoded values normal in float32.
template <class Float, int32_t kLargest, int kSmallestScale>
struct Fp8 : ScaleHead {
  static constexpr int64_t kBits = 8;

  SHARDLAB_INLINE_MEMBER static Head head_of(const float* given, int64_t count) {
    const float smallest = float_of(static_cast<uint32_t>(127 + kSmallestScale) << 23);
    const uint16_t word =
        scale_of(largest_of(given, count), static_cast<float>(kLargest), smallest);
    return {word, widened(word)};
  }
  SHARDLAB_INLINE_MEMBER static void encode(const float* given, int64_t count, Head head, Random,
                                            uint8_t* __restrict codes) {
    if (has_no_codes(head)) {
      for (int64_t i = 0; i < count; ++i) codes[i] = 0;
      return;
    }
    const float reciprocal = 1.0f / head.value;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = bits_of(given[i] * reciprocal);
      const int32_t code = Float::rounded(static_cast<int32_t>(bits & 0x7FFFFFFFu));
      codes[i] = static_cast<uint8_t>(static_cast<uint32_t>(code) | (bits >> 24 & 0x80u));
    }
  }
  // Codes of infinity and NaN are never sent, so they are not told apart.
  SHARDLAB_INLINE_MEMBER static float value(uint32_t code, Head head) {
    const uint32_t sign = code << 24 & 0x80000000u;
    const float magnitude = Float::template scaled<0>(code << Float::kShift & (0x7Fu << Float::kShift));
    return float_of(bits_of(magnitude) | sign) * head.value;
  }
  SHARDLAB_INLINE_MEMBER static void decode(const uint8_t* codes, int64_t count, Head head,
                                            float* __restrict values) {
    for (int64_t i = 0; i < count; ++i) values[i] = value(codes[i], head);
  }
};

using E4m3 = Fp8<Narrow<4, 3>, 448, -116>;
using E5m2 = Fp8<Narrow<5, 2>, 57344, -109>;

SHARDLAB_GROUPED(e4m3, E4m3)
SHARDLAB_GROUPED(e5m2, E5m2)
