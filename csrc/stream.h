// Memory far away: fetched before it is needed, written without being read.
#pragma once

#include "kernels.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

static constexpr int64_t kFarAway = 1 << 20;  // elements; as many do not stay in a cache

SHARDLAB_INLINE void prefetch(const float* from, int64_t count) {
  for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(from + i);
}

// to = alpha * from; past the caches if the whole vector has too many elements for them.
SHARDLAB_INLINE void stream(const float* from, int64_t count, float alpha, int64_t whole,
                            float* __restrict to) {
  int64_t i = 0;
#ifdef __SSE2__
  if (whole >= kFarAway && reinterpret_cast<uintptr_t>(to) % 16 == 0)
    for (; i + 4 <= count; i += 4)
      _mm_stream_ps(to + i, _mm_mul_ps(_mm_loadu_ps(from + i), _mm_set1_ps(alpha)));
#endif
  for (; i < count; ++i) to[i] = alpha * from[i];
}
