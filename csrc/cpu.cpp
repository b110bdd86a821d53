// The instruction sets of the CPU and the hash of the sources, so that the right build is loaded.
#include "kernels.h"

// Names the sources of this library by their SHA-256 (CMakeLists.txt computes it). shardlab/kernels/native.py
// finds it in the file by the words before it, without loading what may be damaged.
extern "C" const char* shardlab_sources() {
#ifdef SHARDLAB_SOURCES
  return "shardlab-sources:" SHARDLAB_SOURCES;
#else
  return "shardlab-sources:unknown";
#endif
}

// The level of x86-64 as its ABI defines it: 4 (AVX-512), 3 (AVX2) or 1; 1 on other processors.
extern "C" int32_t shardlab_cpu_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("f16c") &&
                  __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  return v3 ? (v4 ? 4 : 3) : 1;
#else
  return 1;
#endif
}
