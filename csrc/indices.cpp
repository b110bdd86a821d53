// Ascending positions as bytes: specified in shardlab/kernels/indices.py.
#include <algorithm>

#include "bits.h"

static constexpr int64_t kWord = 64;  // bytes whose comparisons make one machine word
static constexpr int64_t kLongest = 5;                // bytes of a number
static constexpr uint64_t kNone = uint64_t{1} << 31;  // larger than all positions

// Bit b says whether byte b, of up to 64, is below `limit`.
SHARDLAB_INLINE uint64_t below(const uint8_t* bytes, int64_t count, uint8_t limit) {
  uint8_t flags[kWord];
  if (count == kWord) {
    for (int b = 0; b < kWord; ++b) flags[b] = bytes[b] < limit;
  } else {
    for (int b = 0; b < kWord; ++b) flags[b] = b < count && bytes[b] < limit;
  }
  return mask_of(flags);
}

// Bytes of the gaps as variable-length numbers.
SHARDLAB_KERNEL void indices_varint_bytes(const int32_t* places, int64_t count, int64_t* bytes) {
  int64_t total = count;
  for (int64_t j = 0; j < count; ++j) {
    const int32_t gap = places[j] - (j ? places[j - 1] : -1) - 1;
    total += (gap >= 1 << 7) + (gap >= 1 << 14) + (gap >= 1 << 21) + (gap >= 1 << 28);
  }
  *bytes = total;
}

SHARDLAB_KERNEL void indices_to_varint(const int32_t* places, int64_t count, uint8_t* out) {
  int32_t previous = -1;
  for (int64_t j = 0; j < count; ++j) {
    uint32_t gap = static_cast<uint32_t>(places[j] - previous - 1);
    previous = places[j];
    if (gap < 1 << 14 && j + 1 < count) {
      // the second byte is written without a branch, which would be mispredicted; where it is not
      // needed the next number overwrites it
      const bool two = gap >= 1 << 7;
      out[0] = static_cast<uint8_t>((gap & 0x7Fu) | two << 7);
      out[1] = static_cast<uint8_t>(gap >> 7);
      out += 1 + two;
      continue;
    }
    for (; gap >= 1 << 7; gap >>= 7) *out++ = static_cast<uint8_t>(gap | 0x80u);
    *out++ = static_cast<uint8_t>(gap);
  }
}

// The number in the bytes from `first` to `last`, which may be too long.
SHARDLAB_INLINE uint64_t number_in(const uint8_t* bytes, int64_t first, int64_t last) {
  if (last - first >= kLongest) return kNone;
  uint64_t number = 0;
  for (int64_t b = last; b >= first; --b) number = number << 7 | (bytes[b] & 0x7Fu);
  return number < kNone ? number : kNone;
}

// *valid = whether the bytes are `count` gaps that stay below n.
SHARDLAB_KERNEL void indices_from_varint(const uint8_t* bytes, int64_t size, int64_t count,
                                         int64_t n, int32_t* places, int64_t* valid) {
  *valid = 0;
  if (size && bytes[size - 1] >= 0x80) return;
  uint64_t next = 0;
  int64_t found = 0, after = 0;  // the byte after the number before
  for (int64_t first = 0; first < size; first += kWord) {
    const int64_t here = size - first < kWord ? size - first : kWord;
    // all ends are found first, so that no number waits for the length of the one before
    uint64_t ends = below(bytes + first, here, 0x80);
    const uint64_t open = ~ends, carried = first && bytes[first - 1] >= 0x80;
    // the last byte of a number may not be zero: each number has one form
    if (below(bytes + first, here, 1) & (open << 1 | carried)) return;
    int64_t j = found;
    found += __builtin_popcountll(ends);
    if (found > count) return;
    if (here < kWord || !first || (open & (open >> 1 | carried)) ||
        (carried && bytes[first - 2] >= 0x80)) {
      for (; ends; ends &= ends - 1) {
        const int64_t last = first + __builtin_ctzll(ends);
        const uint64_t gap = number_in(bytes, after, last);
        if (gap >= kNone) return;
        next += gap;
        places[j++] = static_cast<int32_t>(next++);
        after = last + 1;
      }
      continue;
    }
    // one byte or two each, without a branch, which would be mispredicted
    for (; ends; ends &= ends - 1) {
      const uint8_t* last = bytes + first + __builtin_ctzll(ends);
      const uint32_t two = last[-1] >> 7;
      next += static_cast<uint32_t>(*last) << 7 * two | (last[-1] & 0x7Fu & -two);
      places[j++] = static_cast<int32_t>(next++);
    }
    after = first + kWord;
    while (bytes[after - 1] >= 0x80) --after;
  }
  *valid = found == count && next <= static_cast<uint64_t>(n);
}

SHARDLAB_KERNEL void indices_to_bitmap(const int32_t* places, int64_t count, int64_t n,
                                       uint8_t* out) {
  std::fill_n(out, (n + 7) / 8, uint8_t{0});  // `out` may be null where n is 0
  for (int64_t j = 0; j < count; ++j)
    out[places[j] / 8] = static_cast<uint8_t>(out[places[j] / 8] | 1u << places[j] % 8);
}

// *valid = whether exactly `count` of the first n bits are set and none after them.
SHARDLAB_KERNEL void indices_from_bitmap(const uint8_t* bytes, int64_t n, int64_t count,
                                         int32_t* places, int64_t* valid) {
  *valid = 0;
  const int64_t size = (n + 7) / 8;
  int64_t set = 0;
  for (int64_t b = 0; b < size; ++b) set += __builtin_popcount(bytes[b]);
  if (set != count || (n % 8 && bytes[size - 1] >> n % 8)) return;
  for (int64_t first = 0; first < size; first += 8) {
    uint64_t word = 0;
    const int64_t here = size - first < 8 ? size - first : 8;
    for (int64_t b = 0; b < here; ++b) word |= static_cast<uint64_t>(bytes[first + b]) << (8 * b);
    for (; word; word &= word - 1)
      *places++ = static_cast<int32_t>(8 * first + __builtin_ctzll(word));
  }
  *valid = 1;
}
