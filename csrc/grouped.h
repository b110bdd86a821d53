// Codecs that cut a vector into groups. A payload holds a head for every group (its scales), then the
// codes of all groups, kBits for each element.
//
// A format says how one group becomes a head and codes; everything else is here. Groups pass through
// buffers in the first-level cache, so that memory sees one pass. A format is a struct with
//
//   kHeadBytes, kBits        sizes; groups are multiples of 8 elements, so codes start at whole bytes
//   Head                     what the head says, in registers
//   head_of(given, count)    from the elements of a group
//   store(head, to), load(from)
//   encode(given, count, head, random, codes)   writes ceil(count * kBits / 8) bytes
//   decode(codes, count, head, values)
//
// Widths below 8 bits are packed in planes: with m = ceil(count * kBits / 8) bytes of a group, byte j
// holds elements j, j + m, j + 2 m, ... from its lowest bits up, which needs no shuffles.
#pragma once

#include "random.h"

static constexpr int64_t kLargestGroup = 4096;

// The random numbers of a group: element i of it is element `first + i` of the message.
struct Random {
  uint32_t k0, k1, first;
  SHARDLAB_INLINE_MEMBER float operator()(int64_t i) const {
    return uniform(first + static_cast<uint32_t>(i), k0, k1);
  }
};

SHARDLAB_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// x[n] (+ residual[n]) -> payload; kept = given - decoded, or residual where that is not finite.
// Works on the elements from start to stop; residual and kept are both null or both there.
template <class Format>
SHARDLAB_INLINE void encode_groups(const float* x, const float* residual, float* kept, int64_t n,
                                   int64_t group, int64_t start, int64_t stop, uint32_t k0,
                                   uint32_t k1, uint8_t* payload) {
  uint8_t* heads = payload;
  uint8_t* codes = payload + Format::kHeadBytes * ((n + group - 1) / group);
  alignas(64) float wanted[kLargestGroup];
  alignas(64) float decoded[kLargestGroup];
  for (int64_t first = start; first < stop; first += group) {
    const int64_t count = smaller(group, n - first), g = first / group;
    const float* given = x + first;
    if (residual) {
      const float* before = residual + first;
      for (int64_t i = 0; i < count; ++i) wanted[i] = given[i] + before[i];
      given = wanted;
    }
    const typename Format::Head head = Format::head_of(given, count);
    if (Format::kHeadBytes) Format::store(head, heads + Format::kHeadBytes * g);
    uint8_t* place = codes + first * Format::kBits / 8;
    Format::encode(given, count, head, Random{k0, k1, static_cast<uint32_t>(first)}, place);
    if (residual) {
      const float* before = residual + first;
      float* after = kept + first;
      Format::decode(place, count, head, decoded);
      SHARDLAB_ELEMENTWISE
      for (int64_t i = 0; i < count; ++i) {
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
  const int64_t border = Format::kHeadBytes * ((n + group - 1) / group);
  alignas(64) float sum[kLargestGroup];
  alignas(64) float decoded[kLargestGroup];
  for (int64_t first = start; first < stop; first += group) {
    const int64_t size = smaller(group, n - first), g = first / group;
    for (int64_t p = 0; p < count; ++p) {
      const typename Format::Head head = Format::load(payloads[p] + Format::kHeadBytes * g);
      const uint8_t* codes = payloads[p] + border + first * Format::kBits / 8;
      Format::decode(codes, size, head, p ? decoded : sum);
      if (p)
        for (int64_t i = 0; i < size; ++i) sum[i] += decoded[i];
    }
    float* __restrict to = out + first;
    if (add)
      for (int64_t i = 0; i < size; ++i) to[i] += alpha * sum[i];
    else
      for (int64_t i = 0; i < size; ++i) to[i] = alpha * sum[i];
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
