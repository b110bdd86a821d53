// A step of Adam in one pass: shardlab/kernels/adam.py.
#include <cmath>

#include "gradients.h"
#include "plain_floats.h"
#include "random.h"
#include "workers.h"

// In the order in which Hyper.constants gives them.
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

struct Element {
  Floats p, m, v;
};

SHARDLAB_INLINE Floats fused(Floats a, Floats b, Floats c) {
#ifdef __FMA__
  return _mm256_fmadd_ps(a, b, c);
#else
  Floats sum;
  for (int i = 0; i < 8; ++i) sum[i] = std::fma(a[i], b[i], c[i]);
  return sum;
#endif
}

SHARDLAB_INLINE Floats root_of(Floats a) {
#ifdef __AVX2__
  return _mm256_sqrt_ps(a);
#else
  Floats root;
  for (int i = 0; i < 8; ++i) root[i] = std::sqrt(a[i]);
  return root;
#endif
}

SHARDLAB_INLINE Element updated(Element now, Floats g, const Constants& c) {
  const Floats zero{};
  Floats p = now.p * c.keep;
  if (c.decay != 0.0f) g = fused(c.decay + zero, p, g);
  const bool small = c.weight1 < 0.5f;
  const float weight = small ? c.weight1 : c.weight1 - 1.0f;
  const Floats m = fused(weight + zero, g - now.m, small ? now.m : g);
  const Floats v = fused(c.weight2 * g, g, now.v * c.beta2);
  return {p + c.rate * m / (root_of(v) / c.root + c.eps), m, v};
}

// Moments are not float16.
template <class Use>
SHARDLAB_INLINE void with_moments(int64_t kind, Use use) {
  return kind == 0 ? use(Single{}) : use(Bfloat{});
}

template <bool kAll>
SHARDLAB_INLINE void write_mirror(const Adam& adam, int64_t i, Floats p, int64_t count) {
  if (!adam.mirror) return;
  const Halves eight = adam.bfloat_mirror ? Bfloat::nearest(p) : Half::nearest(p);
  if (kAll)
    stream(adam.mirror + i, eight);
  else
    store<false>(adam.mirror + i, eight, count);
}

template <bool kAll, class P, class M, class V, class G>
SHARDLAB_INLINE void advance(const Adam& adam, int64_t i, int64_t count, Words chance) {
  auto* const p = static_cast<typename P::Word*>(adam.parameter) + i;
  auto* const m = static_cast<typename M::Word*>(adam.exp_avg) + i;
  auto* const v = static_cast<typename V::Word*>(adam.exp_avg_sq) + i;
  const Element now{load<kAll, P>(p, count), load<kAll, M>(m, count), load<kAll, V>(v, count)};
  const Element next = updated(now, adam.gradients.at<kAll, G>(i, count), adam.constants);
  store<kAll>(p, P::by_chance(next.p, chance >> 16), count);
  store<kAll>(m, M::nearest(next.m), count);
  store<kAll>(v, V::by_chance(next.v, chance), count);
  if constexpr (sizeof(*p) == sizeof(float)) write_mirror<kAll>(adam, i, next.p, count);
}

// Elements start to stop, whose numbers have their upper 32 bits in common.
template <class P, class M, class V, class G>
void advance_range(const Adam& adam, int64_t start, int64_t stop) {
  const uint64_t element = adam.offset + static_cast<uint64_t>(start);
  const uint32_t k1 = adam.k1 ^ static_cast<uint32_t>(element >> 32);
  const Random random{adam.k0, k1, static_cast<uint32_t>(element - start)};
  const auto chance = [&](int64_t i) SHARDLAB_INLINE_LAMBDA {
    return RandomLanes({random.k0, random.k1, random.first + static_cast<uint32_t>(i)}).next();
  };
  // up to where the mirror can be streamed
  const auto place = reinterpret_cast<uintptr_t>(adam.mirror + start);
  const int64_t lead = adam.mirror ? static_cast<int64_t>(-place % 16 / 2) : 0;
  int64_t i = std::min(stop, start + lead);
  if (i > start) advance<false, P, M, V, G>(adam, start, i - start, chance(start));
  for (; i + 8 <= stop; i += 8) advance<true, P, M, V, G>(adam, i, 8, chance(i));
  if (i < stop) advance<false, P, M, V, G>(adam, i, stop - i, chance(i));
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

// The kinds are numbers as `with_kind` takes them, `key` the words k0 and k1.
SHARDLAB_KERNEL void adam(Workers* workers, void* parameter, int64_t parameter_kind, void* exp_avg,
                          int64_t exp_avg_kind, void* exp_avg_sq, int64_t exp_avg_sq_kind,
                          const void* const* gradients, int64_t gradient_kind, int64_t count,
                          uint16_t* mirror, int64_t mirror_kind, int64_t n,
                          const Constants* constants, uint64_t key, uint64_t offset) {
  const Adam job{parameter, exp_avg, exp_avg_sq, {gradients, count, constants->scale}, mirror,
                 mirror_kind == 1, *constants, static_cast<uint32_t>(key),
                 static_cast<uint32_t>(key >> 32), offset};
  with_kind(parameter_kind, [&](auto p) {
    with_kind(gradient_kind, [&](auto g) {
      with_moments(exp_avg_kind, [&](auto m) {
        with_moments(exp_avg_sq_kind, [&](auto v) {
          for_ranges(workers, n, 64, [&](int64_t start, int64_t stop) {
            advance_all<decltype(p), decltype(m), decltype(v), decltype(g)>(job, start, stop);
          });
        });
      });
    });
  });
}
