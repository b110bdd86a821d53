// Sums of sparse vectors: shardlab/codecs/selection.py.
#include <cstring>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include "workers.h"

static constexpr int64_t kTile = 1 << 12;      // elements that stay in the first-level cache
static constexpr int64_t kUncached = 1 << 20;  // elements that no cache would keep

// The first of the ascending positions that is not below `start`.
SHARDLAB_INLINE int64_t first_from(const int32_t* places, int64_t count, int64_t start) {
  int64_t low = 0;
  while (low < count) {
    const int64_t middle = (low + count) / 2;
    if (places[middle] < start)
      low = middle + 1;
    else
      count = middle;
  }
  return low;
}

// out = alpha * sum. Non-temporal where caches would not keep it: a normal store reads memory first.
SHARDLAB_INLINE void store_tile(const float* sum, int64_t size, float alpha, bool uncached,
                                float* out) {
  int64_t i = 0;
#ifdef __SSE__
  if (uncached && reinterpret_cast<uintptr_t>(out) % 16 == 0) {
    const __m128 factor = _mm_set1_ps(alpha);
    for (; i + 4 <= size; i += 4) _mm_stream_ps(out + i, _mm_mul_ps(_mm_load_ps(sum + i), factor));
  }
#else
  (void)uncached;
#endif
  for (; i < size; ++i) out[i] = alpha * sum[i];
}

// out = alpha * sum over payloads of values at positions, in their order.
SHARDLAB_KERNEL void scatter_sum(Workers* workers, const float* const* values,
                                 const int32_t* const* places, const int64_t* counts,
                                 int64_t payloads, int64_t n, float alpha, float* out) {
  for_ranges(workers, n, kTile, [=](int64_t start, int64_t stop) {
    alignas(64) float sum[kTile];
    std::vector<int64_t> next(static_cast<size_t>(payloads));
    for (int64_t p = 0; p < payloads; ++p) next[p] = first_from(places[p], counts[p], start);
    for (int64_t first = start; first < stop; first += kTile) {
      const int64_t size = std::min(kTile, stop - first);
      std::memset(sum, 0, sizeof sum);
      for (int64_t p = 0; p < payloads; ++p) {
        const int32_t* place = places[p];
        const float* value = values[p];
        int64_t j = next[p];
        for (; j < counts[p] && place[j] < first + size; ++j) sum[place[j] - first] += value[j];
        next[p] = j;
      }
      store_tile(sum, size, alpha, n >= kUncached, out + first);
    }
#ifdef __SSE__
    _mm_sfence();
#endif
  });
}

// out[places] += alpha * values.
SHARDLAB_KERNEL void scatter_add(Workers* workers, const float* values, const int32_t* places,
                                 int64_t count, int64_t n, float alpha, float* out) {
  for_ranges(workers, n, kTile, [=](int64_t start, int64_t stop) {
    for (int64_t j = first_from(places, count, start); j < count && places[j] < stop; ++j)
      out[places[j]] += alpha * values[j];
  });
}
