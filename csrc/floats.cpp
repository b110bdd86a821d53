// Shorter floats: bf16 and fp16 without a scale, fp8 with one bfloat16 scale per group.
#include "grouped.h"
#include "halves.h"
#include "scales.h"

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

// Up with the probability of the 16 bits that are lost, by 16 random ones; finite stays finite.
struct Bf16Stochastic : Bf16 {
  SHARDLAB_INLINE_MEMBER static void encode(const float* given, int64_t count, Head, Random random,
                                            uint8_t* __restrict codes) {
    store_codes<2>(count, codes, [=](int64_t i) __attribute__((always_inline)) {
      const uint32_t element = random.first + static_cast<uint32_t>(i);
      const uint32_t chance = random_bits(element, random.k0, random.k1) >> 16;
      const uint32_t bits = bits_of(given[i]), magnitude = bits & 0x7FFFFFFFu;
      const uint32_t raised = (magnitude + chance) >> 16;
      const uint32_t finite = (raised < 0x7F7Fu ? raised : 0x7F7Fu) | (bits >> 16 & 0x8000u);
      return magnitude < 0x7F800000u ? finite : nearest_bf16(bits);
    });
  }
};

// To the nearest, ties to even, beyond the range infinity; NaN as above.
struct Fp16 : NoHead {
#ifdef __F16C__
  SHARDLAB_INLINE_MEMBER static __m128i nearest(Floats x) {
    return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
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
    store_codes<2>(count, codes, [=](int64_t i) __attribute__((always_inline)) {
      return nearest_fp16(bits_of(given[i]));
    });
  }
  SHARDLAB_INLINE_MEMBER static Floats value(Ints codes, Head) {
    return widened_fp16(words_of(codes));
  }
#endif
};

SHARDLAB_GROUPED(bf16, Bf16)
SHARDLAB_GROUPED(bf16_stochastic, Bf16Stochastic)
SHARDLAB_GROUPED(fp16, Fp16)

// kLargest is the largest finite value, kSmallestScale keeps all decoded values normal in float32,
// kOfHalf is the value of a code, in units of the float16 with the same bits.
template <class Float, int32_t kLargest, int kSmallestScale, int kOfHalf>
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
    store_codes<1>(count, codes, [=](int64_t i) __attribute__((always_inline)) {
      const uint32_t bits = bits_of(given[i] * reciprocal);
      return Float::rounded(bits & 0x7FFFFFFFu) | (bits >> 24 & 0x80u);
    });
  }
  // Codes of infinity and NaN are never sent, so they need no case here.
#ifdef __F16C__
  SHARDLAB_INLINE_MEMBER static Product value(__m128i halves, Head head) {
    return {_mm256_cvtph_ps(halves), head.value * kOfHalf};
  }
#else
  static constexpr bool kSigned = false;
  SHARDLAB_INLINE_MEMBER static Product value(Ints codes, Head head) {
    const Words words = words_of(codes), magnitudes = (words & 0x7Fu) << Float::kShift;
    const Words values = reinterpret_cast<Words>(Float::template scaled<0>(magnitudes));
    return {floats_of(values | (words & 0x80u) << 24), head.value};
  }
#endif
};

// A float16 has one bit of exponent more, so 8 more in the bias: read as one, a code is 2^8 too small.
struct E4m3 : Fp8<Narrow<4, 3>, 448, -116, 256> {
#ifdef __F16C__
  template <int kVector>
  SHARDLAB_INLINE_MEMBER static __m128i taken(const uint8_t* tile) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(tile) + kVector / 2);
    const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
    // without the copy of the sign
    const __m256i halves = _mm256_and_si256(words, _mm256_set1_epi16(-0x4001));
    return _mm256_extracti128_si256(halves, kVector % 2);
  }
#endif
};

// The upper byte of a float16.
struct E5m2 : Fp8<Narrow<5, 2>, 57344, -109, 1> {
#ifdef __F16C__
  template <int kVector>
  SHARDLAB_INLINE_MEMBER static __m128i taken(const uint8_t* tile) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(tile + 8 * kVector));
    return _mm_unpacklo_epi8(_mm_setzero_si128(), bytes);
  }
#endif
};

SHARDLAB_GROUPED(e4m3, E4m3)
SHARDLAB_GROUPED(e5m2, E5m2)
