// Shorter floats without a scale.
#include "codes.h"
#include "grouped.h"
#include "halves.h"

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
    for (int64_t i = 0; i < count; ++i)
      store_word(codes + 2 * i, static_cast<uint16_t>(nearest_bf16(bits_of(given[i]))));
  }
  SHARDLAB_INLINE_MEMBER static Floats value(Ints codes, Head) {
    return floats_of(words_of(codes) << 16);
  }
};

// To the nearest, ties to even; finite values stay finite, NaN as above.
struct Fp16 : NoHead {
#ifdef __F16C__
  SHARDLAB_INLINE_MEMBER static __m128i nearest(Floats x) {
    const Floats largest = _mm256_set1_ps(65504.0f), sign = _mm256_set1_ps(-0.0f);
    const Floats infinite = _mm256_cmp_ps(_mm256_andnot_ps(sign, x),
                                          _mm256_set1_ps(__builtin_inff()), _CMP_EQ_OQ);
    // of NaN and a number these return the second operand, which is x
    const Floats finite = _mm256_min_ps(largest, _mm256_max_ps(-largest, x));
    return _mm256_cvtps_ph(_mm256_blendv_ps(finite, x, infinite), _MM_FROUND_TO_NEAREST_INT);
  }
  SHARDLAB_INLINE_MEMBER static void encode(const float* given, int64_t count, Head, Random,
                                            uint8_t* __restrict codes) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + 2 * i), nearest(load_floats(given + i)));
    if (i == count) return;
    float rest[8] = {};
    std::memcpy(rest, given + i, static_cast<size_t>(4 * (count - i)));
    const __m128i words = nearest(load_floats(rest));
    std::memcpy(codes + 2 * i, &words, static_cast<size_t>(2 * (count - i)));
  }
  template <int kVector>
  SHARDLAB_INLINE_MEMBER static __m128i taken(const uint8_t* tile) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(tile) + kVector);
  }
  SHARDLAB_INLINE_MEMBER static Floats value(__m128i codes, Head) {
    return _mm256_cvtph_ps(codes);
  }
#else
  SHARDLAB_INLINE_MEMBER static void encode(const float* given, int64_t count, Head, Random,
                                            uint8_t* __restrict codes) {
    constexpr int32_t kInfinity = 0x7F800000;
    store_codes<2>(count, codes, [=](int64_t i) __attribute__((always_inline)) {
      return nearest_fp16(bits_of(given[i]), kInfinity);
    });
  }
  SHARDLAB_INLINE_MEMBER static Floats value(Ints codes, Head) {
    return widened_fp16(words_of(codes));
  }
#endif
};

SHARDLAB_GROUPED(bf16, Bf16)
SHARDLAB_GROUPED(fp16, Fp16)
