// Work shared by several threads: those of OpenMP, which torch uses too. A pool of our own would run beside torch's, and
// the two would take the processor from each other.
#include <pthread.h>

#include <algorithm>
#include <cstdint>

namespace {

bool forked = false;  // OpenMP's threads are not there in a forked process: it uses one thread

const int watching = pthread_atfork(nullptr, nullptr, [] { forked = true; });

// work(0) to work(tasks - 1), in any order. Each thread has a range of its own: neighbours share what they read.
template <class F>
void parallel(int64_t tasks, int64_t threads, const F& work) {
  threads = forked ? 1 : std::min(threads, tasks);
  if (threads <= 1) {
    for (int64_t t = 0; t < tasks; ++t) work(t);
  } else {
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(threads))
    for (int64_t t = 0; t < tasks; ++t) work(t);
  }
}

}  // namespace
