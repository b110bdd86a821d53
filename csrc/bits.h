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

// Words travel in little-endian order on every host.
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
