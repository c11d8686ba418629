// A few threads that walk through one forward pass together: every thread runs the same code on its own share of the work.
#pragma once

#include <atomic>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvr {

// Where threads wait for one another. They spin for some microseconds, then let others run: on a crowded machine a thread that
// only spins would burn the time the one it waits for needs.
class Barrier {
  public:
    explicit Barrier(int threads) : threads_(threads) {}
    void wait() {
        if (threads_ == 1) return;
        int round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
            if (spins > 20000) {
                std::this_thread::yield();
            } else {
#if defined(__x86_64__)
                _mm_pause();
#endif
            }
        }
    }

  private:
    const int threads_;
    std::atomic<int> arrived_{0};
    std::atomic<int> round_{0};
};

// One thread's view of the team.
struct Worker {
    int id, count;
    Barrier* barrier;
    void sync() const { barrier->wait(); }
    // This thread's share [begin, end) of `items` units of work.
    void share(long items, long* begin, long* end) const {
        *begin = items * id / count;
        *end = items * (id + 1) / count;
    }
};

}  // namespace kvr
