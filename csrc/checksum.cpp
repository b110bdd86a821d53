// Sums of 64-bit words from which shardlab/kernels/checksum.py makes the checksum of a message.
#include <cstring>

#include "kernels.h"

static constexpr int64_t kRow = 32;  // words; each column of a row has a lane of its own

SHARDLAB_INLINE uint64_t load_wide(const uint8_t* from) {
  uint64_t word;
  std::memcpy(&word, from, sizeof word);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  word = __builtin_bswap64(word);
#endif
  return word;
}

// Over the words from start to stop (start a multiple of kRow), in rows: sums[0] = the sum of the
// words, sums[1] = the sum of the words times the number of rows from theirs to the last one.
SHARDLAB_KERNEL void checksum(const uint8_t* data, int64_t start, int64_t stop, uint64_t* sums) {
  const int64_t whole = start + (stop - start) / kRow * kRow;
  // used by this loop alone: so the lanes stay in registers
  uint64_t lanes[kRow] = {}, weighted_lanes[kRow] = {};
  for (int64_t row = start; row < whole; row += kRow) {
    for (int64_t lane = 0; lane < kRow; ++lane) {
      lanes[lane] += load_wide(data + 8 * (row + lane));
      weighted_lanes[lane] += lanes[lane];
    }
  }
  uint64_t plain = 0, weighted = 0;
  for (int64_t lane = 0; lane < kRow; ++lane) {
    plain += lanes[lane];
    weighted += weighted_lanes[lane];
  }
  if (whole < stop) {  // the last row is shorter
    for (int64_t word = whole; word < stop; ++word) plain += load_wide(data + 8 * word);
    weighted += plain;
  }
  sums[0] = plain;
  sums[1] = weighted;
}
