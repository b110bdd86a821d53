// Eight-bit floats with one bfloat16 scale per group.
#include "halves.h"
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
    store_bytes(count, codes, [=](int64_t i) __attribute__((always_inline)) {
      const uint32_t bits = bits_of(given[i] * reciprocal);
      return Float::rounded(bits & 0x7FFFFFFFu) | (bits >> 24 & 0x80u);
    });
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

// A float16 has one bit of exponent more, so 8 less in the bias: read as one, a code is 2^8 too small.
struct E4m3 : Fp8<Narrow<4, 3>, 448, -116> {
  SHARDLAB_INLINE_MEMBER static float factor(Head head) { return head.value * 0x1p8f; }
#ifdef SHARDLAB_HALVES
  SHARDLAB_HALVES static inline __m256i halves(const uint8_t* codes) {
    const __m256i words =
        _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    return _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(-0x4001));
  }
#endif
};

// The upper byte of a float16.
struct E5m2 : Fp8<Narrow<5, 2>, 57344, -109> {
  SHARDLAB_INLINE_MEMBER static float factor(Head head) { return head.value; }
#ifdef SHARDLAB_HALVES
  SHARDLAB_HALVES static inline __m256i halves(const uint8_t* codes) {
    const __m256i words =
        _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    return _mm256_slli_epi16(words, 8);
  }
#endif
};

SHARDLAB_GROUPED_HALVES(e4m3, E4m3)
SHARDLAB_GROUPED_HALVES(e5m2, E5m2)
