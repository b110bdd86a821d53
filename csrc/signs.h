// One bit per element, and means that every instruction set sums alike: shardlab/codecs/kernels/signs.py
// defines both.
#pragma once

#include <cfloat>

#include "grouped.h"

static constexpr int64_t kLanes = 32;
// Before a short loop over lanes: compilers that unroll it too early take its lanes for scalars.
#define SHARDLAB_LANES _Pragma("GCC unroll 1")
static constexpr uint16_t kNoMean = 0x7FC0;  // bfloat16 NaN

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

// The mean as bfloat16, to nearest even: 0 where it would be subnormal, NaN where it is not finite.
SHARDLAB_INLINE uint16_t mean_word(float sum, int64_t count) {
  if (count == 0) return 0;
  const float mean = sum / static_cast<float>(count);
  const uint32_t bits = bits_of(mean), magnitude = bits & 0x7FFFFFFFu;
  if (magnitude < 0x00800000u) return 0;
  const uint32_t word = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return magnitude < 0x7F7F8000u ? static_cast<uint16_t>(word) : kNoMean;
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

// clear or set, by the lowest bit of each code.
SHARDLAB_INLINE Floats chosen(Ints codes, float clear, float set) {
  const Floats zero = Floats{} + clear, one = Floats{} + set;
  return (codes << 31) < 0 ? one : zero;
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

// The groups of a span, of all payloads.
struct Span {
  int64_t count;
  Near<4 * kLargestGroup / 8> heads;
  Near<kLargestGroup / 8> codes;
};

template <class Format>
SHARDLAB_INLINE void add_single(const uint8_t* head, const uint8_t* codes, Floats (&total)[8]) {
  const typename Format::Head means = Format::load(head);
  const Floats clear = Floats{} + means.clear(), set = Floats{} + means.set();
  Words tops = words_of(unsigned_bytes(codes)) << 24;
#pragma GCC unroll 8
  for (int place = 7; place >= 0; --place) {
    total[place] += by_sign(tops, clear, set);
    tops += tops;  // more units add than shift
  }
}

// total[place][l] = sum over payloads of element `place` of byte l of 8 columns.
template <class Format, bool kWhole>
SHARDLAB_INLINE void sum_columns(const Span& span, int64_t head, int64_t code,
                                 int64_t columns, Floats (&total)[8]) {
  const uint8_t* const* heads = span.heads.of;
  const uint8_t* const* codes = span.codes.of;
  head += span.heads.base, code += span.codes.base;
#pragma GCC unroll 8
  for (int place = 0; place < 8; ++place) total[place] = Floats{} - 0.0f;  // -0 + x is x, for all x
  for (int64_t p = 0; p < span.count; ++p) {
    const uint8_t* from = codes[p] + code;
    uint8_t padded[8];
    if (!kWhole) {
      for (int64_t l = 0; l < 8; ++l) padded[l] = l < columns ? from[l] : 0;
      from = padded;
    }
    add_single<Format>(heads[p] + head, from, total);
  }
}

// Fetches what is written soon: groups are written in planes, which the processor does not foresee.
SHARDLAB_INLINE void ahead(const float* out, int64_t count) {
  for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(out + 1024 + i, 1);
}

// out = or += alpha * the sum of one group, which starts `first` elements into the span.
template <class Format, bool kAdd>
SHARDLAB_INLINE void decode_signed(const Span& span, int64_t head, int64_t first, int64_t size,
                                  float alpha, float* out) {
  const int64_t width = (size + 7) / 8;
  Floats total[8];
  ahead(out, size);
  int64_t j = 0;
  for (; size % 8 == 0 && j + 8 <= width; j += 8) {
    sum_columns<Format, true>(span, head, first / 8 + j, 8, total);
#pragma GCC unroll 8
    for (int place = 0; place < 8; ++place) {
      float* to = out + place * width + j;
      const Floats value = total[place] * alpha;
      store_floats(to, kAdd ? load_floats(to) + value : value);
    }
  }
  for (; j < width; j += 8) {
    const int64_t columns = smaller(8, width - j);
    sum_columns<Format, false>(span, head, first / 8 + j, columns, total);
    for (int64_t place = 0; place < 8; ++place)
      for (int64_t l = 0; l < columns && place * width + j + l < size; ++l) {
        float& to = out[place * width + j + l];
        to = kAdd ? to + alpha * total[place][l] : alpha * total[place][l];
      }
  }
}

// Like decode_groups (grouped.h), for formats whose heads say what a clear and a set bit mean: the
// sum over payloads stays in registers.
template <class Format, bool kAdd>
SHARDLAB_INLINE void decode_signs(const uint8_t* const* payloads, int64_t count, int64_t n,
                                  int64_t group, int64_t start, int64_t stop, float alpha,
                                  float* out) {
  const int64_t border = Format::kHeadBytes * ((n + group - 1) / group);
  const int64_t most = kLargestGroup / group * group;
  Span span;
  span.count = count;
  for (int64_t from = start; from < stop; from += most) {
    const int64_t size = smaller(most, stop - from), groups = (size + group - 1) / group;
    span.heads.take(payloads, count, Format::kHeadBytes * (from / group),
                    Format::kHeadBytes * groups);
    span.codes.take(payloads, count, border + from / 8, (size + 7) / 8);
    for (int64_t first = 0, head = 0; first < size; first += group, head += Format::kHeadBytes)
      decode_signed<Format, kAdd>(span, head, first, smaller(group, size - first), alpha,
                                 out + from + first);
  }
}

// The two kernels of such a format, under the names that shardlab/codecs/kernels/grouped.py binds.
#define SHARDLAB_SIGNS(name, Format)                                                               \
  SHARDLAB_KERNEL void name##_encode(const float* x, const float* residual, float* kept,           \
                                     int64_t n, int64_t group, int64_t start, int64_t stop,        \
                                     uint32_t k0, uint32_t k1, uint8_t* payload) {                 \
    encode_groups<Format>(x, residual, kept, n, group, start, stop, k0, k1, payload);              \
  }                                                                                                \
  SHARDLAB_KERNEL void name##_decode(const uint8_t* const* payloads, int64_t count, int64_t n,     \
                                     int64_t group, int64_t start, int64_t stop, float alpha,      \
                                     int add, float* out) {                                        \
    if (add)                                                                                       \
      decode_signs<Format, true>(payloads, count, n, group, start, stop, alpha, out);              \
    else                                                                                           \
      decode_signs<Format, false>(payloads, count, n, group, start, stop, alpha, out);             \
  }
