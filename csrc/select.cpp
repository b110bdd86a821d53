// The largest elements of a vector by magnitude, and its residual: shardlab/codecs/kernels/select.py.
//
// Magnitudes are compared as bit patterns: infinity lies above every finite number and NaN above it.
#include "random.h"

static constexpr int64_t kBlock = 1024;  // elements that stay in the first-level cache
static constexpr int64_t kWord = 64;     // elements whose comparisons make one machine word
static constexpr int kTables = 4;        // several histograms, so that increments do not wait for each other

SHARDLAB_INLINE int32_t magnitude_of(float value) {
  return static_cast<int32_t>(bits_of(value) & 0x7FFFFFFFu);
}

SHARDLAB_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Element i of the block is x[first + i] (+ residual[first + i]).
SHARDLAB_INLINE const float* block_of(const float* x, const float* residual, int64_t first,
                                      int64_t count, float* __restrict buffer) {
  if (!residual) return x + first;
  for (int64_t i = 0; i < count; ++i) buffer[i] = x[first + i] + residual[first + i];
  return buffer;
}

// Bit i says whether the magnitude of element i, of up to 64, is at least `floor`.
SHARDLAB_INLINE uint64_t at_least(const float* given, int64_t count, int32_t floor) {
  alignas(64) uint8_t flags[kWord];
  if (count == kWord) {
    for (int64_t i = 0; i < kWord; ++i) flags[i] = magnitude_of(given[i]) >= floor;
  } else {
    for (int64_t i = 0; i < kWord; ++i) flags[i] = i < count && magnitude_of(given[i]) >= floor;
  }
  return mask_of(flags);
}

// samples[j] = an element of the j-th of `count` <= n equal parts of the vector, at a random position.
// Positions affect the cost of the selection, not its result.
SHARDLAB_KERNEL void select_sample(const float* x, const float* residual, int64_t n, int64_t count,
                                   float* samples) {
  for (int64_t j = 0; j < count; ++j) {
    const int64_t start = j * n / count, size = (j + 1) * n / count - start;
    const uint64_t chance = random_bits(static_cast<uint32_t>(j), 0, 0);
    const int64_t i = start + static_cast<int64_t>(chance * static_cast<uint64_t>(size) >> 32);
    samples[j] = residual ? x[i] + residual[i] : x[i];
  }
}

// Values and positions of the elements from start to stop whose magnitude is at least `floor`, while
// the buffers have space for a word of them; *found counts them all. Writes kept = x + residual, or
// residual where that is not finite, if there is a `kept`.
SHARDLAB_KERNEL void select_gather(const float* x, const float* residual, float* kept,
                                   int64_t start, int64_t stop, int32_t floor, int64_t room,
                                   float* values, int32_t* places, int64_t* found) {
  alignas(64) float buffer[kBlock];
  uint64_t masks[kBlock / kWord];
  int64_t count = 0;
  for (int64_t first = start; first < stop; first += kBlock) {
    const int64_t size = least(kBlock, stop - first);
    const float* given = block_of(x, residual, first, size, buffer);
    if (kept)
      for (int64_t i = 0; i < size; ++i)
        kept[first + i] = is_finite(bits_of(given[i])) ? given[i] : residual[first + i];
    // all comparisons first: branches that depend on them would wait for memory
    for (int64_t word = 0; word < size; word += kWord)
      masks[word / kWord] = at_least(given + word, least(kWord, size - word), floor);
    for (int64_t word = 0; word < size; word += kWord) {
      uint64_t mask = masks[word / kWord];
      if (count + kWord > room) {
        count += __builtin_popcountll(mask);
        continue;
      }
      // two at a time without a test: at the usual densities no branch is mispredicted
      int64_t next = count;
      count += __builtin_popcountll(mask);
      do {
        for (int twice = 0; twice < 2; ++twice, ++next, mask &= mask - 1) {
          const int64_t i = word + __builtin_ctzll(mask | uint64_t{mask == 0});
          values[next] = given[i];
          places[next] = static_cast<int32_t>(first + i);
        }
      } while (mask);
    }
  }
  *found = count;
}

// The bits d below `prefix`; other magnitudes have the digit after the last, since a branch would often
// be mispredicted.
SHARDLAB_INLINE int32_t digit_of(float value, int32_t prefix, int32_t shift, int32_t digits,
                                 int32_t width) {
  const int32_t upper = magnitude_of(value) >> shift;
  return upper >> width == prefix ? upper & (digits - 1) : digits;
}

// counts[d] = how many magnitudes from start to stop have the upper bits `prefix`, followed by the
// `width` <= 11 bits d, followed by `shift` bits.
SHARDLAB_KERNEL void select_count(const float* x, const float* residual, int64_t start,
                                  int64_t stop, int32_t prefix, int32_t shift, int32_t width,
                                  int64_t* counts) {
  alignas(64) float buffer[kBlock];
  uint32_t tables[kTables][(1 << 11) + 1];
  const int32_t digits = 1 << width;
  for (int t = 0; t < kTables; ++t)
    for (int32_t d = 0; d <= digits; ++d) tables[t][d] = 0;
  for (int64_t first = start; first < stop; first += kBlock) {
    const int64_t size = least(kBlock, stop - first);
    const float* given = block_of(x, residual, first, size, buffer);
    int64_t i = 0;
    for (; i + kTables <= size; i += kTables) {
#pragma GCC unroll 4
      for (int t = 0; t < kTables; ++t)
        ++tables[t][digit_of(given[i + t], prefix, shift, digits, width)];
    }
    for (; i < size; ++i) ++tables[0][digit_of(given[i], prefix, shift, digits, width)];
  }
  for (int32_t d = 0; d < digits; ++d) {
    counts[d] = 0;
    for (int t = 0; t < kTables; ++t) counts[d] += tables[t][d];
  }
}

// From the counts[parts][digits] of all parts: the largest *digit that at least *wanted elements reach.
// Those above it are subtracted from *wanted and added to above[part]; equal[part] have that digit.
SHARDLAB_KERNEL void select_digit(const int64_t* counts, int64_t parts, int64_t digits,
                                  int64_t* wanted, int64_t* above, int64_t* equal,
                                  int64_t* digit) {
  for (int64_t d = digits - 1; d >= 0; --d) {
    int64_t here = 0;
    for (int64_t p = 0; p < parts; ++p) here += counts[p * digits + d];
    if (here < *wanted && d) {
      *wanted -= here;
      for (int64_t p = 0; p < parts; ++p) above[p] += counts[p * digits + d];
      continue;
    }
    for (int64_t p = 0; p < parts; ++p) equal[p] = counts[p * digits + d];
    *digit = d;
    return;
  }
}

// The elements from start to stop with a magnitude above `threshold` and the first `ties` equal to it, in
// their order. The position of element i is names[i], or i where there are no names.
SHARDLAB_KERNEL void select_collect(const float* x, const float* residual, const int32_t* names,
                                    int64_t start, int64_t stop, int32_t threshold, int64_t ties,
                                    float* values, int32_t* places) {
  alignas(64) float buffer[kBlock];
  for (int64_t first = start; first < stop; first += kBlock) {
    const int64_t size = least(kBlock, stop - first);
    const float* given = block_of(x, residual, first, size, buffer);
    for (int64_t word = 0; word < size; word += kWord) {
      if (ties == 0 && threshold == INT32_MAX) return;
      const int32_t floor = ties ? threshold : threshold + 1;
      uint64_t mask = at_least(given + word, least(kWord, size - word), floor);
      for (; mask; mask &= mask - 1) {
        const int64_t i = word + __builtin_ctzll(mask);
        if (magnitude_of(given[i]) == threshold) {
          if (ties == 0) continue;
          --ties;
        }
        *values++ = given[i];
        *places++ = names ? names[first + i] : static_cast<int32_t>(first + i);
      }
    }
  }
}

// For the elements from start to stop: kept = x + residual where there is an x, then, at the positions,
// kept = values - decoded; residual where that is not finite. `places` are ascending.
SHARDLAB_KERNEL void select_keep(const float* x, const float* residual, float* kept, int64_t start,
                                 int64_t stop, const int32_t* places, const float* values,
                                 const float* decoded, int64_t count) {
  float before[kBlock];
  int64_t next = 0;
  for (int64_t last = count; next < last;) {
    const int64_t middle = (next + last) / 2;
    if (places[middle] < start)
      next = middle + 1;
    else
      last = middle;
  }
  for (int64_t first = start; first < stop; first += kBlock) {
    const int64_t size = least(kBlock, stop - first);
    int64_t end = next;
    // kept may be residual: its old values at the positions are read first
    for (; end < count && places[end] < first + size; ++end)
      before[end - next] = residual[places[end]];
    if (x) {
      SHARDLAB_ELEMENTWISE
      for (int64_t i = first; i < first + size; ++i) {
        const float given = x[i] + residual[i];
        kept[i] = is_finite(bits_of(given)) ? given : residual[i];
      }
    }
    for (int64_t j = next; j < end; ++j) {
      const float rest = values[j] - decoded[j];
      kept[places[j]] = is_finite(bits_of(rest)) ? rest : before[j - next];
    }
    next = end;
  }
}
