// Stochastic powers of two: shardlab/kernels/natural.py specifies the payload, in which the signs of a
// group lie behind its exponents.
#include "random.h"

static constexpr int32_t kGroup = 1024, kPlane = kGroup / 8;
static constexpr int32_t kLargest = 0x7F000000;  // 2^127

// What is given, as far as it is not the vector itself.
struct Wanted {
  alignas(64) float values[kGroup];
};

SHARDLAB_INLINE int32_t least(int64_t a, int32_t b) { return a < b ? static_cast<int32_t>(a) : b; }

SHARDLAB_INLINE float power(uint32_t exponent, uint32_t sign) {
  return float_of(exponent << 23 | sign);
}

// The mantissa of a float32, subnormals included, is how far it is from its power of two to the next:
// a random number below 2^23 carries into the exponent just so often.
SHARDLAB_INLINE int32_t drawn(uint32_t bits, uint32_t chance) {
  const int32_t magnitude = static_cast<int32_t>(bits & 0x7FFFFFFFu);
  const int32_t exponent = (magnitude + static_cast<int32_t>(chance >> 9)) >> 23;
  return magnitude > kLargest ? 255 : exponent;
}

// Eight signs to a byte: bit p of byte j is that of element p * width + j.
SHARDLAB_INLINE void pack_signs(const float* given, int32_t count, uint8_t* __restrict signs) {
  const int32_t width = (count + 7) / 8;
  if (count == kGroup) {
    for (int32_t j = 0; j < kPlane; ++j) {
      uint32_t byte = 0;
#pragma GCC unroll 8
      for (int32_t p = 0; p < 8; ++p)
        byte |= bits_of(given[p * kPlane + j]) >> (31 - p) & (1u << p);
      signs[j] = static_cast<uint8_t>(byte);
    }
    return;
  }
  for (int32_t j = 0; j < width; ++j) {
    uint32_t byte = 0;
    for (int32_t i = j, p = 0; i < count; i += width, ++p) byte |= bits_of(given[i]) >> 31 << p;
    signs[j] = static_cast<uint8_t>(byte);
  }
}

// sum (+)= the values of a group.
template <bool kFirst>
SHARDLAB_INLINE void add_values(const uint8_t* exponents, int32_t count, float* __restrict sum) {
  const uint8_t* signs = exponents + count;
  const int32_t width = count == kGroup ? kPlane : (count + 7) / 8;
  for (int32_t p = 0; p < 8; ++p) {
    const uint8_t* from = exponents + p * width;
    float* __restrict to = sum + p * width;
    const int32_t size = least(count - p * width, width);
    for (int32_t j = 0; j < size; ++j) {
      const float value = power(from[j], static_cast<uint32_t>(signs[j]) << (31 - p) & 0x80000000u);
      to[j] = kFirst ? value : to[j] + value;
    }
  }
}

// As in grouped.h; `group` is kGroup.
SHARDLAB_KERNEL void natural_encode(const float* x, const float* residual, float* kept, int64_t n,
                                    int64_t, int64_t start, int64_t stop, uint32_t k0, uint32_t k1,
                                    uint8_t* payload) {
  Wanted wanted;
  for (int64_t first = start; first < stop; first += kGroup) {
    const int32_t count = least(n - first, kGroup);
    const float* given = x + first;
    const uint32_t element = static_cast<uint32_t>(first);
    uint8_t* __restrict codes = payload + first / 8 * 9;
    if (residual) {
      const float* before = residual + first;
      float* after = kept + first;
      float* __restrict sums = wanted.values;
      SHARDLAB_ELEMENTWISE
      for (int32_t i = 0; i < count; ++i) {
        const float sum = given[i] + before[i];
        const uint32_t bits = bits_of(sum);
        const int32_t code = drawn(bits, random_bits(element + static_cast<uint32_t>(i), k0, k1));
        const float rest = sum - power(static_cast<uint32_t>(code), bits & 0x80000000u);
        after[i] = is_finite(bits_of(rest)) ? rest : before[i];
        codes[i] = static_cast<uint8_t>(code);
        sums[i] = sum;
      }
      given = wanted.values;
    } else {
      for (int32_t i = 0; i < count; ++i) {
        const uint32_t chance = random_bits(element + static_cast<uint32_t>(i), k0, k1);
        codes[i] = static_cast<uint8_t>(drawn(bits_of(given[i]), chance));
      }
    }
    pack_signs(given, count, codes + count);
  }
}

SHARDLAB_KERNEL void natural_decode(const uint8_t* const* payloads, int64_t count, int64_t n,
                                    int64_t, int64_t start, int64_t stop, float alpha, int add,
                                    float* out) {
  alignas(64) float sum[kGroup];
  for (int64_t first = start; first < stop; first += kGroup) {
    const int32_t size = least(n - first, kGroup);
    add_values<true>(payloads[0] + first / 8 * 9, size, sum);
    for (int64_t p = 1; p < count; ++p) add_values<false>(payloads[p] + first / 8 * 9, size, sum);
    float* __restrict to = out + first;
    if (add)
      for (int32_t i = 0; i < size; ++i) to[i] += alpha * sum[i];
    else
      for (int32_t i = 0; i < size; ++i) to[i] = alpha * sum[i];
  }
}
