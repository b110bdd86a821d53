// float32 and bfloat16 as bit patterns.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"

SHARDLAB_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

SHARDLAB_INLINE float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Payloads are little endian on every host.
SHARDLAB_INLINE uint16_t load_word(const uint8_t* from) {
  uint16_t word;
  std::memcpy(&word, from, sizeof word);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  word = __builtin_bswap16(word);
#endif
  return word;
}

SHARDLAB_INLINE void store_word(uint8_t* to, uint16_t word) {
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  word = __builtin_bswap16(word);
#endif
  std::memcpy(to, &word, sizeof word);
}

// bfloat16 to float32: exact
SHARDLAB_INLINE float widened(uint16_t word) { return float_of(static_cast<uint32_t>(word) << 16); }

SHARDLAB_INLINE bool is_finite(uint32_t bits) { return (bits & 0x7F800000u) != 0x7F800000u; }

// Bit i is flags[i], which is 0 or 1, of 64.
SHARDLAB_INLINE uint64_t mask_of(const uint8_t* flags) {
  uint64_t mask = 0;
  for (int byte = 0; byte < 8; ++byte) {
    // eight flags, the first in the lowest byte on every host, become eight bits by a multiplication
    uint64_t eight = 0;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    std::memcpy(&eight, flags + 8 * byte, sizeof eight);
#else
    for (int i = 7; i >= 0; --i) eight = eight << 8 | flags[8 * byte + i];
#endif
    mask |= (eight * 0x0102040810204080u >> 56) << (8 * byte);
  }
  return mask;
}
