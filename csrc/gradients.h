// The gradient in Adam: the sum of some vectors of one kind, in their order, times a number.
#pragma once

#include "halves.h"

// Prefetch, since hardware stops at the end of a page, and prefetches few streams.
SHARDLAB_INLINE void fetch_ahead(const void* from) {
  __builtin_prefetch(static_cast<const char*>(from) + 2048);
}

struct Gradients {
  const void* const* vectors;
  int64_t count;
  float scale;

  // Elements from i on, by `load`.
  template <bool kAll, class Kind>
  SHARDLAB_INLINE_MEMBER typename Kind::V::Floats at(int64_t i, int64_t number,
                                                     int64_t first = 0) const {
    using Word = const typename Kind::Word;
    Word* const begin = static_cast<Word*>(vectors[0]) + i;
    if (kAll) fetch_ahead(begin);
    auto sum = load<kAll, Kind>(begin, number, first);
    for (int64_t k = 1; k < count; ++k) {
      Word* const from = static_cast<Word*>(vectors[k]) + i;
      if (kAll) fetch_ahead(from);
      sum += load<kAll, Kind>(from, number, first);
    }
    return sum * scale;
  }
};

// use(kind) for the kind of float that has this number in shardlab/codecs/kernels/adam.py.
template <int kLanes, class Use>
SHARDLAB_INLINE void with_kind(int64_t number, Use use) {
  if (number == 0) return use(Single<kLanes>{});
  if (number == 1) return use(Bfloat<kLanes>{});
  return use(Half<kLanes>{});
}
