// The memory that a step of Adam in float32 touches, with almost no arithmetic: the upper bound
// of its speed in benchmarks/adam.py.
#include "workers.h"

SHARDLAB_KERNEL void adam_traffic(Workers* workers, float* parameter, float* exp_avg,
                                  float* exp_avg_sq, const float* gradient, int64_t n) {
  for_ranges(workers, n, 64, [&](int64_t start, int64_t stop) {
    SHARDLAB_ELEMENTWISE
    for (int64_t i = start; i < stop; ++i) {
      const float g = gradient[i];
      parameter[i] += 0.5f * g;
      exp_avg[i] += 0.25f * g;
      exp_avg_sq[i] += 0.125f * g;
    }
  });
}
