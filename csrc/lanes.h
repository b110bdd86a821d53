// Eight 32-bit lanes at a time, in the vector types of GCC and Clang: compilers see no way of their own
// to widen bytes without shuffling each payload.
#pragma once

#include "bits.h"

typedef float Floats __attribute__((vector_size(32)));
typedef uint32_t Words __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));

// What formats need of lanes, and the same of one element.
SHARDLAB_INLINE float float_of_bits(uint32_t bits) { return float_of(bits); }
SHARDLAB_INLINE Floats float_of_bits(Words bits) { return reinterpret_cast<Floats>(bits); }

// Two's complement in the upper kBits, as a float.
template <int kBits>
SHARDLAB_INLINE float upper_integer(uint32_t word) {
  return static_cast<float>(static_cast<int32_t>(word) >> (32 - kBits));
}
template <int kBits>
SHARDLAB_INLINE Floats upper_integer(Words word) {
  return __builtin_convertvector(reinterpret_cast<Ints>(word) >> (32 - kBits), Floats);
}

SHARDLAB_INLINE Words load_words(const uint8_t* from) {
  Words words;
  std::memcpy(&words, from, sizeof words);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  for (int i = 0; i < 8; ++i) words[i] = __builtin_bswap32(words[i]);
#endif
  return words;
}

SHARDLAB_INLINE Floats load_floats(const float* from) {
  Floats floats;
  std::memcpy(&floats, from, sizeof floats);
  return floats;
}

SHARDLAB_INLINE void store_floats(float* to, Floats floats) {
  std::memcpy(to, &floats, sizeof floats);
}

// Lane l of from[q] is element 2 l + q.
SHARDLAB_INLINE void store_interleaved(float* to, const Floats (&from)[2]) {
  const Floats low = __builtin_shuffle(from[0], from[1], Ints{0, 8, 1, 9, 4, 12, 5, 13});
  const Floats high = __builtin_shuffle(from[0], from[1], Ints{2, 10, 3, 11, 6, 14, 7, 15});
  store_floats(to, __builtin_shuffle(low, high, Ints{0, 1, 2, 3, 8, 9, 10, 11}));
  store_floats(to + 8, __builtin_shuffle(low, high, Ints{4, 5, 6, 7, 12, 13, 14, 15}));
}

// Lane l of from[q] is element 4 l + q.
SHARDLAB_INLINE void store_interleaved(float* to, const Floats (&from)[4]) {
  constexpr Ints kLow{0, 8, 1, 9, 4, 12, 5, 13}, kHigh{2, 10, 3, 11, 6, 14, 7, 15};
  constexpr Ints kEven{0, 1, 8, 9, 4, 5, 12, 13}, kOdd{2, 3, 10, 11, 6, 7, 14, 15};
  constexpr Ints kFirst{0, 1, 2, 3, 8, 9, 10, 11}, kLast{4, 5, 6, 7, 12, 13, 14, 15};
  const Floats a = __builtin_shuffle(from[0], from[1], kLow);
  const Floats b = __builtin_shuffle(from[2], from[3], kLow);
  const Floats c = __builtin_shuffle(from[0], from[1], kHigh);
  const Floats d = __builtin_shuffle(from[2], from[3], kHigh);
  const Floats r0 = __builtin_shuffle(a, b, kEven), r1 = __builtin_shuffle(a, b, kOdd);
  const Floats r2 = __builtin_shuffle(c, d, kEven), r3 = __builtin_shuffle(c, d, kOdd);
  store_floats(to, __builtin_shuffle(r0, r1, kFirst));
  store_floats(to + 8, __builtin_shuffle(r2, r3, kFirst));
  store_floats(to + 16, __builtin_shuffle(r0, r1, kLast));
  store_floats(to + 24, __builtin_shuffle(r2, r3, kLast));
}
