// Each thread that computes has helpers of its own, so that loops of two stages never mix.
#include "team.h"

#include <ATen/Parallel.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace draftline {
namespace {

// How long a helper spins for the next loop: longer than the gaps between two loops of a pass, and
// between two passes of a step of several tokens.
constexpr std::chrono::microseconds WATCHED{200};
// Parts for each thread; a late or slow thread takes fewer.
constexpr int64_t PARTS = 2;
// Most parts of a loop, limited by the bits of a ticket.
constexpr int64_t MOST_PARTS = 0xffff;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Team {
 public:
  explicit Team(int helpers) {
    for (int i = 0; i < helpers; ++i) threads_.emplace_back([this] { help(); });
  }

  ~Team() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ended_ = true;
    }
    woken_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  size_t size() const { return threads_.size() + 1; }

  void run(int64_t count, int64_t grain, LoopBody body, const void* work) {
    const int64_t most = std::min(PARTS * int64_t(size()), MOST_PARTS);
    const int64_t parts = std::min((count + grain - 1) / grain, most);
    body_ = body, work_ = work, count_ = count;
    done_.store(0, std::memory_order_relaxed);
    const uint32_t loop = loop_of(ticket_.load(std::memory_order_relaxed)) + 1;
    ticket_.store(uint64_t{loop} << 32 | parts << 16);
    if (asleep_.load() > 0) {
      // A helper that counted as asleep has read the ticket, or will be notified.
      std::lock_guard<std::mutex> lock(mutex_);
      woken_.notify_all();
    }
    take_parts(loop);
    while (done_.load(std::memory_order_acquire) < parts) relax();
  }

 private:
  // A ticket has the number of the loop, the number of its parts, and the next part. So a thread
  // takes a part only of the current loop, which lasts until all its parts are done.
  static uint32_t loop_of(uint64_t ticket) { return ticket >> 32; }

  void take_parts(uint32_t loop) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (loop_of(ticket) == loop) {
      const int64_t parts = ticket >> 16 & 0xffff, part = ticket & 0xffff;
      if (part == parts) return;
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
      body_(work_, part * count_ / parts, (part + 1) * count_ / parts);
      done_.fetch_add(1, std::memory_order_release);
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  void help() {
    uint32_t seen = 0;
    while (await_loop(seen)) {
      seen = loop_of(ticket_.load(std::memory_order_acquire));
      take_parts(seen);
    }
  }

  bool has_loop(uint32_t seen) const { return loop_of(ticket_.load()) != seen; }

  // False: the helper must end.
  bool await_loop(uint32_t seen) {
    const auto end = std::chrono::steady_clock::now() + WATCHED;
    while (std::chrono::steady_clock::now() < end)
      for (int i = 0; i < 64; ++i) {
        if (has_loop(seen)) return true;
        relax();
      }
    std::unique_lock<std::mutex> lock(mutex_);
    ++asleep_;
    woken_.wait(lock, [&] { return ended_ || has_loop(seen); });
    --asleep_;
    return !ended_;
  }

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable woken_;
  bool ended_ = false;
  std::atomic<int> asleep_{0};
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int64_t> done_{0};
  // The loop's arguments; written before its ticket.
  LoopBody body_ = nullptr;
  const void* work_ = nullptr;
  int64_t count_ = 0;
};

// A forked child has no helper threads: it runs without them and must not join them.
struct End {
  pid_t process = getpid();

  void operator()(Team* team) const {
    if (process == getpid()) delete team;
  }
};

thread_local std::unique_ptr<Team, End> team;

}  // namespace

void run_parts(int64_t count, int64_t grain, LoopBody body, const void* work) {
  const size_t threads = at::get_num_threads();
  if (threads < 2) return body(work, 0, count);
  if (!team || team->size() != threads) {
    team.reset();
    team = std::unique_ptr<Team, End>(new Team(threads - 1));
  }
  team->run(count, grain, body, work);
}

}  // namespace draftline
