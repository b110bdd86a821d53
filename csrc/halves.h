// Eight floats of 32 or 16 bits in memory, as float32 in registers. Words are in the order of the host.
#pragma once

#include "narrow.h"

using Halves [[gnu::vector_size(16)]] = uint16_t;

// The nearest bfloat16 in the lower bits, ties to even; NaN stays NaN (its top payload bits kept, made
// quiet). Of one word or of lanes.
template <class Word>
SHARDLAB_INLINE Word nearest_bf16(Word bits) {
  const Word nearest = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16, quiet = (bits >> 16) | 0x0040u;
  return (bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet : nearest;
}

// The nearest float16 of a float32, ties to even; NaN as above. Magnitudes from `infinite` on become
// infinity, those below it 65504 at most.
SHARDLAB_INLINE uint32_t nearest_fp16(uint32_t bits, int32_t infinite) {
  constexpr int32_t kLargest = 0x477FE000, kInfinity = 0x7F800000;  // 65504, of float32
  using Float = Narrow<5, 10>;
  const int32_t magnitude = static_cast<int32_t>(bits & 0x7FFFFFFFu);
  const int32_t finite = magnitude < kLargest ? magnitude : kLargest;
  // the code of infinity follows that of 65504
  const uint32_t quiet = 0x200u | (bits >> Float::kShift & 0x3FFu);
  const uint32_t beyond = (magnitude >= infinite ? 1 : 0) + (magnitude > kInfinity ? quiet : 0);
  return (Float::rounded(static_cast<uint32_t>(finite)) + beyond) | (bits >> 16 & 0x8000u);
}

// Infinity and NaN have the largest exponent of float32 too, until the product.
SHARDLAB_INLINE Floats widened_fp16(Words words) {
  using Float = Narrow<5, 10>;
  const Words magnitudes = (words & 0x7FFFu) << Float::kShift;
  const Floats values = Float::scaled<112>(magnitudes) * 0x1p-112f;
  return floats_of(reinterpret_cast<Words>(values) | (words & 0x8000u) << 16);
}

// How eight numbers are read, rounded to the nearest, and rounded by chance: uniform random bits, of
// which `by_chance` takes as many as it needs from the lowest up.
struct Single {
  using Word = float;
  using Eight = Floats;
  SHARDLAB_INLINE_MEMBER static Floats floats(Eight eight) { return eight; }
  SHARDLAB_INLINE_MEMBER static Eight nearest(Floats floats) { return floats; }
  SHARDLAB_INLINE_MEMBER static Eight by_chance(Floats floats, Words) { return floats; }
};

struct Bfloat {
  using Word = uint16_t;
  using Eight = Halves;
  SHARDLAB_INLINE_MEMBER static Floats floats(Eight eight) {
    return floats_of(__builtin_convertvector(eight, Words) << 16);
  }
  SHARDLAB_INLINE_MEMBER static Eight nearest(Floats floats) {
    return __builtin_convertvector(nearest_bf16(reinterpret_cast<Words>(floats)), Halves);
  }
  // Exact: 16 random bits decide over the 16 that are lost.
  SHARDLAB_INLINE_MEMBER static Eight by_chance(Floats floats, Words chance) {
    const Words bits = reinterpret_cast<Words>(floats), magnitudes = bits & 0x7FFFFFFFu;
    const Words rounded = (bits + (chance & 0xFFFFu)) >> 16;
    const Words special = nearest_bf16(bits);
    return __builtin_convertvector(magnitudes >= 0x7F800000u ? special : rounded, Halves);
  }
};

struct Half {
  using Word = uint16_t;
  using Eight = Halves;
  SHARDLAB_INLINE_MEMBER static Floats floats(Eight eight) {
#ifdef __F16C__
    return _mm256_cvtph_ps(reinterpret_cast<__m128i>(eight));
#else
    return widened_fp16(__builtin_convertvector(eight, Words));
#endif
  }
  SHARDLAB_INLINE_MEMBER static Eight nearest(Floats floats) {
#ifdef __F16C__
    return reinterpret_cast<Eight>(_mm256_cvtps_ph(floats, _MM_FROUND_TO_NEAREST_INT));
#else
    Eight eight;
    for (int i = 0; i < 8; ++i)
      eight[i] = static_cast<uint16_t>(nearest_fp16(bits_of(floats[i]), 0x477FF000));  // 65520
    return eight;
#endif
  }
  // In steps of float16, subnormal ones included, with 13 bits after the point: exact for normal ones.
  SHARDLAB_INLINE_MEMBER static Eight by_chance(Floats floats, Words chance) {
    const Words bits = reinterpret_cast<Words>(floats), sign = bits & 0x80000000u;
    const Words magnitude = bits ^ sign;
    const Ints exponent = reinterpret_cast<Ints>(bits & 0x7F800000u), least = Ints{} + (113 << 23);
    const Words step = words_of(exponent > least ? exponent : least) - (10u << 23);
    const Floats steps = floats_of(magnitude) * floats_of((254u << 23) - step);
    const Floats random = converted(reinterpret_cast<Ints>(chance & 0x1FFFu)) * 0x1p-13f;
    const Floats down = converted(__builtin_convertvector(steps + random, Ints)) * floats_of(step);
    const Words finite = reinterpret_cast<Words>(down);
    return nearest(floats_of((magnitude >= 0x7F800000u ? magnitude : finite) | sign));
  }
};

// All eight, or (not kAll) `count` of them from the `first` on: the others are zero, and not written.
template <bool kAll, class Stored>
SHARDLAB_INLINE Floats load(const typename Stored::Word* from, int64_t count, int64_t first = 0) {
  typename Stored::Eight eight{};
  if constexpr (kAll) {
    std::memcpy(&eight, from, sizeof eight);
  } else {
    typename Stored::Word words[8] = {};
    std::memcpy(words + first, from, static_cast<size_t>(count) * sizeof *words);
    std::memcpy(&eight, words, sizeof eight);
  }
  return Stored::floats(eight);
}

template <bool kAll, class Word, class Eight>
SHARDLAB_INLINE void store(Word* to, Eight eight, int64_t count) {
  std::memcpy(to, &eight, kAll ? sizeof eight : static_cast<size_t>(count) * sizeof *to);
}

// All eight past the caches, without reading what was there, if `to` is a multiple of 16 bytes.
SHARDLAB_INLINE void stream(uint16_t* to, Halves halves) {
#ifdef __AVX2__
  if (reinterpret_cast<uintptr_t>(to) % 16 == 0)
    return _mm_stream_si128(reinterpret_cast<__m128i*>(to), reinterpret_cast<__m128i>(halves));
#endif
  store<true>(to, halves, 8);
}

// Makes streamed stores visible to whom the caller speaks to next.
SHARDLAB_INLINE void end_streams() {
#ifdef __AVX2__
  _mm_sfence();
#endif
}
