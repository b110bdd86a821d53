// The instruction sets of the processor, by which a build of the kernels is chosen.
#include "kernels.h"

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
