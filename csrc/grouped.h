// Codecs that cut a vector into groups. A payload holds a head for every group (its scales), then the
// codes of all groups, kBits for each element.
//
// A format says how one group becomes a head and codes; everything else is here. A format is a struct
// with
//
//   kHeadBytes, kBits        sizes; groups are multiples of 8 elements, so codes start at whole bytes
//   Head                     what the head says, in registers
//   head_of(given, count)    from the elements of a group
//   store(head, to), load(from)
//   encode(given, count, head, random, codes)   writes ceil(count * kBits / 8) bytes
//   value(word, head)        what the code in the upper bits of a word stands for; a template over
//                            words and lanes of words (lanes.h)
//   decode(codes, count, head, values)          slower, for formats without such a `value`
//
// Blocks of groups pass through buffers in the first-level cache, so that memory sees one pass: all
// heads of a block come before its codes, since a head waits for the last element of its group.
//
// Widths below 8 bits are packed in planes: with m = ceil(count * kBits / 8) bytes of a group, byte j
// holds elements j, j + m, j + 2 m, ... from its lowest bits up, which needs no shuffles.
#pragma once

#include <type_traits>

#include "lanes.h"
#include "random.h"
#include "stream.h"

static constexpr int64_t kLargestGroup = 4096;
static constexpr int64_t kBlock = 2048;  // elements; groups larger than it are blocks of their own

// The random numbers of a group: element i of it is element `first + i` of the message.
struct Random {
  uint32_t k0, k1, first;
  SHARDLAB_INLINE_MEMBER uint32_t bits(int64_t i) const {
    return random_bits(first + static_cast<uint32_t>(i), k0, k1);
  }
  SHARDLAB_INLINE_MEMBER float operator()(int64_t i) const {
    return uniform(first + static_cast<uint32_t>(i), k0, k1);
  }
};

SHARDLAB_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

SHARDLAB_INLINE int64_t code_bytes(int64_t count, int64_t bits) { return (count * bits + 7) / 8; }

// Where the parts of a payload are; its groups one after another.
template <class Format>
struct Layout {
  int64_t n, group, border;
  SHARDLAB_INLINE_MEMBER Layout(int64_t n, int64_t group)
      : n(n), group(group), border(Format::kHeadBytes * ((n + group - 1) / group)) {}
  SHARDLAB_INLINE_MEMBER int64_t size(int64_t first) const { return smaller(group, n - first); }
  SHARDLAB_INLINE_MEMBER int64_t head(int64_t first) const {
    return first / group * Format::kHeadBytes;
  }
  SHARDLAB_INLINE_MEMBER int64_t codes(int64_t first) const {
    return border + first * Format::kBits / 8;
  }
  SHARDLAB_INLINE_MEMBER int64_t block() const {
    return group < kBlock ? kBlock / group * group : group;
  }
};

// Code j of a plane that starts at bit `bit`, in the upper bits of a word.
template <int64_t kBits>
SHARDLAB_INLINE uint32_t upper_code(const uint8_t* codes, int64_t j, int64_t bit) {
  if constexpr (kBits == 16)
    return static_cast<uint32_t>(load_word(codes + 2 * j)) << 16;
  else
    return static_cast<uint32_t>(codes[j]) << (32 - kBits - bit);
}

// Whether a format has a `value` of lanes.
template <class Format, class = void>
struct HasLanes : std::false_type {};
template <class Format>
struct HasLanes<Format, std::void_t<decltype(Format::value(Words{}, typename Format::Head{}))>>
    : std::true_type {};

// sum = the values of one plane of a group, `size` elements, in kCount payloads.
template <class Format, size_t kCount>
SHARDLAB_INLINE void add_plane(const uint8_t* const* codes, const typename Format::Head* heads,
                               int64_t size, int64_t bit, float* __restrict sum) {
  constexpr int64_t kUnit = Format::kBits == 16 ? 16 : 8, kUnits = 32 / kUnit;
  int64_t done = 0;
  for (; done + 8 * kUnits <= size; done += 8 * kUnits) {
    Floats totals[kUnits];
    for (int64_t q = 0; q < kUnits; ++q) {
      const int64_t up = 32 - kUnit * q - Format::kBits - bit;
      Floats total;
      for (size_t p = 0; p < kCount; ++p) {
        const Words words = load_words(codes[p] + done * kUnit / 8) << static_cast<uint32_t>(up);
        const Floats value = Format::value(words, heads[p]);
        total = p ? total + value : value;
      }
      totals[q] = total;
    }
    store_interleaved(sum + done, totals);
  }
  for (; done < size; ++done) {
    float total = 0;
    for (size_t p = 0; p < kCount; ++p) {
      const float value = Format::value(upper_code<Format::kBits>(codes[p], done, bit), heads[p]);
      total = p ? total + value : value;
    }
    sum[done] = total;
  }
}

// sum = the values of a group in kCount payloads.
template <class Format, size_t kCount>
SHARDLAB_INLINE void add_group(const uint8_t* const* payloads, const Layout<Format>& at,
                               int64_t first, float* sum) {
  const uint8_t* codes[kCount];
  typename Format::Head heads[kCount];
  for (size_t p = 0; p < kCount; ++p) {
    heads[p] = Format::load(payloads[p] + at.head(first));
    codes[p] = payloads[p] + at.codes(first);
  }
  const int64_t count = at.size(first);
  if constexpr (!HasLanes<Format>::value) {
    alignas(64) float decoded[kLargestGroup];
    for (size_t p = 0; p < kCount; ++p) {
      Format::decode(codes[p], count, heads[p], p ? decoded : sum);
      if (p)
        for (int64_t i = 0; i < count; ++i) sum[i] += decoded[i];
    }
  } else if constexpr (Format::kBits >= 8) {
    add_plane<Format, kCount>(codes, heads, count, 0, sum);
  } else {
    const int64_t width = code_bytes(count, Format::kBits);
    for (int64_t bit = 0, start = 0; start < count; bit += Format::kBits, start += width)
      add_plane<Format, kCount>(codes, heads, smaller(width, count - start), bit, sum + start);
  }
}

// sum = the values of a group in all payloads: of the first 8, 4, 2 or 1 in registers, then the others
// one after another.
template <class Format>
SHARDLAB_INLINE void sum_group(const uint8_t* const* payloads, int64_t count,
                               const Layout<Format>& at, int64_t first, float* __restrict sum) {
  int64_t p = count >= 8 ? 8 : count >= 4 ? 4 : count >= 2 ? 2 : 1;
  if (p == 8)
    add_group<Format, 8>(payloads, at, first, sum);
  else if (p == 4)
    add_group<Format, 4>(payloads, at, first, sum);
  else if (p == 2)
    add_group<Format, 2>(payloads, at, first, sum);
  else
    add_group<Format, 1>(payloads, at, first, sum);
  alignas(64) float one[kLargestGroup];
  for (; p < count; ++p) {
    add_group<Format, 1>(payloads + p, at, first, one);
    for (int64_t i = 0; i < at.size(first); ++i) sum[i] += one[i];
  }
}

// x[n] (+ residual[n]) -> payload; kept = given - decoded, or residual where that is not finite.
// Works on the elements from start to stop; residual and kept are both null or both there.
template <class Format>
SHARDLAB_INLINE void encode_groups(const float* x, const float* residual, float* kept, int64_t n,
                                   int64_t group, int64_t start, int64_t stop, uint32_t k0,
                                   uint32_t k1, uint8_t* payload) {
  const Layout<Format> at(n, group);
  alignas(64) float wanted[kLargestGroup];
  alignas(64) float decoded[kLargestGroup];
  typename Format::Head heads[kBlock / 8];
  for (int64_t block = start; block < stop; block += at.block()) {
    const int64_t end = smaller(block + at.block(), stop);
    const float* given = x + block;
    if (residual) {
      const float* before = residual + block;
      for (int64_t i = 0; i < end - block; ++i) wanted[i] = given[i] + before[i];
      given = wanted;
    }
    for (int64_t first = block, g = 0; first < end; first += group, ++g) {
      heads[g] = Format::head_of(given + (first - block), at.size(first));
      if (Format::kHeadBytes) Format::store(heads[g], payload + at.head(first));
    }
    prefetch(x + end, at.block());
    if (residual) prefetch(residual + end, at.block());
    for (int64_t first = block, g = 0; first < end; first += group, ++g) {
      const Random random{k0, k1, static_cast<uint32_t>(first)};
      uint8_t* codes = payload + at.codes(first);
      Format::encode(given + (first - block), at.size(first), heads[g], random, codes);
      if (residual) add_group<Format, 1>(&payload, at, first, decoded + (first - block));
    }
    if (residual) {
      const float* before = residual + block;
      float* after = kept + block;
      SHARDLAB_ELEMENTWISE
      for (int64_t i = 0; i < end - block; ++i) {
        const float rest = wanted[i] - decoded[i];
        after[i] = is_finite(bits_of(rest)) ? rest : before[i];
      }
    }
  }
}

// out = alpha * sum of the decoded payloads, in their order; added to out if `add`.
template <class Format>
SHARDLAB_INLINE void decode_groups(const uint8_t* const* payloads, int64_t count, int64_t n,
                                   int64_t group, int64_t start, int64_t stop, float alpha, int add,
                                   float* out) {
  const Layout<Format> at(n, group);
  alignas(64) float sum[kLargestGroup];
  for (int64_t block = start; block < stop; block += at.block()) {
    const int64_t end = smaller(block + at.block(), stop);
    for (int64_t first = block; first < end; first += group)
      sum_group<Format>(payloads, count, at, first, sum + (first - block));
    float* __restrict to = out + block;
    if (add)
      for (int64_t i = 0; i < end - block; ++i) to[i] += alpha * sum[i];
    else
      stream(sum, end - block, alpha, n, to);
  }
}

// The two kernels of a format, under the names that shardlab/kernels/grouped.py binds.
#define SHARDLAB_GROUPED(name, Format)                                                             \
  SHARDLAB_KERNEL void name##_encode(const float* x, const float* residual, float* kept,           \
                                     int64_t n, int64_t group, int64_t start, int64_t stop,        \
                                     uint32_t k0, uint32_t k1, uint8_t* payload) {                 \
    encode_groups<Format>(x, residual, kept, n, group, start, stop, k0, k1, payload);              \
  }                                                                                                \
  SHARDLAB_KERNEL void name##_decode(const uint8_t* const* payloads, int64_t count, int64_t n,     \
                                     int64_t group, int64_t start, int64_t stop, float alpha,      \
                                     int add, float* out) {                                        \
    decode_groups<Format>(payloads, count, n, group, start, stop, alpha, add, out);                \
  }
