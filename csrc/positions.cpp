// Ascending positions as Elias-Fano codes or bitmaps: shardlab/codecs/positions.py.
#include "workers.h"

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

// `Spread` and the other sizes are what `Split` of the specification holds.
template <int64_t Spread>
SHARDLAB_INLINE void encode(const int32_t* places, int64_t count, int64_t bits, uint8_t* low,
                            uint8_t* upper) {
  const uint64_t mask = (uint64_t{1} << bits) - 1;
  uint64_t held = 0;  // bits of the lower parts that are not written yet
  int64_t filled = 0;
  for (int64_t j = 0; j < count; ++j) {
    const uint32_t place = static_cast<uint32_t>(places[j]);
    const uint64_t one = (place >> bits) + static_cast<uint64_t>(Spread * j);
    upper[one / 8] = static_cast<uint8_t>(upper[one / 8] | 1u << one % 8);
    held |= (place & mask) << filled;
    for (filled += bits; filled >= 8; filled -= 8, held >>= 8) *low++ = static_cast<uint8_t>(held);
  }
  if (filled) *low = static_cast<uint8_t>(held);
}

template <int64_t Spread>
static bool decode(const uint8_t* bytes, int64_t n, int64_t count, int64_t bits,
                            int64_t lower, int64_t upper, int32_t* places) {
  const uint64_t mask = (uint64_t{1} << bits) - 1;
  int64_t j = 0, before = -1, ascending = 1;
  uint64_t start = 0;  // bit of the lower part of position j
  for (int64_t first = 0; first < upper; first += kWord) {
    uint64_t ones = word_at(bytes + lower, first, upper);
    if (j + __builtin_popcountll(ones) > count) return false;
    for (; ones; ones &= ones - 1, ++j, start += static_cast<uint64_t>(bits)) {
      const int64_t high = 8 * first + __builtin_ctzll(ones) - Spread * j;
      const int64_t byte = static_cast<int64_t>(start >> 3);
      const uint64_t low = word_at(bytes, byte, lower + upper) >> (start & 7) & mask;
      const int64_t place = high << bits | static_cast<int64_t>(low);
      ascending &= place > before;
      before = place;
      places[j] = static_cast<int32_t>(place);
    }
  }
  return ascending && j == count && before < n;
}

SHARDLAB_KERNEL void positions_encode(const int32_t* places, int64_t count, int64_t bits,
                                      int64_t spread, int64_t lower, int64_t upper, uint8_t* out) {
  std::fill_n(out + lower, upper, uint8_t{0});
  if (spread) {
    encode<1>(places, count, bits, out, out + lower);
  } else {
    encode<0>(places, count, bits, out, out + lower);
  }
}

// The sizes of one vector of positions.
struct Split {
  int64_t count, bits, spread, lower, upper;
};

// valid[i] = whether vector i is `count` ascending positions below n.
SHARDLAB_KERNEL void positions_decode(Workers* workers, const uint8_t* const* coded, int64_t vectors,
                                      int64_t n, const Split* splits, int32_t* const* places,
                                      int64_t* valid) {
  for_each(workers, vectors, [=](int64_t i) {
    const Split& of = splits[i];
    const auto run = of.spread ? decode<1> : decode<0>;
    valid[i] = run(coded[i], n, of.count, of.bits, of.lower, of.upper, places[i]);
  });
}
