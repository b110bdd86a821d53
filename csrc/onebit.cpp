// Signs with the means of the elements below zero and of the others of their group.
#include "signs.h"

struct OneBit {
  static constexpr int64_t kHeadBytes = 4, kBits = 1;
  struct Head {
    uint16_t others, below;
    SHARDLAB_INLINE_MEMBER float clear() const { return widened(others); }
    SHARDLAB_INLINE_MEMBER float set() const { return widened(below); }
  };

  SHARDLAB_INLINE_MEMBER static Head head_of(const float* given, int64_t count) {
    float others[kLanes], below[kLanes];
    int32_t set[kLanes];
    clear(others), clear(below), clear(set);
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes)
      for (int64_t l = 0; l < kLanes; ++l) add(given[i + l], others[l], below[l], set[l]);
    for (int64_t l = 0; i + l < count; ++l) add(given[i + l], others[l], below[l], set[l]);
    int32_t negative = 0;
    for (int64_t l = 0; l < kLanes; ++l) negative += set[l];
    const uint16_t first = mean_word(folded(others), count - negative);
    const uint16_t second = mean_word(folded(below), negative);
    if (first == kNoMean || second == kNoMean) return {kNoMean, kNoMean};
    return {first, second};
  }
  SHARDLAB_INLINE_MEMBER static void store(Head head, uint8_t* to) {
    store_word(to, head.others);
    store_word(to + 2, head.below);
  }
  SHARDLAB_INLINE_MEMBER static Head load(const uint8_t* from) {
    return {load_word(from), load_word(from + 2)};
  }
  SHARDLAB_INLINE_MEMBER static void encode(const float* given, int64_t count, Head, Random,
                                            uint8_t* __restrict codes) {
    pack_signs(given, count, codes);
  }
  SHARDLAB_INLINE_MEMBER static Floats value(Ints codes, Head head) {
    return chosen(codes, head.clear(), head.set());
  }

 private:
  SHARDLAB_INLINE_MEMBER static void add(float value, float& others, float& below, int32_t& set) {
    const int32_t mask = value < 0.0f ? -1 : 0;
    others += float_of(bits_of(value) & ~static_cast<uint32_t>(mask));
    below += float_of(bits_of(value) & static_cast<uint32_t>(mask));
    set -= mask;
  }
};

SHARDLAB_SIGNS(onebit, OneBit)
