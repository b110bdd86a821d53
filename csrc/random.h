// Counter-based random numbers: shardlab/kernels/random.py defines them.
#pragma once

#include "bits.h"

// 32 random bits of one element of one message; k0 and k1 are the words of the message's key.
SHARDLAB_INLINE uint32_t random_bits(uint32_t element, uint32_t k0, uint32_t k1) {
  uint32_t x = element * 0x9E3779B9u + k0;
  x ^= x >> 16;
  x *= 0x21F0AAADu;
  x ^= (x >> 15) ^ k1;
  x *= 0x735A2D97u;
  x ^= x >> 15;
  return x;
}

// Uniform in [0, 1): the upper 24 bits, exact in float32.
SHARDLAB_INLINE float uniform(uint32_t element, uint32_t k0, uint32_t k1) {
  return static_cast<float>(static_cast<int32_t>(random_bits(element, k0, k1) >> 8)) * 0x1p-24f;
}
