// Floats of 32 or 16 bits in memory, as float32 in registers. Words are in the order of the host.
#pragma once

#include "lanes.h"

// The nearest bfloat16 in the lower bits, ties to even; NaN stays NaN (its top payload bits kept, made
// quiet). Of one word or of lanes.
template <class Word>
SHARDLAB_INLINE Word nearest_bf16(Word bits) {
  const Word nearest = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16, quiet = (bits >> 16) | 0x0040u;
  return (bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet : nearest;
}

// The nearest float16 of a float32, ties to even; NaN as above. Magnitudes from 65520 on become infinity.
SHARDLAB_INLINE uint32_t nearest_fp16(uint32_t bits) {
  constexpr int32_t kLargest = 0x477FE000, kBeyond = 0x477FF000, kInfinity = 0x7F800000;
  using Float = Narrow<5, 10>;
  const int32_t magnitude = static_cast<int32_t>(bits & 0x7FFFFFFFu);
  const int32_t finite = magnitude < kLargest ? magnitude : kLargest;
  // the code of infinity follows that of 65504
  const uint32_t quiet = 0x200u | (bits >> Float::kShift & 0x3FFu);
  const uint32_t beyond = (magnitude >= kBeyond ? 1 : 0) + (magnitude > kInfinity ? quiet : 0);
  return (Float::rounded(static_cast<uint32_t>(finite)) + beyond) | (bits >> 16 & 0x8000u);
}

// Infinity and NaN have the largest exponent of float32 too, until the product.
SHARDLAB_INLINE Floats widened_fp16(Words words) {
  using Float = Narrow<5, 10>;
  const Words magnitudes = (words & 0x7FFFu) << Float::kShift;
  const Floats values = Float::scaled<112>(magnitudes) * 0x1p-112f;
  return floats_of(reinterpret_cast<Words>(values) | (words & 0x8000u) << 16);
}

// kLanes numbers: 8 or, with AVX-512, 16.
template <int kLanes>
struct Vectors {
  typedef float Floats __attribute__((vector_size(4 * kLanes)));
  typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
  typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
  typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
};

#ifdef __AVX512DQ__
static constexpr int kWidest = 16;
#else
static constexpr int kWidest = 8;
#endif

// Reading, rounding to the nearest, and stochastic rounding: uniform random bits, of which
// `by_chance` takes as many as it needs from the lowest up.
template <int kLanes>
struct Single {
  using V = Vectors<kLanes>;
  using Word = float;
  using Stored = typename V::Floats;
  SHARDLAB_INLINE_MEMBER static typename V::Floats floats(Stored stored) { return stored; }
  SHARDLAB_INLINE_MEMBER static Stored nearest(typename V::Floats floats) { return floats; }
  SHARDLAB_INLINE_MEMBER static Stored by_chance(typename V::Floats floats, typename V::Words) {
    return floats;
  }
};

template <int kLanes>
struct Bfloat {
  using V = Vectors<kLanes>;
  using Floats = typename V::Floats;
  using Words = typename V::Words;
  using Word = uint16_t;
  using Stored = typename V::Halves;
  SHARDLAB_INLINE_MEMBER static Floats floats(Stored stored) {
    return reinterpret_cast<Floats>(__builtin_convertvector(stored, Words) << 16);
  }
  SHARDLAB_INLINE_MEMBER static Stored nearest(Floats floats) {
    return __builtin_convertvector(nearest_bf16(reinterpret_cast<Words>(floats)), Stored);
  }
  // Exact: 16 random bits decide over the 16 that are lost.
  SHARDLAB_INLINE_MEMBER static Stored by_chance(Floats floats, Words chance) {
    const Words bits = reinterpret_cast<Words>(floats);
    const Words rounded = (bits + (chance & 0xFFFFu)) >> 16;
    const Words words = (bits & 0x7FFFFFFFu) >= 0x7F800000u ? nearest_bf16(bits) : rounded;
    return __builtin_convertvector(words, Stored);
  }
};

template <int kLanes>
struct Half {
  using V = Vectors<kLanes>;
  using Floats = typename V::Floats;
  using Ints = typename V::Ints;
  using Words = typename V::Words;
  using Word = uint16_t;
  using Stored = typename V::Halves;
  SHARDLAB_INLINE_MEMBER static Floats floats(Stored stored) {
#ifdef __AVX512DQ__
    if constexpr (kLanes == 16) return _mm512_maskz_cvtph_ps(0xFFFF, reinterpret_cast<__m256i>(stored));
#endif
#ifdef __F16C__
    if constexpr (kLanes == 8) return _mm256_cvtph_ps(reinterpret_cast<__m128i>(stored));
#else
    return widened_fp16(__builtin_convertvector(stored, Words));
#endif
  }
  SHARDLAB_INLINE_MEMBER static Stored nearest(Floats floats) {
#ifdef __AVX512DQ__
    if constexpr (kLanes == 16)
      return reinterpret_cast<Stored>(_mm512_maskz_cvtps_ph(0xFFFF, floats, _MM_FROUND_TO_NEAREST_INT));
#endif
#ifdef __F16C__
    if constexpr (kLanes == 8)
      return reinterpret_cast<Stored>(_mm256_cvtps_ph(floats, _MM_FROUND_TO_NEAREST_INT));
#else
    Stored stored;
    for (int i = 0; i < kLanes; ++i)
      stored[i] = static_cast<uint16_t>(nearest_fp16(bits_of(floats[i])));
    return stored;
#endif
  }
  // In steps of float16, subnormal ones included, with 13 bits after the point: exact for normal ones.
  SHARDLAB_INLINE_MEMBER static Stored by_chance(Floats floats, Words chance) {
    const Words bits = reinterpret_cast<Words>(floats), sign = bits & 0x80000000u;
    const Words magnitude = bits ^ sign, exponent = bits & 0x7F800000u;
    const Words least = Words{} + (113u << 23), step = (exponent > least ? exponent : least) - (10u << 23);
    const Floats steps = reinterpret_cast<Floats>(magnitude) * reinterpret_cast<Floats>((254u << 23) - step);
    const Ints thirteen = reinterpret_cast<Ints>(chance & 0x1FFFu);
    const Floats raised = steps + __builtin_convertvector(thirteen, Floats) * 0x1p-13f;
    const Floats whole = __builtin_convertvector(__builtin_convertvector(raised, Ints), Floats);
    const Words finite = reinterpret_cast<Words>(whole * reinterpret_cast<Floats>(step));
    const Words rounded = magnitude >= 0x7F800000u ? magnitude : finite;
    return nearest(reinterpret_cast<Floats>(rounded | sign));
  }
};

// All numbers of a vector or (not kAll) `count` of them from the `first` on: the others are zero, and
// not written.
template <bool kAll, class Kind>
SHARDLAB_INLINE typename Kind::V::Floats load(const typename Kind::Word* from, int64_t count,
                                              int64_t first = 0) {
  typename Kind::Stored stored{};
  if constexpr (kAll) {
    std::memcpy(&stored, from, sizeof stored);
  } else {
    typename Kind::Word words[sizeof stored / sizeof *from] = {};
    std::memcpy(words + first, from, static_cast<size_t>(count) * sizeof *words);
    std::memcpy(&stored, words, sizeof stored);
  }
  return Kind::floats(stored);
}

template <bool kAll, class Word, class Stored>
SHARDLAB_INLINE void store(Word* to, Stored stored, int64_t count) {
  std::memcpy(to, &stored, kAll ? sizeof stored : static_cast<size_t>(count) * sizeof *to);
}

// All numbers past the caches, without reading what was there, where `to` is a multiple of their size.
template <class Stored>
SHARDLAB_INLINE void stream(uint16_t* to, Stored stored) {
#ifdef __AVX2__
  if (reinterpret_cast<uintptr_t>(to) % sizeof stored == 0) {
    if constexpr (sizeof stored == 32)
      return _mm256_stream_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(stored));
    else
      return _mm_stream_si128(reinterpret_cast<__m128i*>(to), reinterpret_cast<__m128i>(stored));
  }
#endif
  store<true>(to, stored, 0);
}

// Lets streamed stores be seen before whatever the caller writes next.
SHARDLAB_INLINE void end_streams() {
#ifdef __AVX2__
  _mm_sfence();
#endif
}
