// Eight 32-bit lanes at a time, in the vector types of GCC and Clang, for what compilers do not find by
// themselves: widening bytes in one instruction, fused products, stores past the caches.
#pragma once

#include "bits.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

using Floats [[gnu::vector_size(32)]] = float;
using Ints [[gnu::vector_size(32)]] = int32_t;
using Words [[gnu::vector_size(32)]] = uint32_t;

SHARDLAB_INLINE Floats floats_of(Words bits) { return reinterpret_cast<Floats>(bits); }
SHARDLAB_INLINE Words words_of(Ints ints) { return reinterpret_cast<Words>(ints); }
SHARDLAB_INLINE Floats converted(Ints ints) { return __builtin_convertvector(ints, Floats); }

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

SHARDLAB_INLINE Ints signed_bytes(const uint8_t* from) {
#ifdef __AVX2__
  return reinterpret_cast<Ints>(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  Ints ints;
  for (int i = 0; i < 8; ++i) ints[i] = static_cast<int8_t>(from[i]);
  return ints;
#endif
}

SHARDLAB_INLINE Ints unsigned_bytes(const uint8_t* from) {
#ifdef __AVX2__
  return reinterpret_cast<Ints>(
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  Ints ints;
  for (int i = 0; i < 8; ++i) ints[i] = from[i];
  return ints;
#endif
}

// Eight words of 16 bits.
SHARDLAB_INLINE Ints unsigned_pairs(const uint8_t* from) {
#ifdef __AVX2__
  return reinterpret_cast<Ints>(
      _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  Ints ints;
  for (int i = 0; i < 8; ++i) ints[i] = load_word(from + 2 * i);
  return ints;
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
