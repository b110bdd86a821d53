// What all CPU kernels share. Each family has a file here and one of the same name in shardlab/codecs/kernels,
// which specifies its payload.
//
// All pointers may be unaligned to the vector size; payloads may be unaligned to their own words,
// since they are slices of larger messages. Buffers of one call never overlap, except that `kept` may
// be `residual`. Nothing is allocated, nothing throws, no state is kept: every function may run on
// several threads at once. (Threads that wait for kernels are an object of their own: workers.h.)
// Vectors are cut into ranges for threads, so parts of a payload have a pointer each.
#pragma once

#include <cstdint>

// The sources are compiled once for each instruction set; shardlab/codecs/kernels/native.py loads the best
// library that the processor runs.
#define SHARDLAB_KERNEL extern "C"

// Helpers have no code of their own: each becomes part of a kernel.
#define SHARDLAB_INLINE static inline __attribute__((always_inline))
#define SHARDLAB_INLINE_MEMBER inline __attribute__((always_inline))
#define SHARDLAB_INLINE_LAMBDA __attribute__((always_inline))

// Loops whose output may be an input (`kept` may be `residual`): element i depends on element i alone.
#define SHARDLAB_ELEMENTWISE _Pragma("GCC ivdep")
