// float32 <-> bfloat16. The arithmetic is on integers, so that every compiler vectorises it.
#include "bits.h"

// To the nearest, ties to even; NaN stays NaN (its top payload bits kept, made quiet).
SHARDLAB_INLINE uint16_t rounded(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t nearest = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x0040u;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet : nearest);
}

void bf16_encode(const float* __restrict x, int64_t n, uint8_t* __restrict payload) {
  for (int64_t i = 0; i < n; ++i) store_word(payload + 2 * i, rounded(x[i]));
}

void bf16_encode_residual(const float* __restrict x, float* __restrict residual, int64_t n,
                          uint8_t* __restrict payload) {
  for (int64_t i = 0; i < n; ++i) {
    const float wanted = x[i] + residual[i];
    const uint16_t word = rounded(wanted);
    const float rest = wanted - widened(word);
    store_word(payload + 2 * i, word);
    residual[i] = is_finite(bits_of(rest)) ? rest : residual[i];
  }
}

void bf16_decode_add(const uint8_t* __restrict payload, int64_t n, float alpha,
                     float* __restrict out) {
  for (int64_t i = 0; i < n; ++i) out[i] += alpha * widened(load_word(payload + 2 * i));
}
