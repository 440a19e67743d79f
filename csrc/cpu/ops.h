// What the bindings of the CPU ops share: memory, and parallel loops.
//
// Work is cut into tasks of equal cost (edges or entries, not graphs) whose number depends on the input alone, so
// results do not depend on the number of threads.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <thread>
#include <vector>

#include "../tensors.h"
#include "isa.h"

namespace spin_fast {

inline bool is_here(const Tensor& t) { return t.is_cpu(); }

// Page faults in large fresh memory cost more than writing it: ask for huge pages. The allocator reuses smaller memory
// with its pages; there the request itself would cost more.
constexpr int64_t fresh_bytes = 32 << 20;

inline Tensor empty(Shape shape, ScalarType dtype) {
  Tensor t = allocated_on_cpu(shape, dtype);
#if defined(__linux__)
  if (t.numel() * static_cast<int64_t>(t.element_size()) < fresh_bytes) return t;
  constexpr uintptr_t page = uintptr_t{1} << 21;
  const auto begin = reinterpret_cast<uintptr_t>(t.data_ptr());
  const uintptr_t first = (begin + page - 1) / page * page;
  const uintptr_t last = (begin + static_cast<uintptr_t>(t.numel()) * t.element_size()) / page * page;
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // only advice: may fail
#endif
  return t;
}

// For tests: fill what kernels get as uninitialised memory with NaN, so that reading it shows.
inline std::atomic<bool> poison_scratch{false};

inline char* poisoned(char* memory, int64_t bytes) {
  if (poison_scratch.load(std::memory_order_relaxed)) std::memset(memory, 0xff, bytes);
  return memory;
}

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// Memory that the calling thread keeps for its next call; grows as needed.
inline char* thread_scratch(int64_t bytes) {
  thread_local std::unique_ptr<char, Free> memory;
  thread_local int64_t size = 0;
  if (bytes > size) {
    size = 0;
    memory.reset(static_cast<char*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096)));
    if (!memory) throw std::bad_alloc();
    size = bytes;
  }
  return poisoned(memory.get(), bytes);
}

// Cost that one task should have, in scalar multiply-adds: some ten microseconds.
inline constexpr int64_t task_cost = 1 << 16;

inline int64_t number_of_tasks(int64_t cost, int64_t items) {
  return std::clamp<int64_t>(cost / task_cost, 1, std::max<int64_t>(1, std::min<int64_t>(items, 1024)));
}

// The first item of a task, where items [0, n) with prefix-summed costs `cost(0..n)` are cut into tasks of equal cost.
template <class Cost>
int64_t first_item(Cost cost, int64_t n, int64_t task, int64_t tasks) {
  if (task == 0) return 0;
  if (task == tasks) return n;
  const int64_t first = cost(0);
  const auto goal = first + static_cast<int64_t>(static_cast<double>(cost(n) - first) * task / tasks);
  int64_t low = 0, high = n;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (cost(middle) < goal)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// Set in a forked child: OpenMP would wait for ever for the threads of the parent.
inline bool without_threads = false;

// While it lives, threads_for() is 1 in this thread, one of several that have work of their own.
class Serial {
 public:
  explicit Serial(bool is) : before_(here) { here = is || before_; }
  ~Serial() { here = before_; }
  Serial(const Serial&) = delete;
  static inline thread_local bool here = false;

 private:
  const bool before_;
};

// Waits for another thread, a little. The core is not given away: a process that gets it keeps it for milliseconds.
inline void wait_briefly() {
  for (int i = 0; i < 64; ++i)
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#else
    std::this_thread::yield();
#endif
}

// Runs f(first, last) over ranges that together are [0, n), by at most so many threads.
template <class F>
void parallel_ranges(int64_t n, F f, int64_t threads = INT64_MAX) {
  if (without_threads) return f(int64_t{0}, n);
#if defined(__SANITIZE_THREAD__)  // which cannot see what OpenMP's threads wait for
  std::thread other(f, n / 2, n);
  f(int64_t{0}, n / 2);
  other.join();
#else
  torch::stable::parallel_for(0, n, threads >= n ? 1 : (n + threads - 1) / threads, f);
#endif
}

// Runs f(begin, end) over items [0, n), tasks in parallel; tiny work stays on the calling thread. Threads get ranges
// of tasks in a mixed order, because neighbours are often alike and costs are only estimates.
template <class Cost, class F>
void parallel_items(int64_t n, int64_t total_cost, Cost cost, F f) {
  const int64_t tasks = number_of_tasks(total_cost, n);
  if (tasks == 1) return f(int64_t{0}, n);
  int64_t step = tasks * 5 / 8 + 1;
  while (std::gcd(step, tasks) != 1) ++step;
  parallel_ranges(tasks, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t task = i * step % tasks;
      f(first_item(cost, n, task, tasks), first_item(cost, n, task + 1, tasks));
    }
  });
}

// The same of items that cost the same.
template <class F>
void parallel_items(int64_t n, int64_t total_cost, F f) {
  parallel_items(n, total_cost, [](int64_t item) { return item; }, f);
}

// Threads that so many multiply-adds of vectors are worth, in all loops over a chunk: some 25 us each.
inline int64_t threads_for(int64_t multiply_adds) {
#if defined(__SANITIZE_THREAD__)  // as many as parallel_ranges starts
  const int64_t most = 2;
#else
  const int64_t most = without_threads || Serial::here ? 1 : torch::stable::get_num_threads();
#endif
  return std::clamp<int64_t>(multiply_adds / (24 * task_cost), 1, most);
}

// Runs f(i) for i in [0, n). Each thread begins with a range of its own, whose memory is in its caches if the loop
// before was cut alike, and then takes what others have left, from the end.
template <class F>
void parallel_tasks(int64_t n, int64_t threads, F f) {
  if (threads <= 1 || n <= 1) {
    for (int64_t i = 0; i < n; ++i) f(i);
    return;
  }
  struct alignas(64) Task {  // a cache line each: threads would wait for those of others
    std::atomic<bool> taken{false};
  };
  std::vector<Task> tasks(n);
  const auto run = [&](int64_t begin, int64_t end) {
    const auto take = [&](int64_t i) {
      if (!tasks[i].taken.load(std::memory_order_relaxed) && !tasks[i].taken.exchange(true, std::memory_order_relaxed))
        f(i);
    };
    for (int64_t i = begin; i < end; ++i) take(i);
    for (int64_t i = n; i-- > 0;) take(i);
  };
  parallel_ranges(n, run, threads);
}

// Runs f(branch, i) for i in [0, n) of each branch, the last one first, which has the most rows.
template <class F>
void parallel_branches(int64_t branches, int64_t n, int64_t threads, F f) {
  parallel_tasks(branches * n, threads, [&](int64_t task) { f(branches - 1 - task / n, task % n); });
}

}  // namespace spin_fast
