// Stochastic powers of two: shardlab/codecs/floats.py specifies the payload, in which the signs of
// a group follow its exponents.
#include "grouped.h"

static constexpr int32_t kUsual = 1024;  // elements of a group for which all sizes are constants
static constexpr int32_t kLargest = 0x7F000000;  // 2^127
static constexpr uint32_t kExponent = 0x7F800000u, kSign = 0x80000000u;

// The exponent of the power of two that an element becomes, where float32 has it. The mantissa of a
// float32, subnormals included, is the distance from its power of two to the next: a random number
// below 2^23 carries into the exponent with that probability.
SHARDLAB_INLINE uint32_t drawn(uint32_t bits, uint32_t chance) {
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const uint32_t lost = static_cast<int32_t>(magnitude) > kLargest ? kExponent : 0;
  return ((magnitude + (chance >> 9)) | lost) & kExponent;
}

// Eight signs to a byte: bit p of byte j is that of element p * width + j.
SHARDLAB_INLINE void pack_signs(const float* given, int32_t count, uint8_t* __restrict signs) {
  if (count == kUsual) {
    for (int32_t j = 0; j < kUsual / 8; ++j) {
      uint32_t byte = 0;
#pragma GCC unroll 8
      for (int32_t p = 0; p < 8; ++p)
        byte = byte >> 1 | (bits_of(given[p * kUsual / 8 + j]) & kSign);
      signs[j] = static_cast<uint8_t>(byte >> 24);
    }
    return;
  }
  const int32_t width = (count + 7) / 8;
  for (int32_t j = 0; j < width; ++j) {
    uint32_t byte = 0;
    for (int32_t i = j, p = 0; i < count; i += width, ++p) byte |= bits_of(given[i]) >> 31 << p;
    signs[j] = static_cast<uint8_t>(byte);
  }
}

// Element j of plane p, whose first is element `start` of a group of `count`.
SHARDLAB_INLINE float value(const uint8_t* codes, int64_t count, int64_t start, int p, int64_t j) {
  const uint32_t sign = static_cast<uint32_t>(codes[count + j]) << (31 - p) & kSign;
  return float_of(static_cast<uint32_t>(codes[start + j]) << 23 | sign);
}

// output = sum over payloads of 64 neighbours of a plane, elements p * width + j and so on.
SHARDLAB_INLINE void decode_neighbours(const uint8_t* const* payloads, int64_t payload_count,
                                       int64_t place, int64_t count, int64_t start, int p,
                                       int64_t j, int64_t first, const Output& output) {
  Floats sums[8] = {};
  for (int64_t k = 0; k < payload_count; ++k) {
    const uint8_t* exponents = payloads[k] + place + start + j;
    const uint8_t* signs = payloads[k] + place + count + j;
    // the same place of the next group, since processors do not prefetch two alternating streams
    __builtin_prefetch(exponents + count / 8 * 9);
    if (p == 0) __builtin_prefetch(signs + count / 8 * 9);
#pragma GCC unroll 8
    for (int v = 0; v < 8; ++v) {
      const Words sign = words_of(unsigned_bytes(signs + 8 * v)) << (31 - p) & kSign;
      const Floats values = floats_of(words_of(unsigned_bytes(exponents + 8 * v)) << 23 | sign);
      sums[v] = k ? sums[v] + values : values;
    }
  }
  output.put<8>(first + start + j, sums, 64);
}

static void encode(const float* x, const float* residual, float* kept, int64_t n, int64_t group,
                   int64_t start, int64_t stop, uint32_t k0, uint32_t k1, uint8_t* payload) {
  alignas(64) float wanted[kLargestGroup];
  for (int64_t first = start; first < stop; first += group) {
    const int32_t count = static_cast<int32_t>(smaller(group, n - first));
    const float* given = x + first;
    uint32_t place = static_cast<uint32_t>(first) * kWeyl + k0;
    uint8_t* __restrict codes = payload + first / 8 * 9;
    if (residual) {
      const float* before = residual + first;
      float* after = kept + first;
      SHARDLAB_ELEMENTWISE
      for (int32_t i = 0; i < count; ++i, place += kWeyl) {
        const float sum = given[i] + before[i];
        const uint32_t bits = bits_of(sum);
        const uint32_t exponent = drawn(bits, mixed(place, k1));
        const float rest = sum - float_of(exponent | (bits & kSign));
        after[i] = is_finite(bits_of(rest)) ? rest : before[i];
        codes[i] = static_cast<uint8_t>(exponent >> 23);
        wanted[i] = sum;
      }
      given = wanted;
    } else {
      for (int32_t i = 0; i < count; ++i, place += kWeyl) {
        const uint32_t exponent = drawn(bits_of(given[i]), mixed(place, k1));
        codes[i] = static_cast<uint8_t>(exponent >> 23);
      }
    }
    pack_signs(given, count, codes + count);
  }
}

static void decode(const uint8_t* const* payloads, int64_t payload_count, int64_t n, int64_t group,
                   int64_t start, int64_t stop, float alpha, int add, float* out) {
  const Output output{out, alpha, add != 0, n >= kFarAway};
  for (int64_t first = start; first < stop; first += group) {
    const int64_t count = smaller(group, n - first), width = (count + 7) / 8, place = first / 8 * 9;
    for (int p = 0; p * width < count; ++p) {
      const int64_t begin = p * width, size = smaller(width, count - begin);
      int64_t j = 0;
      for (; j + 64 <= size; j += 64)
        decode_neighbours(payloads, payload_count, place, count, begin, p, j, first, output);
      for (; j < size; ++j) {
        float sum = value(payloads[0] + place, count, begin, p, j);
        for (int64_t k = 1; k < payload_count; ++k)
          sum += value(payloads[k] + place, count, begin, p, j);
        float& to = out[first + begin + j];
        to = add ? to + alpha * sum : alpha * sum;
      }
    }
  }
}

SHARDLAB_KERNELS(natural, encode, decode)
