// The largest elements of a vector by magnitude, and its residual: shardlab/codecs/selection.py.
//
// A magnitude that somewhat more than k elements reach is guessed from a random sample. One pass over
// the vector gathers those elements (and adds the residual); a radix select of 11 + 10 + 10 bits among
// them finds the exact threshold. Where the guess was wrong the radix select runs over the whole
// vector. The result depends neither on the guess nor on the number of threads.
//
// Magnitudes are compared as bit patterns: infinity lies above every finite number and NaN above it.
#include <cmath>
#include <memory>

#include "workers.h"

static constexpr int64_t kBlock = 1024;  // elements that stay in the first-level cache
static constexpr int64_t kWord = 64;     // elements whose comparisons make one machine word
static constexpr int64_t kSamples = 1 << 13;
static constexpr int kTables = 4;        // several histograms, so that increments do not wait for each other

SHARDLAB_INLINE int32_t magnitude_of(float value) {
  return static_cast<int32_t>(bits_of(value) & 0x7FFFFFFFu);
}

// x[start:stop] (+ residual); `names` are the positions of the elements, if not start to stop.
struct Part {
  const float* x;
  const float* residual;
  const int32_t* names;
  int64_t start, stop;
};

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

// Values and positions of the elements of a part whose magnitude is at least `floor`, while the buffers
// have space for a word of them; returns how many there are. Writes kept = x + residual, or residual
// where that is not finite, if there is a `kept`.
static int64_t gather(const Part& part, float* kept, int32_t floor, int64_t space, float* values,
                      int32_t* places) {
  const auto [x, residual, names, start, stop] = part;
  alignas(64) float buffer[kBlock];
  uint64_t masks[kBlock / kWord];
  int64_t count = 0;
  for (int64_t first = start; first < stop; first += kBlock) {
    const int64_t size = std::min(kBlock, stop - first);
    const float* given = block_of(x, residual, first, size, buffer);
    if (kept)
      for (int64_t i = 0; i < size; ++i)
        kept[first + i] = is_finite(bits_of(given[i])) ? given[i] : residual[first + i];
    // all comparisons first: branches that depend on them would wait for memory
    for (int64_t word = 0; word < size; word += kWord)
      masks[word / kWord] = at_least(given + word, std::min(kWord, size - word), floor);
    for (int64_t word = 0; word < size; word += kWord) {
      uint64_t mask = masks[word / kWord];
      if (count + kWord > space) {
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
  return count;
}

// The bits d below `prefix`; other magnitudes have the digit after the last, since a branch would often
// be mispredicted.
SHARDLAB_INLINE int32_t digit_of(float value, int32_t prefix, int32_t shift, int32_t digits,
                                 int32_t width) {
  const int32_t upper = magnitude_of(value) >> shift;
  return upper >> width == prefix ? upper & (digits - 1) : digits;
}

// counts[d] = how many magnitudes of a part have the upper bits `prefix`, followed by the `width` <= 11
// bits d, followed by `shift` bits.
static void count_digits(const Part& part, int32_t prefix, int32_t shift, int32_t width,
                         int64_t* counts) {
  const auto [x, residual, names, start, stop] = part;
  alignas(64) float buffer[kBlock];
  uint32_t tables[kTables][(1 << 11) + 1];
  const int32_t digits = 1 << width;
  for (int t = 0; t < kTables; ++t)
    for (int32_t d = 0; d <= digits; ++d) tables[t][d] = 0;
  for (int64_t first = start; first < stop; first += kBlock) {
    const int64_t size = std::min(kBlock, stop - first);
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

// The elements of a part with a magnitude above `threshold` and the first `ties` equal to it, in order.
static void collect(const Part& part, int32_t threshold, int64_t ties, float* values,
                    int32_t* places) {
  const auto [x, residual, names, start, stop] = part;
  alignas(64) float buffer[kBlock];
  for (int64_t first = start; first < stop; first += kBlock) {
    const int64_t size = std::min(kBlock, stop - first);
    const float* given = block_of(x, residual, first, size, buffer);
    for (int64_t word = 0; word < size; word += kWord) {
      if (ties == 0 && threshold == INT32_MAX) return;
      const int32_t floor = ties ? threshold : threshold + 1;
      uint64_t mask = at_least(given + word, std::min(kWord, size - word), floor);
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

// Selected magnitudes: all above `threshold`, and in each part the first `ties` equal to it.
struct Cut {
  int32_t threshold;
  std::vector<int64_t> above, ties;  // elements, by part
};

// How many of the `wanted` ties each part has: the first ones.
static std::vector<int64_t> shared_ties(int64_t wanted, std::vector<int64_t> equal) {
  for (int64_t& count : equal) {
    count = std::min(count, wanted);
    wanted -= count;
  }
  return equal;
}

// The cut that selects `wanted` elements, of at least as many.
static Cut cut_of(Workers* workers, const std::vector<Part>& parts, int64_t wanted) {
  const int64_t size = static_cast<int64_t>(parts.size());
  std::vector<int64_t> above(parts.size()), equal(parts.size()), counts(parts.size() << 11);
  int32_t threshold = 0;
  for (const auto& [shift, width] : {std::pair{20, 11}, {10, 10}, {0, 10}}) {
    for_each(workers, size, [&, shift = shift, width = width](int64_t p) {
      count_digits(parts[p], threshold, shift, width, &counts[p << 11]);
    });
    // the largest digit that `wanted` elements reach
    int32_t digit = (1 << width) - 1;
    for (;; --digit) {
      int64_t here = 0;
      for (int64_t p = 0; p < size; ++p) here += counts[(p << 11) + digit];
      if (here >= wanted || digit == 0) break;
      wanted -= here;
      for (int64_t p = 0; p < size; ++p) above[p] += counts[(p << 11) + digit];
    }
    for (int64_t p = 0; p < size; ++p) equal[p] = counts[(p << 11) + digit];
    threshold = threshold << width | digit;
  }
  return {threshold, above, shared_ties(wanted, equal)};
}

// A magnitude that most likely k of n elements reach, and the capacity for those that do.
static std::pair<int32_t, int64_t> guess(const float* x, const float* residual, int64_t n, int64_t k,
                                         int32_t floor) {
  const double expected = static_cast<double>(k) * kSamples / static_cast<double>(n);
  const int64_t rank = static_cast<int64_t>(std::ceil(expected + 4 * std::sqrt(expected) + 4));
  if (n <= 4 * kSamples || rank > kSamples) return {floor, n};
  float samples[kSamples];
  // of each of as many equal parts of the vector, at a random position
  for (int64_t j = 0; j < kSamples; ++j) {
    const int64_t start = j * n / kSamples, size = (j + 1) * n / kSamples - start;
    const uint64_t chance = random_bits(static_cast<uint32_t>(j), 0, 0);
    const int64_t i = start + static_cast<int64_t>(chance * static_cast<uint64_t>(size) >> 32);
    samples[j] = residual ? x[i] + residual[i] : x[i];
  }
  const Cut cut = cut_of(nullptr, {{samples, nullptr, nullptr, 0, kSamples}}, rank);
  return {std::max({cut.threshold, floor, 1}), 2 * rank * n / kSamples};
}

// Memory that a thread keeps from call to call, up to 16 MiB: fresh pages cost more than the work.
static int32_t* scratch(int64_t words, std::unique_ptr<int32_t[]>& larger) {
  constexpr int64_t kMost = 1 << 22;
  static thread_local std::unique_ptr<int32_t[]> memory;
  static thread_local int64_t size = 0;
  if (words > kMost) {
    larger.reset(new int32_t[static_cast<size_t>(words)]);
    return larger.get();
  }
  if (words > size) {
    memory.reset(new int32_t[static_cast<size_t>(words)]);
    size = words;
  }
  return memory.get();
}

static std::vector<Part> parts_of(Workers* workers, const float* x, const float* residual, int64_t n) {
  const int64_t count = workers ? workers->threads() : 1;
  const int64_t size = (n + count * kBlock - 1) / (count * kBlock) * kBlock;
  std::vector<Part> parts;
  for (int64_t start = 0; start < n; start += size)
    parts.push_back({x, residual, nullptr, start, std::min(n, start + size)});
  return parts;
}

// The k elements of x (+ residual) of largest magnitude, or fewer if fewer reach `least`, by ascending
// position; *found of them. `kept` as in `gather`.
SHARDLAB_KERNEL void select_largest(Workers* workers, const float* x, const float* residual,
                                    float* kept, int64_t n, int64_t k, int64_t least, float* values,
                                    int32_t* places, int64_t* found) {
  const int32_t floor = static_cast<int32_t>(least);
  std::vector<Part> parts = parts_of(workers, x, residual, n);
  const size_t size = parts.size();
  const auto [low, capacity] = guess(x, residual, n, k, floor);
  std::vector<int64_t> spaces(size), starts(size + 1), counts(size);
  for (size_t p = 0; p < size; ++p) {
    spaces[p] = std::min(capacity, parts[p].stop - parts[p].start) + kWord;
    starts[p + 1] = starts[p] + 2 * spaces[p];
  }
  std::unique_ptr<int32_t[]> larger;
  int32_t* const memory = scratch(starts[size], larger);
  const auto values_of = [&](int64_t p) { return reinterpret_cast<float*>(memory + starts[p]); };
  const auto places_of = [&](int64_t p) { return memory + starts[p] + spaces[p]; };
  for_each(workers, static_cast<int64_t>(size), [&, low = low](int64_t p) {
    counts[p] = gather(parts[p], kept, low, spaces[p], values_of(p), places_of(p));
  });
  bool fits = true;
  int64_t reached = 0;
  for (size_t p = 0; p < size; ++p) {
    fits = fits && counts[p] <= spaces[p] - kWord;
    reached += counts[p];
  }
  const int64_t wanted = low > floor ? k : std::min(k, reached);
  Cut cut;
  if (fits && reached >= wanted) {
    for (size_t p = 0; p < size; ++p)
      parts[p] = {values_of(p), nullptr, places_of(p), 0, counts[p]};
    cut = reached == wanted ? Cut{low - 1, counts, std::vector<int64_t>(size)}
                            : cut_of(workers, parts, wanted);
  } else if (fits && low == 1) {
    // all that is not zero, and as many zeros as it takes
    std::vector<int64_t> zeros(size);
    for (size_t p = 0; p < size; ++p) zeros[p] = parts[p].stop - parts[p].start - counts[p];
    cut = {0, counts, shared_ties(wanted - reached, zeros)};
  } else {
    cut = cut_of(workers, parts, wanted);
  }
  std::vector<int64_t> at(size + 1);
  for (size_t p = 0; p < size; ++p) at[p + 1] = at[p] + cut.above[p] + cut.ties[p];
  for_each(workers, static_cast<int64_t>(size), [&](int64_t p) {
    collect(parts[p], cut.threshold, cut.ties[p], values + at[p], places + at[p]);
  });
  *found = wanted;
}

static void keep_range(const float* x, const float* residual, float* kept, int64_t start,
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
    const int64_t size = std::min(kBlock, stop - first);
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

// kept = x + residual where there is an x, then, at the positions, kept = values - decoded; residual
// where that is not finite. `places` are ascending.
SHARDLAB_KERNEL void select_keep(Workers* workers, const float* x, const float* residual, float* kept,
                                 int64_t n, const int32_t* places, const float* values,
                                 const float* decoded, int64_t count) {
  for_ranges(workers, n, kBlock, [=](int64_t start, int64_t stop) {
    keep_range(x, residual, kept, start, stop, places, values, decoded, count);
  });
}
