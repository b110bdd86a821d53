// A step of Adam in one pass: shardlab/kernels/adam.py.
#include <cmath>

#include "halves.h"
#include "workers.h"

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

// use(kind) for the kind of float that has this number in shardlab/kernels/adam.py.
template <int kLanes, class Use>
SHARDLAB_INLINE void with_kind(int64_t number, Use use) {
  if (number == 0) return use(Single<kLanes>{});
  if (number == 1) return use(Bfloat<kLanes>{});
  return use(Half<kLanes>{});
}

// In the order of Hyper.constants.
struct Constants {
  float scale, keep, decay, weight1, beta2, weight2, root, eps, rate;
};

struct Adam {
  void *parameter, *exp_avg, *exp_avg_sq;
  Gradients gradients;
  uint16_t* mirror;  // null: none
  bool bfloat_mirror;
  Constants constants;
  uint32_t k0, k1;
  uint64_t offset;
};

// As many elements as a register holds: divisions, not memory, limit the kernel.
using Lanes = Vectors<kWidest>::Floats;
using LaneWords = Vectors<kWidest>::Words;

SHARDLAB_INLINE Lanes fused(Lanes a, Lanes b, Lanes c) {
#if defined(__AVX512DQ__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  Lanes sum;
  for (int i = 0; i < kWidest; ++i) sum[i] = std::fma(a[i], b[i], c[i]);
  return sum;
#endif
}

SHARDLAB_INLINE Lanes root_of(Lanes a) {
#if defined(__AVX512DQ__)
  return _mm512_maskz_sqrt_ps(0xFFFF, a);  // masked, since GCC 12 warns of the plain intrinsic
#elif defined(__AVX2__)
  return _mm256_sqrt_ps(a);
#else
  Lanes root;
  for (int i = 0; i < kWidest; ++i) root[i] = std::sqrt(a[i]);
  return root;
#endif
}

SHARDLAB_INLINE void update(Lanes& p, Lanes& m, Lanes& v, Lanes g, const Constants& c) {
  const Lanes zero{};
  const bool small = c.weight1 < 0.5f;
  const float weight = small ? c.weight1 : c.weight1 - 1.0f;
  p *= c.keep;
  if (c.decay != 0.0f) g = fused(c.decay - zero, p, g);
  m = fused(weight - zero, g - m, small ? m : g);
  v = fused(c.weight2 * g, g, v * c.beta2);
  p += c.rate * m / (root_of(v) / c.root + c.eps);
}

// Moments are not float16.
template <class Use>
SHARDLAB_INLINE void with_moments(int64_t number, Use use) {
  return number == 0 ? use(Single<kWidest>{}) : use(Bfloat<kWidest>{});
}

template <bool kAll>
SHARDLAB_INLINE void write_mirror(const Adam& adam, int64_t i, Lanes p, int64_t count) {
  if (!adam.mirror) return;
  const auto words = adam.bfloat_mirror ? Bfloat<kWidest>::nearest(p) : Half<kWidest>::nearest(p);
  if (kAll)
    stream(adam.mirror + i, words);
  else
    store<false>(adam.mirror + i, words, count);
}

// The random bits of the elements from number `first` on.
SHARDLAB_INLINE LaneWords chance_of(uint32_t first, uint32_t k0, uint32_t k1) {
  LaneWords numbers;
  for (int i = 0; i < kWidest; ++i) numbers[i] = static_cast<uint32_t>(i);
  return mixed((numbers + first) * kWeyl + k0, k1);
}

// kWidest elements from i on or, if not kAll, `count` of them.
template <bool kAll, class P, class M, class V, class G>
SHARDLAB_INLINE void advance(const Adam& adam, int64_t i, int64_t count, uint32_t k1) {
  auto* const parameter = static_cast<typename P::Word*>(adam.parameter) + i;
  auto* const exp_avg = static_cast<typename M::Word*>(adam.exp_avg) + i;
  auto* const exp_avg_sq = static_cast<typename V::Word*>(adam.exp_avg_sq) + i;
  if (kAll) {
    fetch_ahead(parameter);
    fetch_ahead(exp_avg);
    fetch_ahead(exp_avg_sq);
  }
  Lanes p = load<kAll, P>(parameter, count);
  Lanes m = load<kAll, M>(exp_avg, count);
  Lanes v = load<kAll, V>(exp_avg_sq, count);
  update(p, m, v, adam.gradients.at<kAll, G>(i, count), adam.constants);
  const LaneWords chance =
      chance_of(static_cast<uint32_t>(adam.offset + static_cast<uint64_t>(i)), adam.k0, k1);
  store<kAll>(parameter, P::by_chance(p, chance >> 16), count);
  store<kAll>(exp_avg, M::nearest(m), count);
  store<kAll>(exp_avg_sq, V::by_chance(v, chance), count);
  if constexpr (sizeof(*parameter) == sizeof(float)) write_mirror<kAll>(adam, i, p, count);
}

// Elements start to stop, whose numbers have their upper 32 bits in common.
template <class P, class M, class V, class G>
void advance_range(const Adam& job, int64_t start, int64_t stop) {
  const Adam adam = job;  // a local copy stays in registers: no store can alias it
  const uint64_t upper = (adam.offset + static_cast<uint64_t>(start)) >> 32;
  const uint32_t k1 = adam.k1 ^ static_cast<uint32_t>(upper);
  // up to where the mirror can be streamed
  const auto place = reinterpret_cast<uintptr_t>(adam.mirror + start);
  const int64_t lead = adam.mirror ? static_cast<int64_t>(-place % (2 * kWidest) / 2) : 0;
  int64_t i = std::min(stop, start + lead);
  if (i > start) advance<false, P, M, V, G>(adam, start, i - start, k1);
  for (; i + kWidest <= stop; i += kWidest) advance<true, P, M, V, G>(adam, i, kWidest, k1);
  if (i < stop) advance<false, P, M, V, G>(adam, i, stop - i, k1);
}

template <class P, class M, class V, class G>
void advance_all(const Adam& adam, int64_t start, int64_t stop) {
  const PlainFloats plain;
  while (start < stop) {
    const uint64_t element = adam.offset + static_cast<uint64_t>(start);
    const int64_t left = (int64_t{1} << 32) - static_cast<int64_t>(element & 0xFFFFFFFFu);
    const int64_t until = std::min(stop, start + left);
    advance_range<P, M, V, G>(adam, start, until);
    start = until;
  }
  if (adam.mirror) end_streams();
}

// Numbers of the types, as `with_kind` takes them.
struct Kinds {
  int64_t parameter, exp_avg, exp_avg_sq, gradients, mirror;
};

SHARDLAB_KERNEL void adam(Workers* workers, void* parameter, void* exp_avg, void* exp_avg_sq,
                          const void* const* gradients, int64_t count, uint16_t* mirror,
                          const Kinds* kinds, int64_t n, const Constants* constants, int64_t k0,
                          int64_t k1, int64_t offset) {
  const Adam job{parameter, exp_avg, exp_avg_sq, {gradients, count, constants->scale}, mirror,
                 kinds->mirror == 1, *constants, static_cast<uint32_t>(k0),
                 static_cast<uint32_t>(k1), static_cast<uint64_t>(offset)};
  with_kind<kWidest>(kinds->parameter, [&](auto p) {
    with_kind<kWidest>(kinds->gradients, [&](auto g) {
      with_moments(kinds->exp_avg, [&](auto m) {
        with_moments(kinds->exp_avg_sq, [&](auto v) {
          for_ranges(workers, n, 64, [&](int64_t start, int64_t stop) {
            advance_all<decltype(p), decltype(m), decltype(v), decltype(g)>(job, start, stop);
          });
        });
      });
    });
  });
}

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
