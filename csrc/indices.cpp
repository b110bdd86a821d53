// Ascending positions as Elias-Fano codes: specified in shardlab/kernels/indices.py.
#include <algorithm>

#include "bits.h"

static constexpr int64_t kWord = 8;  // bytes

// Bytes `at` to `at` + 7, the first lowest; zeros from `size` on.
SHARDLAB_INLINE uint64_t word_at(const uint8_t* bytes, int64_t at, int64_t size) {
  uint64_t word = 0;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  if (at + kWord <= size) {
    std::memcpy(&word, bytes + at, kWord);
    return word;
  }
#endif
  const int64_t here = std::min(kWord, size - at);
  for (int64_t b = 0; b < here; ++b) word |= static_cast<uint64_t>(bytes[at + b]) << (8 * b);
  return word;
}

SHARDLAB_KERNEL void indices_encode(const int32_t* places, int64_t count, int64_t bits,
                                    int64_t size, uint8_t* out) {
  const int64_t lower = (count * bits + 7) / 8;
  const uint64_t mask = (uint64_t{1} << bits) - 1;
  uint64_t held = 0;  // bits of the lower parts that are not written yet
  int64_t filled = 0;
  uint8_t* low = out;
  uint8_t* upper = out + lower;
  std::fill(upper, out + size, uint8_t{0});
  for (int64_t j = 0; j < count; ++j) {
    const uint32_t place = static_cast<uint32_t>(places[j]);
    const int64_t one = (place >> bits) + j;
    upper[one / 8] = static_cast<uint8_t>(upper[one / 8] | 1u << one % 8);
    held |= (place & mask) << filled;
    for (filled += bits; filled >= 8; filled -= 8, held >>= 8) *low++ = static_cast<uint8_t>(held);
  }
  if (filled) *low = static_cast<uint8_t>(held);
}

// *valid = whether the bytes, as many as belong to `count` of n positions, are ascending ones below
// n.
SHARDLAB_KERNEL void indices_decode(const uint8_t* bytes, int64_t n, int64_t count, int64_t bits,
                                    int32_t* places, int64_t* valid) {
  *valid = count == 0;
  if (!count) return;
  const int64_t lower = (count * bits + 7) / 8;
  const int64_t upper = (count + ((n - 1) >> bits) + 7) / 8;
  const uint64_t mask = (uint64_t{1} << bits) - 1;
  int64_t j = 0, before = -1, ascending = 1;
  uint64_t start = 0;  // bit of the lower part of position j
  for (int64_t first = 0; first < upper; first += kWord) {
    uint64_t ones = word_at(bytes + lower, first, upper);
    if (j + __builtin_popcountll(ones) > count) return;
    for (; ones; ones &= ones - 1, ++j, start += static_cast<uint64_t>(bits)) {
      const int64_t high = 8 * first + __builtin_ctzll(ones) - j;
      const int64_t byte = static_cast<int64_t>(start >> 3);
      const uint64_t low = word_at(bytes, byte, lower + upper) >> (start & 7) & mask;
      const int64_t place = high << bits | static_cast<int64_t>(low);
      ascending &= place > before;
      before = place;
      places[j] = static_cast<int32_t>(place);
    }
  }
  *valid = ascending && j == count && before < n;
}
