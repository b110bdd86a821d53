// Storage of the codes of a group whose computation takes more than a few steps.
#pragma once

#include "bits.h"

// codes[i] = the last 8 kBytes bits of code(i). Written as words first: otherwise compilers narrow each
// step of the arithmetic instead of its result.
template <int kBytes, class Code>
SHARDLAB_INLINE void store_codes(int64_t count, uint8_t* __restrict codes, Code code) {
  constexpr int64_t kSome = 256;
  alignas(64) uint32_t words[kSome];
  for (int64_t from = 0; from < count; from += kSome) {
    const int64_t size = count - from < kSome ? count - from : kSome;
    uint8_t* to = codes + kBytes * from;
    for (int64_t i = 0; i < size; ++i) words[i] = code(from + i);
    for (int64_t i = 0; i < size; ++i) {
      if constexpr (kBytes == 2)
        store_word(to + 2 * i, static_cast<uint16_t>(words[i]));
      else
        to[i] = static_cast<uint8_t>(words[i]);
    }
  }
}
