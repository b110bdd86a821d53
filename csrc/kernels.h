// What all CPU kernels share. Each family has a file here and one of a similar name in shardlab/codecs,
// which specifies its payload.
//
// All pointers may be unaligned to the vector size; payloads may be unaligned to their own words,
// since they are slices of larger messages. Buffers of one call never overlap, except that `kept` may
// be `residual`. Nothing is allocated, nothing throws, no state is kept: every function may run on
// several threads at once. (Threads that wait for kernels are an object of their own: workers.h.)
// Vectors are cut into ranges for threads, so parts of a payload have a pointer each.
#pragma once

#include <cfenv>
#include <cstdint>
#include <cstring>

// The sources are compiled once for each instruction set; shardlab/kernels/native.py loads the best
// library that the processor runs.
#define SHARDLAB_KERNEL extern "C"

// Helpers have no code of their own: each becomes part of a kernel.
#define SHARDLAB_INLINE static inline __attribute__((always_inline))
#define SHARDLAB_INLINE_MEMBER inline __attribute__((always_inline))
#define SHARDLAB_INLINE_LAMBDA __attribute__((always_inline))

// Loops whose output may be an input (`kept` may be `residual`): element i depends on element i alone.
#define SHARDLAB_ELEMENTWISE _Pragma("GCC ivdep")

SHARDLAB_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

SHARDLAB_INLINE float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Payloads are little endian on every host.
SHARDLAB_INLINE uint16_t load_word(const uint8_t* from) {
  uint16_t word;
  std::memcpy(&word, from, sizeof word);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  word = __builtin_bswap16(word);
#endif
  return word;
}

SHARDLAB_INLINE void store_word(uint8_t* to, uint16_t word) {
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  word = __builtin_bswap16(word);
#endif
  std::memcpy(to, &word, sizeof word);
}

// bfloat16 to float32: exact
SHARDLAB_INLINE float widened(uint16_t word) { return float_of(static_cast<uint32_t>(word) << 16); }

SHARDLAB_INLINE bool is_finite(uint32_t bits) { return (bits & 0x7F800000u) != 0x7F800000u; }

// Bit i is flags[i], which is 0 or 1, of 64.
SHARDLAB_INLINE uint64_t mask_of(const uint8_t* flags) {
  uint64_t mask = 0;
  for (int byte = 0; byte < 8; ++byte) {
    // eight flags, the first in the lowest byte on every host, become eight bits by a multiplication
    uint64_t eight = 0;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    std::memcpy(&eight, flags + 8 * byte, sizeof eight);
#else
    for (int i = 7; i >= 0; --i) eight = eight << 8 | flags[8 * byte + i];
#endif
    mask |= (eight * 0x0102040810204080u >> 56) << (8 * byte);
  }
  return mask;
}

// Counter-based random numbers: shardlab/kernels/random.py defines them.
static constexpr uint32_t kWeyl = 0x9E3779B9u;

// 32 random bits for x = element * kWeyl + k0, or for lanes of them.
template <class Word>
SHARDLAB_INLINE Word mixed(Word x, uint32_t k1) {
  x ^= x >> 16;
  x *= 0x21F0AAADu;
  x ^= (x >> 15) ^ k1;
  x *= 0x735A2D97u;
  x ^= x >> 15;
  return x;
}

// 32 random bits of one element of one message; k0 and k1 are the words of the message's key.
SHARDLAB_INLINE uint32_t random_bits(uint32_t element, uint32_t k0, uint32_t k1) {
  return mixed(element * kWeyl + k0, k1);
}

// Rounding to the nearest with subnormal numbers, whatever the thread is set to (PyTorch can be set to
// flush them): a vector's bits must not depend on the threads that take part.
class PlainFloats {
 public:
  PlainFloats() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~PlainFloats() { std::fesetenv(&before_); }
  PlainFloats(const PlainFloats&) = delete;
  PlainFloats& operator=(const PlainFloats&) = delete;

 private:
  std::fenv_t before_;
};
