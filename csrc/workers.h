// Threads that wait for kernels, each pinned to one processor or to none: shardlab/kernels/workers.py.
// Unlike the kernels, a pool keeps state and allocates; it is no use to a forked child, which has none
// of its threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels.h"

class Workers {
 public:
  using Task = void (*)(const void* job, int64_t part);

  // A thread whose processor is below 0 is not pinned.
  Workers(const int64_t* cpus, int64_t threads);  // throws std::system_error where none can start
  ~Workers();

  int64_t threads() const { return static_cast<int64_t>(threads_.size()); }
  // Calls task(job, part) for the parts 0 to parts - 1 and returns when all are done.
  void run(Task task, const void* job, int64_t parts);

 private:
  void work(int64_t cpu);
  void stop();

  std::mutex callers_, state_;
  std::condition_variable begin_, end_;
  uint64_t round_ = 0;
  bool stopping_ = false;
  int64_t busy_ = 0, parts_ = 0;
  std::atomic<int64_t> next_{0};
  Task task_ = nullptr;
  const void* job_ = nullptr;
  std::vector<std::thread> threads_;
};

// kernel(i) for each i from 0 to count - 1: on the threads of `workers`, or on the caller's if null.
template <class Kernel>
void for_each(Workers* workers, int64_t count, const Kernel& kernel) {
  if (workers)
    workers->run([](const void* job, int64_t i) { (*static_cast<const Kernel*>(job))(i); }, &kernel,
                 count);
  else
    for (int64_t i = 0; i < count; ++i) kernel(i);
}

// kernel(start, stop) on ranges that make up [0, n) and start at multiples of `multiple`: likewise.
template <class Kernel>
void for_ranges(Workers* workers, int64_t n, int64_t multiple, const Kernel& kernel) {
  constexpr int64_t kSmall = 1 << 14, kLarge = 1 << 22;  // elements
  // several for each thread: one that other work slows down takes fewer of them
  const int64_t even = workers ? n / (4 * workers->threads()) : n;
  const int64_t wanted = workers ? std::min(std::max(even, kSmall), kLarge) : std::max<int64_t>(n, 1);
  const int64_t size = (wanted + multiple - 1) / multiple * multiple;
  for_each(workers, (n + size - 1) / size,
           [&](int64_t i) { kernel(i * size, std::min(n, (i + 1) * size)); });
}
