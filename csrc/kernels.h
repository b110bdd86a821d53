// What all CPU kernels share. Each family has a file here and one of the same name in shardlab/kernels,
// which specifies its payload.
//
// All pointers may be unaligned to the vector size; payloads may be unaligned to their own words,
// since they are slices of larger messages. Buffers of one call never overlap, except that
// `kept` may be `residual`. Nothing is
// allocated, nothing throws, no state is kept: every function may run on several threads at once.
// Vectors are cut into ranges for threads, so parts of a payload have a pointer each.
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
#define SHARDLAB_INLINE_MEMBER inline __attribute__((always_inline))

// Loops whose output may be an input (`kept` may be `residual`): element i depends on element i alone.
#define SHARDLAB_ELEMENTWISE _Pragma("GCC ivdep")
