// Sums of a group over several payloads: 64 elements at a time, held in registers.
#pragma once

#include <utility>

#include "lanes.h"

static constexpr int64_t kLargestGroup = 4096;
static constexpr int64_t kFarAway = 1 << 20;  // elements; as many do not stay in a cache
static constexpr int64_t kAhead = 512;  // bytes; hardware prefetches a few streams, not eight

SHARDLAB_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

template <int64_t kBits>
SHARDLAB_INLINE int64_t code_bytes(int64_t count) {
  return (count * kBits + 7) / 8;
}

// Addresses of the parts of a payload, by the number of a group.
template <class Format>
struct Layout {
  int64_t n, group, border;
  SHARDLAB_INLINE_MEMBER Layout(int64_t n, int64_t group)
      : n(n), group(group), border(Format::kHeadBytes * ((n + group - 1) / group)) {}
  SHARDLAB_INLINE_MEMBER int64_t size(int64_t g) const { return smaller(group, n - g * group); }
  SHARDLAB_INLINE_MEMBER int64_t head(int64_t g) const { return g * Format::kHeadBytes; }
  SHARDLAB_INLINE_MEMBER int64_t codes(int64_t g) const {
    return border + g * (group * Format::kBits / 8);
  }
};

// Destination of sums: out = alpha * sum, or out += alpha * sum.
struct Output {
  float* out;
  float alpha;
  bool add, far;

  // vectors[0] to vectors[kCount - 1], of which the first `size` elements are wanted
  template <int kCount>
  SHARDLAB_INLINE_MEMBER void put(int64_t first, const Floats* vectors, int64_t size) const {
    float* to = out + first;
    if (size < 8 * kCount) {
      float some[8 * kCount];
      for (int i = 0; i < kCount; ++i) store_floats(some + 8 * i, vectors[i] * alpha);
      for (int64_t i = 0; i < size; ++i) to[i] = add ? to[i] + some[i] : some[i];
    } else if (add) {
      for (int i = 0; i < kCount; ++i)
        store_floats(to + 8 * i, load_floats(to + 8 * i) + vectors[i] * alpha);
    } else if (far && reinterpret_cast<uintptr_t>(to) % 32 == 0) {
      for (int i = 0; i < kCount; ++i) stream_floats(to + 8 * i, vectors[i] * alpha);
    } else {
      for (int i = 0; i < kCount; ++i) store_floats(to + 8 * i, vectors[i] * alpha);
    }
  }
};

// Whether a format has `taken<kVector>(tile)`, which returns codes 8 kVector to 8 kVector + 7 of a tile
// in a special form for `value`. The compiler shares common work of several vectors.
template <class Format>
constexpr auto takes_codes(int) -> decltype(Format::template taken<0>(nullptr), true) {
  return true;
}
template <class Format>
constexpr bool takes_codes(...) {
  return false;
}

// Codes 8 kVector to 8 kVector + 7 of a tile: plane by plane, in each the codes of neighbours.
template <class Format, int kVector>
SHARDLAB_INLINE auto codes_of(const uint8_t* tile) {
  constexpr int kBits = Format::kBits;
  if constexpr (takes_codes<Format>(0)) {
    return Format::template taken<kVector>(tile);
  } else if constexpr (kBits == 16) {
    return unsigned_pairs(tile + 16 * kVector);
  } else if constexpr (kBits == 8) {
    return Format::kSigned ? signed_bytes(tile + 8 * kVector) : unsigned_bytes(tile + 8 * kVector);
  } else {
    const Words bytes = words_of(unsigned_bytes(tile + kVector % kBits * 8));
    constexpr int kFrom = kVector / kBits * kBits;
    if (kFrom + kBits == 8) return reinterpret_cast<Ints>(bytes >> kFrom);
    return reinterpret_cast<Ints>((bytes >> kFrom) & ((1u << kBits) - 1));
  }
}

template <class Format, size_t... kVectors>
SHARDLAB_INLINE void begin_tile(const uint8_t* head, const uint8_t* tile, Floats* sums,
                                std::index_sequence<kVectors...>) {
  const typename Format::Head of = Format::load(head);
  ((sums[kVectors] = begin_sum(Format::value(codes_of<Format, kVectors>(tile), of))), ...);
}

template <class Format, size_t... kVectors>
SHARDLAB_INLINE void add_tile(const uint8_t* head, const uint8_t* tile, Floats* sums,
                              std::index_sequence<kVectors...>) {
  const typename Format::Head of = Format::load(head);
  ((sums[kVectors] = add_to(sums[kVectors], Format::value(codes_of<Format, kVectors>(tile), of))),
   ...);
}

// output = sum over payloads of the tile whose codes are the `bytes` bytes from `tile` on.
template <class Format, bool kFull>
SHARDLAB_INLINE void decode_tile(const uint8_t* const* payloads, int64_t count,
                                 const Layout<Format>& at, int64_t g, int64_t tile, int64_t width,
                                 const Output& output) {
  constexpr int kBits = Format::kBits, kBytes = 8 * kBits;
  constexpr auto kAll = std::make_index_sequence<8>();
  const int64_t head = at.head(g), codes = at.codes(g) + tile;
  const int64_t first = g * at.group, size = at.size(g);
  Floats sums[8];
  if constexpr (kFull) {
    begin_tile<Format>(payloads[0] + head, payloads[0] + codes, sums, kAll);
    for (int64_t p = 1; p < count; ++p) {
      __builtin_prefetch(payloads[p] + codes + kAhead);
      add_tile<Format>(payloads[p] + head, payloads[p] + codes, sums, kAll);
    }
  } else {
    uint8_t padded[kBytes] = {};
    const size_t bytes = static_cast<size_t>(width - tile);
    std::memcpy(padded, payloads[0] + codes, bytes);
    begin_tile<Format>(payloads[0] + head, padded, sums, kAll);
    for (int64_t p = 1; p < count; ++p) {
      std::memcpy(padded, payloads[p] + codes, bytes);
      add_tile<Format>(payloads[p] + head, padded, sums, kAll);
    }
  }
  if constexpr (kBits >= 8) {
    const int64_t begin = tile * 8 / kBits;
    output.put<8>(first + begin, sums, size - begin);
  } else {
#pragma GCC unroll 8  // or `sums` would leave the registers
    for (int plane = 0; plane < 8 / kBits; ++plane) {
      const int64_t begin = plane * width + tile;
      output.put<kBits>(first + begin, sums + kBits * plane, smaller(width - tile, size - begin));
    }
  }
}

// output = sum over payloads of group g.
template <class Format>
SHARDLAB_INLINE void decode_group(const uint8_t* const* payloads, int64_t count,
                                  const Layout<Format>& at, int64_t g, const Output& output) {
  const int64_t width = code_bytes<Format::kBits>(at.size(g));
  int64_t tile = 0;
  for (; tile + 8 * Format::kBits <= width; tile += 8 * Format::kBits)
    decode_tile<Format, true>(payloads, count, at, g, tile, width, output);
  if (tile < width) decode_tile<Format, false>(payloads, count, at, g, tile, width, output);
}
