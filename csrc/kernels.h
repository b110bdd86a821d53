// The C ABI of the CPU kernels. Payload formats: shardlab/kernels/int8.py and bf16.py.
//
// All pointers may be unaligned to the vector size; payloads may be unaligned to their own words,
// since they are slices of larger messages. Buffers of one call never overlap. Nothing is
// allocated, nothing throws, no state is kept: every function may run on several threads at once.
#pragma once

#include <cstdint>

// One binary, three instruction sets, chosen when the library is loaded.
#ifdef SHARDLAB_HAVE_CLONES
#define SHARDLAB_KERNEL \
  extern "C" __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SHARDLAB_KERNEL extern "C"
#endif

// Helpers have no code of their own: each becomes part of a kernel and of its instruction set.
#define SHARDLAB_INLINE static inline __attribute__((always_inline))

// x[n] -> payload[2 * ceil(n / group) + n]
SHARDLAB_KERNEL void int8_encode(const float* x, int64_t n, int64_t group, uint8_t* payload);

// p = x + residual; p -> payload; residual = p - decoded payload, unchanged where that is not finite
SHARDLAB_KERNEL void int8_encode_residual(const float* x, float* residual, int64_t n,
                                          int64_t group, uint8_t* payload);

// out[n] += alpha * decoded payload
SHARDLAB_KERNEL void int8_decode_add(const uint8_t* payload, int64_t n, int64_t group, float alpha,
                                     float* out);

// x[n] -> payload[2 * n]
SHARDLAB_KERNEL void bf16_encode(const float* x, int64_t n, uint8_t* payload);

// as int8_encode_residual
SHARDLAB_KERNEL void bf16_encode_residual(const float* x, float* residual, int64_t n,
                                          uint8_t* payload);

// out[n] += alpha * decoded payload
SHARDLAB_KERNEL void bf16_decode_add(const uint8_t* payload, int64_t n, float alpha, float* out);
