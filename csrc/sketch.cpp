// Count sketches with computed hashes: shardlab/codecs/kernels/sketch.py defines them.
#include "random.h"

// Elements that are hashed at a time; their buckets and values stay in the first-level cache.
static constexpr int64_t kBlock = 256;
static constexpr int64_t kMostRows = 15;

struct Place {
  uint32_t bucket;
  uint32_t sign;  // 0 or the sign bit of a float
};

SHARDLAB_INLINE Place place_of(int64_t element, uint64_t buckets, uint32_t k0, uint32_t k1) {
  const uint32_t bits = random_bits(static_cast<uint32_t>(element), k0, k1);
  return {static_cast<uint32_t>((static_cast<uint64_t>(bits >> 1) * buckets) >> 31), bits << 31};
}

// One row of a table: table[bucket(i)] += sign(i) * x[i], in the order of i.
SHARDLAB_KERNEL void sketch_add(const float* x, int64_t n, int64_t buckets, uint32_t k0,
                                uint32_t k1, float* table) {
  uint32_t bucket[kBlock];
  float value[kBlock];
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t count = n - start < kBlock ? n - start : kBlock;
    for (int64_t i = 0; i < count; ++i) {
      const Place place = place_of(start + i, static_cast<uint64_t>(buckets), k0, k1);
      bucket[i] = place.bucket;
      value[i] = float_of(bits_of(x[start + i]) ^ place.sign);
    }
    for (int64_t i = 0; i < count; ++i) table[bucket[i]] += value[i];
  }
}

// estimates[i] = median over rows of sign(i) * tables[row][bucket(i)], for elements start to stop.
SHARDLAB_KERNEL void sketch_estimate(const float* tables, int64_t rows, int64_t buckets,
                                     const uint32_t* keys, int64_t start, int64_t stop,
                                     float* estimates) {
  float values[kMostRows][kBlock];
  uint32_t bucket[kBlock], sign[kBlock];
  for (int64_t first = start; first < stop; first += kBlock) {
    const int64_t count = stop - first < kBlock ? stop - first : kBlock;
    for (int64_t row = 0; row < rows; ++row) {
      const uint32_t k0 = keys[2 * row], k1 = keys[2 * row + 1];
      const float* table = tables + row * buckets;
      for (int64_t i = 0; i < count; ++i) {
        const Place place = place_of(first + i, static_cast<uint64_t>(buckets), k0, k1);
        bucket[i] = place.bucket;
        sign[i] = place.sign;
      }
      for (int64_t i = 0; i < count; ++i)
        values[row][i] = float_of(bits_of(table[bucket[i]]) ^ sign[i]);
    }
    // bubble sort up to the upper middle: each exchange serves a block of elements at once
    for (int64_t last = rows - 1; last > 0 && last >= (rows - 1) / 2; --last)
      for (int64_t row = 0; row < last; ++row)
        for (int64_t i = 0; i < count; ++i) {
          const float low = values[row][i], high = values[row + 1][i];
          values[row][i] = high < low ? high : low;
          values[row + 1][i] = high < low ? low : high;
        }
    const float* lower = values[(rows - 1) / 2];
    const float* upper = values[rows / 2];
    for (int64_t i = 0; i < count; ++i)
      estimates[first + i] = 0.5f * lower[i] + 0.5f * upper[i] + 0.0f;
  }
}
