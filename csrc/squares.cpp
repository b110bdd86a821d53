// Squared norms: sum_of_squares in shardlab/codecs/kernels/adam.py.
#include "gradients.h"
#include "plain_floats.h"
#include "workers.h"

using Doubles [[gnu::vector_size(64)]] = double;

static constexpr int64_t kSquares = 1 << 14;  // elements of a block

SHARDLAB_INLINE Doubles squared(Floats floats) {
  const Doubles exact = __builtin_convertvector(floats, Doubles);
  return exact * exact;
}

// Of the elements start to stop, the first of which has `place` in its block of 16 lanes.
template <class Kind>
double sum_of_block(const Gradients& gradients, int64_t start, int64_t stop, int64_t place) {
  Doubles lanes[2] = {};
  int64_t i = start;
  const int64_t lead = std::min(stop - start, -place & 7);
  if (lead) {
    lanes[place >> 3 & 1] += squared(gradients.at<false, Kind>(i, lead, place & 7));
    i += lead;
    place += lead;
  }
  if (place & 8 && i + 8 <= stop) {
    lanes[1] += squared(gradients.at<true, Kind>(i, 8));
    i += 8;
    place += 8;
  }
  for (; i + 16 <= stop; i += 16) {
    lanes[0] += squared(gradients.at<true, Kind>(i, 8));
    lanes[1] += squared(gradients.at<true, Kind>(i + 8, 8));
  }
  for (; i < stop; i += 8, place += 8) {
    const int64_t rest = std::min<int64_t>(8, stop - i);
    lanes[place >> 3 & 1] += squared(gradients.at<false, Kind>(i, rest));
  }
  Doubles sum = lanes[0] + lanes[1];
  for (int width = 4; width; width /= 2)
    for (int i = 0; i < width; ++i) sum[i] += sum[i + width];
  return sum[0];
}

// sums[b] of the elements of block b, in which the first of all is number `offset`.
SHARDLAB_KERNEL void sum_of_squares(Workers* workers, const void* const* vectors, int64_t kind,
                                    int64_t count, int64_t n, float scale, int64_t offset,
                                    double* sums) {
  const Gradients gradients{vectors, count, scale};
  const int64_t blocks = (offset + n + kSquares - 1) / kSquares;
  with_kind<8>(kind, [&](auto floats) {
    for_ranges(workers, blocks * kSquares, kSquares, [&](int64_t from, int64_t to) {
      const PlainFloats plain;
      for (int64_t place = from; place < to; place += kSquares) {
        const int64_t start = std::max<int64_t>(0, place - offset);
        const int64_t stop = std::min(n, place - offset + kSquares);
        sums[place / kSquares] =
            sum_of_block<decltype(floats)>(gradients, start, stop, (start + offset) % kSquares);
      }
    });
  });
}
