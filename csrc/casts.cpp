// Shorter floats without a scale. The arithmetic is on integers, so that every compiler vectorises it.
#include "grouped.h"

struct NoHead {};

struct Bf16 {
  static constexpr int64_t kHeadBytes = 0, kBits = 16;
  using Head = NoHead;

  SHARDLAB_INLINE_MEMBER static Head head_of(const float*, int64_t) { return {}; }
  SHARDLAB_INLINE_MEMBER static void store(Head, uint8_t*) {}
  SHARDLAB_INLINE_MEMBER static Head load(const uint8_t*) { return {}; }

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
  SHARDLAB_INLINE_MEMBER static Floats value(Ints codes, Head) {
    return floats_of(words_of(codes) << 16);
  }
};

SHARDLAB_GROUPED(bf16, Bf16)
