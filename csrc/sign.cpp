// One bit per element with the mean magnitude of the message, and majority votes: shardlab/codecs/signs.py.
#include "grouped.h"

static constexpr int64_t kLanes = 32;
// Before a short loop over lanes: compilers that unroll it too early take its lanes for scalars.
#define SHARDLAB_LANES _Pragma("GCC unroll 1")

SHARDLAB_INLINE uint32_t load_quad(const uint8_t* from) {
  return load_word(from) | static_cast<uint32_t>(load_word(from + 2)) << 16;
}

SHARDLAB_INLINE float magnitude_of(float value) { return float_of(bits_of(value) & 0x7FFFFFFFu); }

// Lane l holds elements l, l + 32, l + 64, ...; then the upper half is added to the lower one.
template <int64_t kHalf = kLanes / 2>
SHARDLAB_INLINE float folded(float* lanes) {
#pragma GCC unroll 1  // whole, it would be taken for scalars
  for (int64_t l = 0; l < kHalf; ++l) lanes[l] += lanes[l + kHalf];
  if constexpr (kHalf > 1) folded<kHalf / 2>(lanes);
  return lanes[0];
}

// Not by `= {}`, which compilers turn into a slow string instruction.
template <class Number, int64_t kCount>
SHARDLAB_INLINE void clear(Number (&lanes)[kCount]) {
#pragma GCC unroll 64
  for (int64_t l = 0; l < kCount; ++l) lanes[l] = 0;
}

// Sum of the magnitudes.
SHARDLAB_INLINE float magnitude_sum(const float* given, int64_t count) {
  float lanes[kLanes];
  clear(lanes);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int64_t l = 0; l < kLanes; ++l) lanes[l] += magnitude_of(given[i + l]);
  for (int64_t l = 0; i + l < count; ++l) lanes[l] += magnitude_of(given[i + l]);
  return folded(lanes);
}

// The bits of a group in planes (grouped.h), set for elements below zero.
SHARDLAB_INLINE void pack_signs(const float* given, int64_t count, uint8_t* __restrict codes) {
  const int64_t width = (count + 7) / 8;
  if (count % 8 == 0) {
    for (int64_t j = 0; j < width; ++j) {
      // the byte grows down from the top of a word, so that words turn into bytes once, not 8x
      uint32_t word = 0;
      for (int64_t place = 0; place < 8; ++place)
        word = (word >> 1) | (given[place * width + j] < 0.0f ? 0x80000000u : 0u);
      codes[j] = static_cast<uint8_t>(word >> 24);
    }
    return;
  }
  for (int64_t j = 0; j < width; ++j) codes[j] = 0;
  for (int64_t i = 0; i < count; ++i)
    codes[i % width] = static_cast<uint8_t>(codes[i % width] | (given[i] < 0.0f) << (i / width));
}

// Bytes of payloads, copied where they are near each other, some hundred at a time. Payloads of
// power-of-two sizes share the places of a cache and would drive each other out of it.
template <int64_t kBytes>
struct Near {
  static constexpr int64_t kMost = 16;  // payloads; of more, the originals are read
  uint8_t bytes[kMost][kBytes];
  const uint8_t* copies[kMost];
  const uint8_t* const* of;  // byte i of what was taken of payload p is of[p][base + i]
  int64_t base;

  SHARDLAB_INLINE_MEMBER void take(const uint8_t* const* payloads, int64_t count, int64_t from,
                                   int64_t size) {
    of = payloads, base = from;
    if (count > kMost) return;
    for (int64_t p = 0; p < count; ++p) {
      std::memcpy(bytes[p], payloads[p] + from, static_cast<size_t>(size));
      copies[p] = bytes[p];
      // processors follow a few streams unasked, not eight; beyond the end this does nothing
      for (int64_t i = 0; i < size; i += 64) __builtin_prefetch(payloads[p] + from + size + i);
    }
    of = copies, base = 0;
  }
};

// Fetches what is written soon: groups are written in planes, which the processor does not foresee.
SHARDLAB_INLINE void ahead(const float* out, int64_t count) {
  for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(out + 1024 + i, 1);
}


static constexpr int64_t kMagnitude = 4;    // bytes of a payload before its bits
static constexpr int64_t kVoteBlock = 512;  // elements whose bits are packed in planes together
static constexpr int64_t kWidth = kVoteBlock / 8;

// The bits of the elements from start to stop, and the sum of the magnitudes of every 512 elements.
static void encode_range(const float* x, const float* residual, int64_t n, int64_t start,
                         int64_t stop, double* sums, uint8_t* payload) {
  alignas(64) float wanted[kVoteBlock];
  for (int64_t first = start; first < stop; first += kVoteBlock) {
    const int64_t size = smaller(kVoteBlock, n - first);
    const float* given = x + first;
    if (residual) {
      for (int64_t i = 0; i < size; ++i) wanted[i] = given[i] + residual[first + i];
      given = wanted;
    }
    sums[first / kVoteBlock] = static_cast<double>(magnitude_sum(given, size));
    pack_signs(given, size, payload + kMagnitude + first / 8);
  }
}

// The mean magnitude of n elements from their sums, which are folded in place.
static float mean_magnitude(double* sums, int64_t n) {
  int64_t count = (n + kVoteBlock - 1) / kVoteBlock;
  for (; count > 1; count = (count + 1) / 2)
    for (int64_t i = 0; i < count / 2; ++i) sums[i] += sums[i + (count + 1) / 2];
  const float mean = n ? static_cast<float>(sums[0] / static_cast<double>(n)) : 0.0f;
  const uint32_t bits = bits_of(mean);
  if (bits < 0x00800000u) return 0.0f;  // subnormal
  return is_finite(bits) ? mean : float_of(0x7FC00000u);
}

// kept = x + residual - decoded, or residual where that is not finite. From the end to the start,
// since the elements that were read last may still be in a cache.
static void keep_range(const float* x, const float* residual, float* kept, int64_t start,
                       int64_t stop, float magnitude) {
  for (int64_t last = stop; last > start; last -= kVoteBlock) {
    const int64_t first = last - kVoteBlock > start ? last - kVoteBlock : start;
    SHARDLAB_ELEMENTWISE
    for (int64_t i = first; i < last; ++i) {
      const float wanted = x[i] + residual[i];
      const float rest = wanted - (wanted < 0.0f ? -magnitude : magnitude);
      kept[i] = is_finite(bits_of(rest)) ? rest : residual[i];
    }
  }
}

// x[n] (+ residual[n]) -> payload; kept = what is lost. `sums` is a buffer of a number per 512 elements.
SHARDLAB_KERNEL void sign_encode(Workers* workers, const float* x, const float* residual, float* kept,
                                 int64_t n, double* sums, uint8_t* payload) {
  for_ranges(workers, n, kVoteBlock, [=](int64_t start, int64_t stop) {
    encode_range(x, residual, n, start, stop, sums, payload);
  });
  const float magnitude = mean_magnitude(sums, n);
  store_word(payload, static_cast<uint16_t>(bits_of(magnitude)));
  store_word(payload + 2, static_cast<uint16_t>(bits_of(magnitude) >> 16));
  if (kept)
    for_ranges(workers, n, kVoteBlock, [=](int64_t start, int64_t stop) {
      keep_range(x, residual, kept, start, stop, magnitude);
    });
}

// The payloads, and their bits of some blocks.
struct Ballot {
  const uint8_t* const* payloads;
  int64_t count, voters;
  Near<kLargestGroup / 8> codes;
};

// Bits of a block: where most votes are set, and where as many are set as not.
struct Outcome {
  alignas(64) uint8_t negative[kWidth], tie[kWidth];
};

// Counts vertically: digits[d] holds binary digit d of the number of set bits of all elements of a
// block, so that a payload is added to 8 elements of every byte at once.
template <int64_t kDigits>
SHARDLAB_INLINE void vote(const Ballot& ballot, int64_t first, int64_t width, Outcome& outcome) {
  const uint8_t* const* codes = ballot.codes.of;
  const int64_t code = ballot.codes.base + first / 8;
  uint8_t digits[kDigits][kWidth];
  for (int64_t d = 0; d < kDigits; ++d) clear(digits[d]);
  for (int64_t p = 0; p < ballot.count; ++p) {
    if (load_quad(ballot.payloads[p]) == 0) continue;
    const uint8_t* from = codes[p] + code;
    uint8_t padded[kWidth], carry[kWidth];
    if (width < kWidth) {
      for (int64_t j = 0; j < kWidth; ++j) padded[j] = j < width ? from[j] : 0;
      from = padded;
    }
    for (int64_t d = 0; d < kDigits; ++d)
      SHARDLAB_LANES
      for (int64_t j = 0; j < kWidth; ++j) {
        const uint8_t bit = d ? carry[j] : from[j];
        carry[j] = digits[d][j] & bit;
        digits[d][j] ^= bit;
      }
  }
  // from the highest digit down: larger than half of the voters, or equal to it so far
  const uint8_t even = ballot.voters % 2 ? 0 : 0xFF;
  SHARDLAB_LANES
  for (int64_t j = 0; j < kWidth; ++j) {
    uint8_t larger = 0, equal = 0xFF;
    for (int64_t d = kDigits - 1; d >= 0; --d) {
      const uint8_t half = ballot.voters >> (d + 1) & 1 ? 0xFF : 0;
      larger |= equal & digits[d][j] & static_cast<uint8_t>(~half);
      equal &= static_cast<uint8_t>(~(digits[d][j] ^ half));
    }
    outcome.negative[j] = larger;
    outcome.tie[j] = equal & even;
  }
}

// scale, -scale or 0 (NaN if scale is) at the places of a byte of each of eight columns.
SHARDLAB_INLINE void values_of(const Outcome& outcome, int64_t j, float scale,
                               Floats (&values)[8]) {
  const Floats plus = Floats{} + scale, minus = -plus, none = 0.0f * plus;
  const Words negative = words_of(unsigned_bytes(outcome.negative + j));
  const Words tie = words_of(unsigned_bytes(outcome.tie + j));
#pragma GCC unroll 8
  for (int place = 0; place < 8; ++place) {
    const Floats value = by_sign(negative << (31 - place), plus, minus);
    values[place] = by_sign(tie << (31 - place), value, none);
  }
}

template <int64_t kDigits, bool kAdd>
SHARDLAB_INLINE void decode_block(const Ballot& ballot, int64_t first, int64_t size, float scale,
                                  float* out) {
  const int64_t width = (size + 7) / 8;
  Outcome outcome;
  Floats values[8];
  ahead(out, size);
  vote<kDigits>(ballot, first, width, outcome);
  for (int64_t j = 0; j < width; j += 8) {
    values_of(outcome, j, scale, values);
    if (size == kVoteBlock) {
#pragma GCC unroll 8
      for (int place = 0; place < 8; ++place) {
        float* to = out + place * kWidth + j;
        store_floats(to, kAdd ? load_floats(to) + values[place] : values[place]);
      }
      continue;
    }
    for (int64_t place = 0; place < 8; ++place)
      for (int64_t l = 0; l < smaller(8, width - j) && place * width + j + l < size; ++l) {
        float& to = out[place * width + j + l];
        to = kAdd ? to + values[place][l] : values[place][l];
      }
  }
}

template <int64_t kDigits, bool kAdd>
SHARDLAB_INLINE void decode_votes(Ballot& ballot, int64_t start, int64_t stop, float scale,
                                  float* out) {
  for (int64_t from = start; from < stop; from += kLargestGroup) {
    const int64_t size = smaller(kLargestGroup, stop - from);
    ballot.codes.take(ballot.payloads, ballot.count, kMagnitude + from / 8, (size + 7) / 8);
    for (int64_t first = 0; first < size; first += kVoteBlock)
      decode_block<kDigits, kAdd>(ballot, first, smaller(kVoteBlock, size - first), scale,
                                  out + from + first);
  }
}

static void decode_range(const uint8_t* const* payloads, int64_t count, int64_t start, int64_t stop,
                         float alpha, bool add, float* out) {
  Ballot ballot;
  ballot.payloads = payloads, ballot.count = count, ballot.voters = 0;
  float total = 0.0f;
  for (int64_t p = 0; p < count; ++p) {
    total += float_of(load_quad(payloads[p]));
    ballot.voters += load_quad(payloads[p]) != 0;
  }
  const float scale = alpha * total;
  if (add)
    decode_votes<1, true>(ballot, start, stop, scale, out);
  else if (ballot.voters < 16)
    decode_votes<4, false>(ballot, start, stop, scale, out);
  else if (ballot.voters < 256)
    decode_votes<8, false>(ballot, start, stop, scale, out);
  else
    decode_votes<32, false>(ballot, start, stop, scale, out);
}

// out = alpha * (sum of the magnitudes) * (1, -1, or 0 for a tie); added to out if `add`, which is for
// one payload.
SHARDLAB_KERNEL void sign_decode(Workers* workers, const uint8_t* const* payloads, int64_t count,
                                 int64_t n, float alpha, int add, float* out) {
  for_ranges(workers, n, kVoteBlock, [=](int64_t start, int64_t stop) {
    decode_range(payloads, count, start, stop, alpha, add != 0, out);
  });
}
