// Signs with the mean magnitude of their group.
#include "signs.h"

struct EfSign {
  static constexpr int64_t kHeadBytes = 2, kBits = 1;
  struct Head {
    uint16_t word;
    SHARDLAB_INLINE_MEMBER float clear() const { return widened(word); }
    SHARDLAB_INLINE_MEMBER float set() const { return -widened(word); }
  };

  SHARDLAB_INLINE_MEMBER static Head head_of(const float* given, int64_t count) {
    return {mean_word(magnitude_sum(given, count), count)};
  }
  SHARDLAB_INLINE_MEMBER static void store(Head head, uint8_t* to) { store_word(to, head.word); }
  SHARDLAB_INLINE_MEMBER static Head load(const uint8_t* from) { return {load_word(from)}; }
  SHARDLAB_INLINE_MEMBER static void encode(const float* given, int64_t count, Head, Random,
                                            uint8_t* __restrict codes) {
    pack_signs(given, count, codes);
  }
  SHARDLAB_INLINE_MEMBER static Floats value(Ints codes, Head head) {
    return chosen(codes, head.clear(), head.set());
  }
};

SHARDLAB_SIGNS(efsign, EfSign)
