// Eight 32-bit lanes at a time, in the vector types of GCC and Clang, for what compilers do not find by
// themselves: widening bytes in one instruction, fused products, stores past the caches.
#pragma once

#include "kernels.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

using Floats [[gnu::vector_size(32)]] = float;
using Ints [[gnu::vector_size(32)]] = int32_t;
using Words [[gnu::vector_size(32)]] = uint32_t;

SHARDLAB_INLINE Floats floats_of(Words bits) { return reinterpret_cast<Floats>(bits); }
SHARDLAB_INLINE Words words_of(Ints ints) { return reinterpret_cast<Words>(ints); }
SHARDLAB_INLINE Ints ints_of(Floats floats) { return reinterpret_cast<Ints>(floats); }
SHARDLAB_INLINE Floats converted(Ints ints) { return __builtin_convertvector(ints, Floats); }

SHARDLAB_INLINE Floats smaller_of(Floats a, float b) {
  const Floats bound = b + Floats{};
  return a < bound ? a : bound;
}

// To the nearest integer, ties to even, of magnitudes below 2^22.
SHARDLAB_INLINE Ints nearest(Floats values) {
#ifdef __AVX2__
  return reinterpret_cast<Ints>(_mm256_cvtps_epi32(values));
#else
  // 1.5 * 2^23: a float this large has no fraction bits, so a small one is rounded when it is added
  // and found in the low bits
  return ints_of(values + 0x1.8p23f) - 0x4B400000;
#endif
}

SHARDLAB_INLINE Floats load_floats(const float* from) {
  Floats floats;
  std::memcpy(&floats, from, sizeof floats);
  return floats;
}

SHARDLAB_INLINE void store_floats(float* to, Floats floats) {
  std::memcpy(to, &floats, sizeof floats);
}

// Past the caches, without reading what was there. `to` is a multiple of 32 bytes.
SHARDLAB_INLINE void stream_floats(float* to, Floats floats) {
#ifdef __AVX2__
  _mm256_stream_ps(to, floats);
#else
  store_floats(to, floats);
#endif
}

#ifndef __AVX2__
template <class Integer>
SHARDLAB_INLINE Ints widened_from(const uint8_t* from) {
  using Eight [[gnu::vector_size(8 * sizeof(Integer))]] = Integer;
  Eight eight;
  std::memcpy(&eight, from, sizeof eight);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  if (sizeof(Integer) == 2) eight = (eight << 8) | (eight >> 8);
#endif
  return __builtin_convertvector(eight, Ints);
}
#endif

// Eight integers from consecutive bytes or, if unsigned, words of 16 bits.
SHARDLAB_INLINE Ints signed_bytes(const uint8_t* from) {
#ifdef __AVX2__
  return reinterpret_cast<Ints>(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  return widened_from<int8_t>(from);
#endif
}

SHARDLAB_INLINE Ints unsigned_bytes(const uint8_t* from) {
#ifdef __AVX2__
  return reinterpret_cast<Ints>(
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  return widened_from<uint8_t>(from);
#endif
}

SHARDLAB_INLINE Ints unsigned_pairs(const uint8_t* from) {
#ifdef __AVX2__
  return reinterpret_cast<Ints>(
      _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  return widened_from<uint16_t>(from);
#endif
}

// Bytes from 32 integers of -128 to 127.
SHARDLAB_INLINE void store_bytes(uint8_t* to, const Ints (&codes)[4]) {
#ifdef __AVX2__
  const __m256i low = _mm256_packs_epi32((__m256i)codes[0], (__m256i)codes[1]);
  const __m256i high = _mm256_packs_epi32((__m256i)codes[2], (__m256i)codes[3]);
  // each half of the register was packed for itself
  const __m256i bytes = _mm256_permutevar8x32_epi32(
      _mm256_packs_epi16(low, high), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes);
#else
  using Bytes [[gnu::vector_size(8)]] = int8_t;
  for (int i = 0; i < 4; ++i) {
    const Bytes bytes = __builtin_convertvector(codes[i], Bytes);
    std::memcpy(to + 8 * i, &bytes, sizeof bytes);
  }
#endif
}

// table[index], of which the lowest three bits count.
SHARDLAB_INLINE Floats lookup(Floats table, Ints index) {
#ifdef __AVX2__
  return _mm256_permutevar8x32_ps(table, (__m256i)index);
#else
  return __builtin_shuffle(table, index);
#endif
}

// clear or set, by the highest bit of each lane.
SHARDLAB_INLINE Floats by_sign(Words lanes, Floats clear, Floats set) {
#ifdef __AVX2__
  return _mm256_blendv_ps(clear, set, (__m256)lanes);
#else
  return reinterpret_cast<Ints>(lanes) < 0 ? set : clear;
#endif
}

// A product that float32 holds exactly, so that adding it rounds alike with and without a fused
// instruction.
struct Product {
  Floats value;
  float factor;
};

SHARDLAB_INLINE Floats begin_sum(Floats value) { return value; }
SHARDLAB_INLINE Floats begin_sum(Product product) { return product.value * product.factor; }

SHARDLAB_INLINE Floats add_to(Floats sum, Floats value) { return sum + value; }
SHARDLAB_INLINE Floats add_to(Floats sum, Product product) {
#ifdef __AVX2__
  return _mm256_fmadd_ps(product.value, _mm256_set1_ps(product.factor), sum);
#else
  return sum + product.value * product.factor;
#endif
}

// Floats of fewer bits than float32, in arithmetic that every compiler vectorises:
// a sign, kExponent bits of exponent with the usual bias, kMantissa bits of mantissa, subnormals.
// Codes of magnitudes are without the sign. No subnormal float32 comes up: they are slow.
template <int kExponent, int kMantissa>
struct Narrow {
  static constexpr int kShift = 23 - kMantissa;
  static constexpr int32_t kBias = (1 << (kExponent - 1)) - 1;
  static constexpr int32_t kRebias = (127 - kBias) << 23;
  static constexpr int32_t kSmallestNormal = kRebias + (1 << 23);
  // What to add to an exponent for the float32 whose last bit is worth the step between codes
  // there. It has kStart in its last bits, so that they read the code when the magnitude is added
  // and then the exponent, which counts codes too, from bit kShift on.
  static constexpr int32_t kStart =
      -((127 - kBias + kShift + 1) << kMantissa) & ((2 << (kExponent + kMantissa)) - 1);
  static constexpr int32_t kRounder = (kShift << 23) + kStart;
  static constexpr int32_t kLeast = kSmallestNormal + kRounder;

  // The code of the nearest value, ties to even, from the bits of a magnitude that is at most the
  // largest value: in the last bits, with the place of the sign zero; what is above has no meaning.
  SHARDLAB_INLINE_MEMBER static uint32_t rounded(uint32_t magnitude) {
    const int32_t rounder = static_cast<int32_t>(magnitude & 0x7F800000u) + kRounder;
    const uint32_t raised = static_cast<uint32_t>(rounder > kLeast ? rounder : kLeast);
    return bits_of(float_of(magnitude) + float_of(raised)) + (raised >> kShift);
  }

  // 2^kUp times the magnitudes whose code starts at bit kShift, with all bits below it zero. With
  // an exponent of zero the number read is (1 + m) half, half = 2^(kUp - kBias), where (2 m) half
  // is meant: what it lacks from 2 half is to be taken off.
  template <int kUp>
  SHARDLAB_INLINE_MEMBER static Floats scaled(Words code) {
    const Floats read = floats_of(code + static_cast<uint32_t>(kRebias + (kUp << 23)));
    const Floats lack = float_of(static_cast<uint32_t>(kSmallestNormal + (kUp << 23))) - read;
    const Ints bits = reinterpret_cast<Ints>(lack);  // negative as lack is
    return read - reinterpret_cast<Floats>(bits > 0 ? bits : Ints{});
  }
};
