// Random positions that all ranks share: shardlab/codecs/kernels/random.py defines them.
#include "random.h"

// For j from start to stop, places[j] = shift + a random element of the j-th of k parts of [0, n), modulo n.
SHARDLAB_KERNEL void randomk_places(int64_t n, int64_t k, uint32_t k0, uint32_t k1,
                                    int64_t start, int64_t stop, int32_t* places) {
  const uint64_t last = random_bits(static_cast<uint32_t>(k), k0, k1);
  const int64_t turn = static_cast<int64_t>(last * static_cast<uint64_t>(n) >> 32);
  // floor(j n / k) from one j to the next without a division
  int64_t next = start * n / k, over = start * n % k;
  for (int64_t j = start; j < stop; ++j) {
    const int64_t first = next;
    next += n / k;
    over += n % k;
    next += over >= k;
    over -= over >= k ? k : 0;
    const int64_t size = next - first;
    const uint64_t chance = random_bits(static_cast<uint32_t>(j), k0, k1);
    const int64_t place =
        turn + first + static_cast<int64_t>(chance * static_cast<uint64_t>(size) >> 32);
    places[j] = static_cast<int32_t>(place < n ? place : place - n);
  }
}
