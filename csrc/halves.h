// Decoding of float16, and of 8-bit floats that are one but for a power of two, by the processor's own
// conversion: half the instructions of what the plain code does, and the same values.
#pragma once

#include "grouped.h"

#if defined(SHARDLAB_HAVE_CLONES) && defined(__x86_64__)
#include <immintrin.h>
#define SHARDLAB_HALVES __attribute__((target("avx2,f16c,fma")))

static constexpr int64_t kFarAway = 1 << 20;  // elements; as many do not stay in a cache

static inline bool have_halves() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("fma");
}

static constexpr int kTile = 64;  // elements in eight registers

// totals (+)= 64 values of one payload. A format has here
//   halves(codes)    16 codes as float16
//   factor(head)     what to multiply them by
template <class Format>
SHARDLAB_HALVES static inline void add_tile(const uint8_t* head, const uint8_t* codes, bool first,
                                            __m256 (&totals)[8]) {
  const __m256 factor = _mm256_set1_ps(Format::factor(Format::load(head)));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m256i halves = Format::halves(codes + 2 * Format::kBits * i);
    const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    const __m256 high = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
    if (first) {
      totals[2 * i] = _mm256_mul_ps(low, factor);
      totals[2 * i + 1] = _mm256_mul_ps(high, factor);
    } else {
      // products are exact, so that this rounds as a product and a sum do
      totals[2 * i] = _mm256_fmadd_ps(low, factor, totals[2 * i]);
      totals[2 * i + 1] = _mm256_fmadd_ps(high, factor, totals[2 * i + 1]);
    }
  }
}

// to = alpha * totals, or added to it; past the caches if `far`.
SHARDLAB_HALVES static inline void put_tile(const __m256 (&totals)[8], float alpha, bool add,
                                            bool far, float* to) {
  const bool aligned = reinterpret_cast<uintptr_t>(to) % 32 == 0;
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const __m256 sum = _mm256_mul_ps(totals[i], _mm256_set1_ps(alpha));
    if (add)
      _mm256_storeu_ps(to + 8 * i, _mm256_add_ps(_mm256_loadu_ps(to + 8 * i), sum));
    else if (far && aligned)
      _mm256_stream_ps(to + 8 * i, sum);
    else
      _mm256_storeu_ps(to + 8 * i, sum);
  }
}

// The nearest float16; finite values stay finite.
SHARDLAB_HALVES static void encode_halves(const float* given, int64_t count, uint8_t* codes) {
  const __m256 largest = _mm256_set1_ps(65504.0f), infinity = _mm256_set1_ps(__builtin_inff());
  const __m256 sign = _mm256_set1_ps(-0.0f);
  for (int64_t i = 0; i < count; i += 8) {
    float last[8] = {};
    const bool full = i + 8 <= count;
    if (!full) std::memcpy(last, given + i, static_cast<size_t>(4 * (count - i)));
    const __m256 x = _mm256_loadu_ps(full ? given + i : last);
    const __m256 infinite = _mm256_cmp_ps(_mm256_andnot_ps(sign, x), infinity, _CMP_EQ_OQ);
    // of a comparison with NaN these give the second operand
    const __m256 low = _mm256_min_ps(largest, _mm256_max_ps(_mm256_xor_ps(sign, largest), x));
    const __m128i halves = _mm256_cvtps_ph(_mm256_blendv_ps(low, x, infinite), 0);
    if (full)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + 2 * i), halves);
    else
      std::memcpy(codes + 2 * i, &halves, static_cast<size_t>(2 * (count - i)));
  }
}

// As decode_groups of grouped.h.
template <class Format>
SHARDLAB_HALVES static void decode_halves(const uint8_t* const* payloads, int64_t count, int64_t n,
                                          int64_t group, int64_t start, int64_t stop, float alpha,
                                          int add, float* out) {
  constexpr int64_t kBytes = Format::kBits / 8;
  const int64_t border = Format::kHeadBytes * ((n + group - 1) / group);
  const bool far = n >= kFarAway;
  __m256 totals[8] = {};
  for (int64_t first = start; first < stop; first += group) {
    const int64_t head = Format::kHeadBytes * (first / group), end = smaller(first + group, n);
    int64_t i = first;
    for (; i + kTile <= end; i += kTile) {
      const int64_t place = border + kBytes * i;
      add_tile<Format>(payloads[0] + head, payloads[0] + place, true, totals);
      for (int64_t p = 1; p < count; ++p)
        add_tile<Format>(payloads[p] + head, payloads[p] + place, false, totals);
      put_tile(totals, alpha, add, far, out + i);
    }
    if (i == end) continue;
    uint8_t codes[kTile * kBytes] = {};
    float rest[kTile];
    for (int64_t p = 0; p < count; ++p) {
      std::memcpy(codes, payloads[p] + border + kBytes * i, static_cast<size_t>(kBytes * (end - i)));
      add_tile<Format>(payloads[p] + head, codes, p == 0, totals);
    }
    put_tile(totals, alpha, false, false, rest);
    for (int64_t j = i; j < end; ++j) out[j] = add ? out[j] + rest[j - i] : rest[j - i];
  }
}
#else
static inline bool have_halves() { return false; }
static inline void encode_halves(const float*, int64_t, uint8_t*) {}
template <class Format>
static void decode_halves(const uint8_t* const*, int64_t, int64_t, int64_t, int64_t, int64_t, float,
                          int, float*) {}
#endif

// The two kernels of a format, as SHARDLAB_GROUPED of grouped.h.
#define SHARDLAB_GROUPED_HALVES(name, Format)                                                      \
  SHARDLAB_KERNEL void name##_encode(const float* x, const float* residual, float* kept,           \
                                     int64_t n, int64_t group, int64_t start, int64_t stop,        \
                                     uint32_t k0, uint32_t k1, uint8_t* payload) {                 \
    encode_groups<Format>(x, residual, kept, n, group, start, stop, k0, k1, payload);              \
  }                                                                                                \
  SHARDLAB_KERNEL void name##_decode_plain(const uint8_t* const* payloads, int64_t count,          \
                                           int64_t n, int64_t group, int64_t start, int64_t stop,  \
                                           float alpha, int add, float* out) {                     \
    decode_groups<Format>(payloads, count, n, group, start, stop, alpha, add, out);                \
  }                                                                                                \
  extern "C" void name##_decode(const uint8_t* const* payloads, int64_t count, int64_t n,          \
                                int64_t group, int64_t start, int64_t stop, float alpha, int add,  \
                                float* out) {                                                      \
    (have_halves() ? decode_halves<Format> : name##_decode_plain)(payloads, count, n, group,       \
                                                                  start, stop, alpha, add, out);   \
  }
