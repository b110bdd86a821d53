// Stochastic powers of two: shardlab/kernels/natural.py specifies the payload, in which the signs of a
// group lie behind its exponents.
#include "grouped.h"

static constexpr int32_t kUsual = 1024;  // elements of a group, for which the compiler knows all sizes
static constexpr int32_t kLargest = 0x7F000000;  // 2^127
static constexpr uint32_t kExponent = 0x7F800000u, kSign = 0x80000000u;

// The exponent of the power of two that an element becomes, where float32 has it. The mantissa of a
// float32, subnormals included, is how far it is from its power of two to the next: a random number
// below 2^23 carries into the exponent just so often.
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
      for (int32_t p = 0; p < 8; ++p) byte = byte >> 1 | (bits_of(given[p * kUsual / 8 + j]) & kSign);
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

// Element p * width + j of a group of `count`.
SHARDLAB_INLINE float value(const uint8_t* codes, int32_t count, int32_t start, int32_t p,
                            int32_t j) {
  const uint32_t sign = static_cast<uint32_t>(codes[count + j]) << (31 - p) & kSign;
  return float_of(static_cast<uint32_t>(codes[start + j]) << 23 | sign);
}

// sum (+)= the values of a group in the payloads a to d, or in a alone, in their order.
template <bool kFour>
SHARDLAB_INLINE void add_values(const uint8_t* a, const uint8_t* b, const uint8_t* c,
                                const uint8_t* d, int32_t count, bool begin, float* sum) {
  const int32_t width = count == kUsual ? kUsual / 8 : (count + 7) / 8;
  for (int32_t p = 0; p < 8; ++p) {
    const int32_t start = p * width, size = count - start < width ? count - start : width;
    float* to = sum + start;
    SHARDLAB_ELEMENTWISE
    for (int32_t j = 0; j < size; ++j) {
      const float first = value(a, count, start, p, j);
      float total = begin ? first : to[j] + first;
      if (kFour) {
        total += value(b, count, start, p, j);
        total += value(c, count, start, p, j);
        total += value(d, count, start, p, j);
      }
      to[j] = total;
    }
  }
}

SHARDLAB_KERNEL void natural_encode(const float* x, const float* residual, float* kept, int64_t n,
                                    int64_t group, int64_t start, int64_t stop, uint32_t k0,
                                    uint32_t k1, uint8_t* payload) {
  alignas(64) float wanted[kLargestGroup];
  for (int64_t first = start; first < stop; first += group) {
    const int32_t count = static_cast<int32_t>(smaller(group, n - first));
    const float* given = x + first;
    uint32_t place = static_cast<uint32_t>(first) * kStride + k0;
    uint8_t* __restrict codes = payload + first / 8 * 9;
    if (residual) {
      const float* before = residual + first;
      float* after = kept + first;
      SHARDLAB_ELEMENTWISE
      for (int32_t i = 0; i < count; ++i, place += kStride) {
        const float sum = given[i] + before[i];
        const uint32_t bits = bits_of(sum);
        const uint32_t exponent = drawn(bits, random_bits_at(place, k1));
        const float rest = sum - float_of(exponent | (bits & kSign));
        after[i] = is_finite(bits_of(rest)) ? rest : before[i];
        codes[i] = static_cast<uint8_t>(exponent >> 23);
        wanted[i] = sum;
      }
      given = wanted;
    } else {
      for (int32_t i = 0; i < count; ++i, place += kStride) {
        const uint32_t exponent = drawn(bits_of(given[i]), random_bits_at(place, k1));
        codes[i] = static_cast<uint8_t>(exponent >> 23);
      }
    }
    pack_signs(given, count, codes + count);
  }
}

SHARDLAB_KERNEL void natural_decode(const uint8_t* const* payloads, int64_t count, int64_t n,
                                    int64_t group, int64_t start, int64_t stop, float alpha,
                                    int add, float* out) {
  alignas(64) float sum[kLargestGroup];
  for (int64_t first = start; first < stop; first += group) {
    const int32_t size = static_cast<int32_t>(smaller(group, n - first));
    const int64_t place = first / 8 * 9;
    for (int64_t p = 0; p < count;) {
      if (count - p >= 4) {
        add_values<true>(payloads[p] + place, payloads[p + 1] + place, payloads[p + 2] + place,
                         payloads[p + 3] + place, size, p == 0, sum);
        p += 4;
      } else {
        const uint8_t* codes = payloads[p++] + place;
        add_values<false>(codes, codes, codes, codes, size, p == 1, sum);
      }
    }
    float* __restrict to = out + first;
    if (add)
      for (int32_t i = 0; i < size; ++i) to[i] += alpha * sum[i];
    else
      for (int32_t i = 0; i < size; ++i) to[i] = alpha * sum[i];
  }
}
