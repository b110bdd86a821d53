#include "workers.h"

#include <csignal>
#include <system_error>

#include <pthread.h>
#ifdef __linux__
#include <sched.h>
#endif

Workers::Workers(const int64_t* cpus, int64_t threads) {
  // signals are for the threads of the interpreter; new threads inherit the mask
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (int64_t i = 0; i < threads; ++i) threads_.emplace_back(&Workers::work, this, cpus[i]);
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    stop();
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Workers::~Workers() { stop(); }

void Workers::stop() {
  {
    const std::lock_guard<std::mutex> state(state_);
    stopping_ = true;
  }
  begin_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Workers::run(Task task, const void* job, int64_t parts) {
  const std::lock_guard<std::mutex> callers(callers_);
  std::unique_lock<std::mutex> state(state_);
  task_ = task;
  job_ = job;
  parts_ = parts;
  next_ = 0;
  busy_ = threads();
  ++round_;
  begin_.notify_all();
  end_.wait(state, [this] { return busy_ == 0; });
}

void Workers::work(int64_t cpu) {
#ifdef __linux__
  pthread_setname_np(pthread_self(), "shardlab-worker");
  if (cpu >= 0) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<size_t>(cpu), &one);
    // refused where the processor has left our affinity since: then the thread runs elsewhere
    sched_setaffinity(0, sizeof one, &one);
  }
#else
  (void)cpu;
#endif
  uint64_t seen = 0;
  std::unique_lock<std::mutex> state(state_);
  while (true) {
    begin_.wait(state, [&] { return stopping_ || round_ != seen; });
    if (stopping_) return;
    seen = round_;
    state.unlock();
    for (int64_t part = next_++; part < parts_; part = next_++) task_(job_, part);
    state.lock();
    if (--busy_ == 0) end_.notify_one();
  }
}

// Writes the pool to *made, or null where the system cannot start so many threads.
SHARDLAB_KERNEL void workers_create(const int64_t* cpus, int64_t threads, Workers** made) {
  try {
    *made = new Workers(cpus, threads);
  } catch (const std::exception&) {
    *made = nullptr;
  }
}

SHARDLAB_KERNEL void workers_destroy(Workers* workers) { delete workers; }
