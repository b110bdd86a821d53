// Counter-based random numbers: shardlab/kernels/random.py defines them.
#pragma once

#include "lanes.h"

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

// The random numbers of a part of a message: element i of it is element `first + i` of the message.
struct Random {
  uint32_t k0, k1, first;
  SHARDLAB_INLINE_MEMBER uint32_t bits(int64_t i) const {
    return random_bits(first + static_cast<uint32_t>(i), k0, k1);
  }
  SHARDLAB_INLINE_MEMBER float operator()(int64_t i) const {
    return uniform(first + static_cast<uint32_t>(i), k0, k1);
  }
};

// The same, eight after eight elements.
struct RandomLanes {
  Words x;
  uint32_t k1;
  SHARDLAB_INLINE_MEMBER explicit RandomLanes(const Random& of)
      : x((Words{0, 1, 2, 3, 4, 5, 6, 7} + of.first) * kWeyl + of.k0), k1(of.k1) {}
  SHARDLAB_INLINE_MEMBER Words next() {
    const Words now = x;
    x += 8 * kWeyl;
    return mixed(now, k1);
  }
};
