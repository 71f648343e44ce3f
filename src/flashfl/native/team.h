// Threads that wait for work between kernels.
//
// Starting a thread takes longer than many kernels run, so threads are kept. After a kernel they look out for the next
// one for a moment, which usually comes at once, and then sleep. A forked process starts threads of its own.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace {

class Member {  // one thread besides the caller's
 public:
  Member() {
    std::thread([this] {
      for (;;) {
        wait();
        serve_(job_);
        wanted_.store(false, std::memory_order_release);
      }
    }).detach();
  }

  void start(void (*serve)(void*), void* job) {
    serve_ = serve;
    job_ = job;
    std::lock_guard<std::mutex> lock(mutex_);
    wanted_.store(true, std::memory_order_release);
    wake_.notify_one();
  }

  void finish() const {
    while (wanted_.load(std::memory_order_acquire)) std::this_thread::yield();
  }

 private:
  void wait() {
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(200);
    while (!wanted_.load(std::memory_order_acquire)) {
      if (std::chrono::steady_clock::now() > until) {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [this] { return wanted_.load(std::memory_order_acquire); });
      } else {
        std::this_thread::yield();
      }
    }
  }

  std::atomic<bool> wanted_{false};
  void (*serve_)(void*) = nullptr;
  void* job_ = nullptr;
  std::mutex mutex_;
  std::condition_variable wake_;
};

struct Team {
  std::mutex in_use;
  std::vector<std::unique_ptr<Member>> members;

  int64_t grow(int64_t others) {  // how many there are, which may be fewer if the system has no more threads
    try {
      while (static_cast<int64_t>(members.size()) < others) members.push_back(std::make_unique<Member>());
    } catch (const std::system_error&) {
    }
    return std::min<int64_t>(others, members.size());
  }
};

std::atomic<Team*> current{nullptr};  // never freed: its threads may outlive everything else

Team& team() {
  static const int forked = pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); });
  (void)forked;
  Team* mine = current.load();
  if (!mine) {
    Team* made = new Team;
    if (current.compare_exchange_strong(mine, made)) return *made;
    delete made;
  }
  return *mine;
}

// work(0) to work(tasks - 1), on this thread and others. If another thread of the program uses the team, on this one only.
template <class F>
void parallel(int64_t tasks, int64_t threads, const F& work) {
  struct Job {
    const F& work;
    int64_t tasks;
    std::atomic<int64_t> next{0};
    void serve() {
      for (int64_t t; (t = next.fetch_add(1)) < tasks;) work(t);
    }
  } job{work, tasks};
  threads = std::min(threads, tasks);
  if (threads <= 1) return job.serve();
  Team& all = team();
  std::unique_lock<std::mutex> lock(all.in_use, std::try_to_lock);
  const int64_t others = lock.owns_lock() ? all.grow(threads - 1) : 0;
  for (int64_t i = 0; i < others; ++i)
    all.members[i]->start([](void* its) { static_cast<Job*>(its)->serve(); }, &job);
  job.serve();
  for (int64_t i = 0; i < others; ++i) all.members[i]->finish();
}

}  // namespace
