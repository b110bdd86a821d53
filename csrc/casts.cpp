// Shorter floats without a scale. The arithmetic is on integers, so that every compiler vectorises it.
#include "grouped.h"
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
  template <class Word>
  SHARDLAB_INLINE_MEMBER static auto value(Word code, Head) {
    return float_of_bits(code & 0xFFFF0000u);
  }
};

struct Fp16 : NoHead {
  using Float = Narrow<5, 10>;
  static constexpr int32_t kLargest = 0x477FE000, kInfinity = 0x7F800000;  // 65504, of float32

  // To the nearest, ties to even; finite values stay finite, NaN stays NaN with its sign.
  SHARDLAB_INLINE_MEMBER static void encode(const float* given, int64_t count, Head, Random,
                                            uint8_t* __restrict codes) {
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = bits_of(given[i]);
      const int32_t magnitude = static_cast<int32_t>(bits & 0x7FFFFFFFu);
      const int32_t finite = Float::rounded(magnitude < kLargest ? magnitude : kLargest);
      // the code of infinity follows that of 65504; NaN has the highest bit of the mantissa too
      const int32_t code = finite + (magnitude >= kInfinity) + ((magnitude > kInfinity) << 9);
      store_word(codes + 2 * i,
                 static_cast<uint16_t>(static_cast<uint32_t>(code) | (bits >> 16 & 0x8000u)));
    }
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
};

SHARDLAB_GROUPED(bf16, Bf16)
SHARDLAB_GROUPED(fp16, Fp16)
