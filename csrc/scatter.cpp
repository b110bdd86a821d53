// Sums of sparse vectors: shardlab/kernels/scatter.py.
#include <cstring>

#include "kernels.h"

static constexpr int64_t kTile = 1 << 12;  // elements that stay in the first-level cache

// The first of the ascending places that is not below `start`.
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

// out = alpha * sum over payloads of values at places, in their order, for the elements from start to
// stop; with `add`, out += alpha * values one after the other. `next` is memory for a number per payload.
SHARDLAB_KERNEL void scatter_sum(const float* const* values, const int32_t* const* places,
                                     const int64_t* counts, int64_t payloads, int64_t start,
                                     int64_t stop, float alpha, int add, int64_t* next,
                                     float* out) {
  for (int64_t p = 0; p < payloads; ++p) next[p] = first_from(places[p], counts[p], start);
  for (int64_t first = start; first < stop; first += kTile) {
    const int64_t end = stop - first < kTile ? stop : first + kTile;
    if (!add) std::memset(out + first, 0, sizeof(float) * static_cast<size_t>(end - first));
    for (int64_t p = 0; p < payloads; ++p) {
      const int32_t* place = places[p];
      const int64_t count = counts[p];
      int64_t j = next[p];
      if (add)
        for (; j < count && place[j] < end; ++j) out[place[j]] += alpha * values[p][j];
      else
        for (; j < count && place[j] < end; ++j) out[place[j]] += values[p][j];
      next[p] = j;
    }
    if (!add && alpha != 1.0f)
      for (int64_t i = first; i < end; ++i) out[i] *= alpha;
  }
}
