// Counter-based random numbers: shardlab/codecs/kernels/random.py defines them.
#pragma once

#include "bits.h"

static constexpr uint32_t kWeyl = 0x9E3779B9u;

// 32 random bits for x = element * kWeyl + k0, or for lanes of them.
template <class Word>
SHARDLAB_INLINE Word mixed(Word x, uint32_t k1) {
  x ^= x >> 16;
  x *= 0x21F0AAADu;
  x ^= (x >> 15) ^ k1;
  x *= 0x735A2D97u;
  x ^= x >> 15;
  return x;
}

// 32 random bits of one element of one message; k0 and k1 are the words of the message's key.
SHARDLAB_INLINE uint32_t random_bits(uint32_t element, uint32_t k0, uint32_t k1) {
  return mixed(element * kWeyl + k0, k1);
}

// Uniform in [0, 1): the upper 24 bits, exact in float32.
SHARDLAB_INLINE float uniform(uint32_t element, uint32_t k0, uint32_t k1) {
  return static_cast<float>(static_cast<int32_t>(random_bits(element, k0, k1) >> 8)) * 0x1p-24f;
}
