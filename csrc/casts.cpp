// Shorter floats without a scale. The arithmetic is on integers, so that every compiler vectorises it.
#include "halves.h"
#include "narrow.h"

struct NoHead {
  static constexpr int64_t kHeadBytes = 0, kBits = 16;
  struct Head {};

  SHARDLAB_INLINE_MEMBER static Head head_of(const float*, int64_t) { return {}; }
  SHARDLAB_INLINE_MEMBER static void store(Head, uint8_t*) {}
  SHARDLAB_INLINE_MEMBER static Head load(const uint8_t*) { return {}; }
};

struct Bf16 : NoHead {
  // To the nearest, ties to even; NaN stays NaN (its top payload bits kept, made quiet).
  SHARDLAB_INLINE_MEMBER static void encode(const float* given, int64_t count, Head, Random,
                                            uint8_t* __restrict codes) {
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = bits_of(given[i]);
      const uint32_t nearest = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
      const uint32_t quiet = (bits >> 16) | 0x0040u;
      const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
      store_word(codes + 2 * i, static_cast<uint16_t>(nan ? quiet : nearest));
    }
  }
  SHARDLAB_INLINE_MEMBER static void decode(const uint8_t* codes, int64_t count, Head,
                                            float* __restrict values) {
    for (int64_t i = 0; i < count; ++i) values[i] = widened(load_word(codes + 2 * i));
  }
};

struct Fp16 : NoHead {
  using Float = Narrow<5, 10>;
  static constexpr int32_t kLargest = 0x477FE000, kInfinity = 0x7F800000;  // 65504, of float32

  // To the nearest, ties to even; finite values stay finite, NaN as above.
  SHARDLAB_INLINE_MEMBER static void encode(const float* given, int64_t count, Head, Random,
                                            uint8_t* __restrict codes) {
    if (have_halves()) return encode_halves(given, count, codes);
    store_words(count, codes, [=](int64_t i) __attribute__((always_inline)) {
      const uint32_t bits = bits_of(given[i]);
      const int32_t magnitude = static_cast<int32_t>(bits & 0x7FFFFFFFu);
      const int32_t finite = magnitude < kLargest ? magnitude : kLargest;
      // the code of infinity follows that of 65504
      const uint32_t quiet = 0x200u | (bits >> Float::kShift & 0x3FFu);
      const uint32_t beyond = (magnitude >= kInfinity ? 1 : 0) + (magnitude > kInfinity ? quiet : 0);
      return (Float::rounded(static_cast<uint32_t>(finite)) + beyond) | (bits >> 16 & 0x8000u);
    });
  }
  // Infinity and NaN have the largest exponent of float32 too, until the product.
  SHARDLAB_INLINE_MEMBER static float value(uint32_t code, Head) {
    const uint32_t sign = code << 16 & 0x80000000u;
    const float magnitude = Float::scaled<112>(code << Float::kShift & 0x0FFFE000u) * 0x1p-112f;
    return float_of(bits_of(magnitude) | sign);
  }
  SHARDLAB_INLINE_MEMBER static void decode(const uint8_t* codes, int64_t count, Head head,
                                            float* __restrict values) {
    for (int64_t i = 0; i < count; ++i) values[i] = value(load_word(codes + 2 * i), head);
  }
  SHARDLAB_INLINE_MEMBER static float factor(Head) { return 1.0f; }
#ifdef SHARDLAB_HALVES
  SHARDLAB_HALVES static inline __m256i halves(const uint8_t* codes) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
  }
#endif
};

SHARDLAB_GROUPED(bf16, Bf16)
SHARDLAB_GROUPED_HALVES(fp16, Fp16)
