// Counters in shared memory: a process that reads a value sees all that was written before its
// publication. Specified in shardlab/codecs/kernels/shared_counters.py.
#include <climits>
#include <ctime>

#include "kernels.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int64_t kSecond = 1000000000;

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * kSecond + time.tv_nsec;
}

// May return early: when the word differs from `seen`, when it is published, or by a signal.
void sleep_while(const int32_t* word, int32_t seen, int64_t nanoseconds) {
#if defined(__linux__)
  const timespec most = {time_t(nanoseconds / kSecond), long(nanoseconds % kSecond)};
  // not FUTEX_WAIT_PRIVATE, since the processes map the word at different addresses
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &most, nullptr, 0);
#else
  (void)word, (void)seen;
  const timespec most = {0, long(nanoseconds < 50000 ? nanoseconds : 50000)};
  nanosleep(&most, nullptr);
#endif
}

}  // namespace

SHARDLAB_KERNEL void words_publish(int32_t* word, int64_t value) {
#if defined(__SSE__)
  // a release does not order this thread's non-temporal stores
  __builtin_ia32_sfence();
#endif
  __atomic_store_n(word, int32_t(value), __ATOMIC_RELEASE);
#if defined(__linux__)
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

// `found` is the last value seen.
SHARDLAB_KERNEL void words_wait(const int32_t* word, int64_t value, int64_t nanoseconds, int32_t* found) {
  const int64_t deadline = now() + nanoseconds;
  for (;;) {
    *found = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    if (*found >= value) return;
    const int64_t left = deadline - now();
    if (left <= 0) return;
    sleep_while(word, *found, left);
  }
}
