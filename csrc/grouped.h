// Codecs that cut a vector into groups. A payload holds a head for every group (its scales), then the
// codes of all groups, kBits for each element: shardlab/codecs/grouped.py.
//
// A format maps one group to a head and codes; everything else is here. A format is a struct with
//
//   kHeadBytes, kBits        sizes; groups are multiples of 8 elements, so codes start at whole bytes
//   Head                     the decoded head, in registers
//   head_of(given, count)    from the elements of a group
//   store(head, to), load(from)
//   encode(given, count, head, random, codes)   writes ceil(count * kBits / 8) bytes
//   value(codes, head)       values of eight codes: Floats, or a Product that is exact
//   kSigned                  for codes of 8 bits: whether `value` gets them sign-extended
//
// Widths below 8 bits are packed in planes: with m = ceil(count * kBits / 8) bytes of a group, byte j
// holds elements j, j + m, j + 2 m, ... from its lowest bits up, which needs no shuffles.
#pragma once

#include "decoding.h"
#include "workers.h"

static constexpr int64_t kBlock = 512;  // elements; a larger group is one block

// The random numbers of a group, whose first element is element `first` of the message.
struct Random {
  uint32_t k0, k1, first;
};

// The same, for eight elements at a time.
struct RandomLanes {
  Words x;
  uint32_t k1;
  SHARDLAB_INLINE_MEMBER explicit RandomLanes(const Random& of)
      : x((Words{0, 1, 2, 3, 4, 5, 6, 7} + of.first) * kWeyl + of.k0), k1(of.k1) {}
  SHARDLAB_INLINE_MEMBER Words next() {
    const Words now = x;
    x += 8 * kWeyl;
    return mixed(now, k1);
  }
};

// One byte from each of `count` floats: `code(floats)` gives eight of -128 to 127.
template <class Code>
SHARDLAB_INLINE void write_bytes(const float* given, int64_t count, uint8_t* to, Code code) {
  Ints codes[4];
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    for (int k = 0; k < 4; ++k) codes[k] = code(load_floats(given + i + 8 * k));
    store_bytes(to + i, codes);
  }
  if (i == count) return;
  const size_t rest = static_cast<size_t>(count - i);
  float some[32] = {};
  uint8_t bytes[32];
  std::memcpy(some, given + i, rest * sizeof(float));
  for (int k = 0; k < 4; ++k) codes[k] = code(load_floats(some + 8 * k));
  store_bytes(bytes, codes);
  std::memcpy(to + i, bytes, rest);
}

// The codes of a group, of at most 8 bits: `fill(to)` writes a byte for each. Their lower bits are
// packed, with the bits of kFlip inverted in every code.
template <int64_t kBits, int64_t kFlip, class Fill>
SHARDLAB_INLINE void write_codes(int64_t count, uint8_t* __restrict codes, Fill fill) {
  if constexpr (kBits == 8) {
    fill(codes);
  } else {
    constexpr int kPlanes = 8 / kBits;
    constexpr uint8_t kMask = (1u << kBits) - 1, kFlips = kFlip * (255 / kMask);
    const int64_t width = code_bytes<kBits>(count);
    uint8_t bytes[kLargestGroup + 8];
    fill(bytes);
    for (int64_t i = count; i < width * kPlanes; ++i) bytes[i] = kFlip;
    for (int64_t j = 0; j < width; ++j) {
      uint8_t packed = bytes[j] & kMask;
      for (int64_t plane = 1; plane < kPlanes; ++plane)
        packed |= static_cast<uint8_t>((bytes[plane * width + j] & kMask) << (plane * kBits));
      codes[j] = packed ^ kFlips;
    }
  }
}

// For codes that take more than a few steps: codes[i] = the last 8 kBytes bits of code(i). Written as words first: otherwise compilers narrow each
// step of the arithmetic instead of its result.
template <int kBytes, class Code>
SHARDLAB_INLINE void store_codes(int64_t count, uint8_t* __restrict codes, Code code) {
  constexpr int64_t kSome = 256;
  alignas(64) uint32_t words[kSome];
  for (int64_t from = 0; from < count; from += kSome) {
    const int64_t size = count - from < kSome ? count - from : kSome;
    uint8_t* to = codes + kBytes * from;
    for (int64_t i = 0; i < size; ++i) words[i] = code(from + i);
    for (int64_t i = 0; i < size; ++i) {
      if constexpr (kBytes == 2)
        store_word(to + 2 * i, static_cast<uint16_t>(words[i]));
      else
        to[i] = static_cast<uint8_t>(words[i]);
    }
  }
}

// x[n] (+ residual[n]) -> payload; kept = given - decoded, or residual where that is not finite.
// For the elements from start to stop; residual and kept are both null or neither is.
//
// A head waits for the last element of its group, so all heads of a block of groups come before its
// codes, so that the processor has other work. Blocks stay in the first-level cache: memory sees one
// pass.
template <class Format>
void encode_groups(const float* x, const float* residual, float* kept, int64_t n,
                                   int64_t group, int64_t start, int64_t stop, uint32_t k0,
                                   uint32_t k1, uint8_t* payload) {
  const Layout<Format> at(n, group);
  const int64_t groups = group < kBlock ? kBlock / group : 1, last = (stop + group - 1) / group;
  alignas(64) float wanted[kLargestGroup];
  alignas(64) float decoded[kLargestGroup];
  typename Format::Head heads[kBlock / 8];
  for (int64_t block = start / group; block < last; block += groups) {
    const int64_t after = smaller(block + groups, last), begin = block * group;
    const int64_t size = smaller(after * group, n) - begin;
    const float* given = x + begin;
    if (residual) {
      const float* before = residual + begin;
      for (int64_t i = 0; i < size; ++i) wanted[i] = given[i] + before[i];
      given = wanted;
    }
    for (int64_t g = block; g < after; ++g) {
      typename Format::Head& head = heads[g - block];
      head = Format::head_of(given + (g * group - begin), at.size(g));
      if (Format::kHeadBytes) Format::store(head, payload + at.head(g));
    }
    for (int64_t g = block; g < after; ++g) {
      const Random random{k0, k1, static_cast<uint32_t>(g * group)};
      Format::encode(given + (g * group - begin), at.size(g), heads[g - block], random,
                     payload + at.codes(g));
      if (residual)
        decode_group<Format>(&payload, 1, at, g, Output{decoded - begin, 1.0f, false, false});
    }
    if (residual) {
      const float* before = residual + begin;
      float* rests = kept + begin;
      SHARDLAB_ELEMENTWISE
      for (int64_t i = 0; i < size; ++i) {
        const float rest = wanted[i] - decoded[i];
        rests[i] = is_finite(bits_of(rest)) ? rest : before[i];
      }
    }
  }
}

// out = alpha * sum of the decoded payloads, in their order; added to out if `add`.
template <class Format>
void decode_groups(const uint8_t* const* payloads, int64_t count, int64_t n,
                                   int64_t group, int64_t start, int64_t stop, float alpha, int add,
                                   float* out) {
  const Layout<Format> at(n, group);
  const Output output{out, alpha, add != 0, n >= kFarAway};
  for (int64_t g = start / group; g * group < stop; ++g)
    decode_group<Format>(payloads, count, at, g, output);
}

// The two kernels of a format, under the names that shardlab/codecs/grouped.py binds; encode and decode
// are as encode_groups and decode_groups.
#define SHARDLAB_KERNELS(name, encode, decode)                                                     \
  SHARDLAB_KERNEL void name##_encode(Workers* workers, const float* x, const float* residual,      \
                                     float* kept, int64_t n, int64_t group, int64_t k0,            \
                                     int64_t k1, uint8_t* payload) {                               \
    for_ranges(workers, n, group, [=](int64_t start, int64_t stop) {                               \
      encode(x, residual, kept, n, group, start, stop, static_cast<uint32_t>(k0),                  \
             static_cast<uint32_t>(k1), payload);                                                  \
    });                                                                                            \
  }                                                                                                \
  SHARDLAB_KERNEL void name##_decode(Workers* workers, const uint8_t* const* payloads,             \
                                     int64_t count, int64_t n, int64_t group, float alpha,         \
                                     int add, float* out) {                                        \
    for_ranges(workers, n, group, [=](int64_t start, int64_t stop) {                               \
      decode(payloads, count, n, group, start, stop, alpha, add, out);                             \
    });                                                                                            \
  }
#define SHARDLAB_GROUPED(name, Format)                                                             \
  SHARDLAB_KERNELS(name, encode_groups<Format>, decode_groups<Format>)
