// The eight-bit dynamic tree data type with one bfloat16 scale per group. Levels and the arithmetic
// that finds the nearest one are specified in shardlab/codecs/kernels/float8.py.
#include "codes.h"
#include "grouped.h"
#include "scales.h"

// Decade d holds the n = 64 >> d levels below 10^-d, codes n to 2 n - 1. All in units of the scale
// (levels), or of its 64th part (the search, whose factors then stay normal numbers).
struct Tables {
  float levels[256];
  float begins[6];  // half-way from the last level of the decade below
  float slopes[7];  // codes per unit
};

static constexpr Tables tables() {
  Tables made{};
  double ten = 10.0, slope = 1.0 / 0.9;
  for (int decade = 0, n = 64; decade < 7; ++decade, n /= 2, ten *= 10.0, slope *= 5.0) {
    for (int i = 0; i < n; ++i) {
      const double level = (2.0 * n + 9.0 * (2 * i + 1)) / (2.0 * n * ten);
      made.levels[n + i] = static_cast<float>(level);
      made.levels[128 + n + i] = -static_cast<float>(level);
    }
    made.slopes[decade] = static_cast<float>(slope);
    if (decade < 6) made.begins[decade] = static_cast<float>(64.0 * (1.0 + 1.8 / n) / ten);
  }
  made.levels[128] = 1.0f;
  return made;
}

static constexpr Tables kTables = tables();
static constexpr float kZero = 64.0f * 2.75e-7f;  // half the smallest level
static constexpr float kOne = 63.775f;            // half-way from the largest but one to 1

struct Dynamic8 : ScaleHead {
  static constexpr int64_t kBits = 8;
  static constexpr bool kSigned = false;

  SHARDLAB_INLINE_MEMBER static Head head_of(const float* given, int64_t count) {
    const uint16_t word = scale_of(largest_of(given, count), 1.0f, 0x1p-104f);
    return {word, widened(word)};
  }
  SHARDLAB_INLINE_MEMBER static void encode(const float* given, int64_t count, Head head, Random,
                                            uint8_t* __restrict codes) {
    if (has_no_codes(head)) {
      for (int64_t i = 0; i < count; ++i) codes[i] = 0;
      return;
    }
    const float factor = 64.0f / head.value;
    store_codes<1>(count, codes, [=](int64_t i) __attribute__((always_inline)) {
      const uint32_t bits = bits_of(given[i] * factor);
      const float magnitude = float_of(bits & 0x7FFFFFFFu);
      float slope = kTables.slopes[6], n = 1.0f;
#pragma GCC unroll 6
      for (int decade = 5; decade >= 0; --decade) {
        const bool reached = magnitude >= kTables.begins[decade];
        slope = reached ? kTables.slopes[decade] : slope;
        n = reached ? static_cast<float>(64 >> decade) : n;
      }
      const float place = magnitude * slope + n * (8.0f / 9.0f), last = 2.0f * n - 0.5f;
      const int32_t code = static_cast<int32_t>(place < last ? place : last);
      const int32_t positive = magnitude >= kOne ? 128 : code;
      const int32_t both = bits >> 31 ? code + 128 : positive;
      return static_cast<uint32_t>(magnitude < kZero ? 0 : both);
    });
  }
  SHARDLAB_INLINE_MEMBER static Floats value(Ints codes, Head head) {
#ifdef __AVX2__
    const Floats levels =
        _mm256_i32gather_ps(kTables.levels, reinterpret_cast<__m256i>(codes), sizeof(float));
#else
    Floats levels;
    for (int i = 0; i < 8; ++i) levels[i] = kTables.levels[codes[i]];
#endif
    return levels * head.value;
  }
};

SHARDLAB_GROUPED(dynamic8, Dynamic8)
