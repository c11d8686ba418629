// Threads that share the loops of one forward pass.
//
// Every thread begins with units of its own, neighbours in ascending order, so that what a unit reads next is already on its way;
// when they are done it takes the others'. A loop is over when its units are, not when every thread has shown up: a thread that
// the system has put aside delays at most the unit it holds. On a crowded machine a team is therefore hardly slower than its first
// thread alone, where threads that meet at barriers would come to a standstill.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvr {

class Team {
  public:
    explicit Team(int threads) : shares_(threads) {
        try {
            for (int id = 1; id < threads; ++id) helpers_.emplace_back([this, id] { help(id); });
        } catch (...) {  // no destructor runs for what was not constructed
            dismiss();
            throw;
        }
    }
    Team(const Team&) = delete;
    ~Team() { dismiss(); }

    int size() const { return (int)shares_.size(); }

    // Helpers stand by between `begin` and `end`, and sleep otherwise.
    void begin() {
        if (helpers_.empty()) return;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            active_.store(true, std::memory_order_release);
            ++round_;
        }
        wake_.notify_all();
    }
    void end() { active_.store(false, std::memory_order_release); }

    // body(unit, thread) for every unit in [0, units), in any order, on any thread; returns when all are done.
    template <typename Body>
    void each(long units, const Body& body) {
        if (helpers_.empty() || units < 2) {
            for (long unit = 0; unit < units; ++unit) body(unit, 0);
            return;
        }
        body_ = &body;
        call_ = [](const void* b, long unit, int thread) { (*static_cast<const Body*>(b))(unit, thread); };
        done_.store(0, std::memory_order_relaxed);
        for (long t = 0; t < size(); ++t) {
            const long begin = units * t / size();
            shares_[t].end = units * (t + 1) / size();
            shares_[t].left.store(shares_[t].end - begin, std::memory_order_release);
        }
        while (work(0)) {
        }
        for (int spins = 0; done_.load(std::memory_order_acquire) != units; ++spins) pause(spins);
    }

    // The same over [0, items) in about `pieces` runs: body(begin, end, thread).
    template <typename Body>
    void split(long items, long pieces, const Body& body) {
        const long units = items < pieces ? items : pieces;
        each(units, [&](long unit, int thread) { body(items * unit / units, items * (unit + 1) / units, thread); });
    }

  private:
    void dismiss() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        wake_.notify_all();
        for (auto& helper : helpers_) helper.join();
    }

    // One thread's units of a loop: the next is `end - left`.
    struct alignas(64) Share {
        std::atomic<long> left{0};
        long end = 0;
    };

    // Takes and does one unit, the thread's own first. While a unit is held its loop cannot end, so `body_`, `call_` and the
    // share's `end` stay what they are.
    bool work(int thread) {
        for (int i = 0; i < size(); ++i) {
            Share& share = shares_[(thread + i) % size()];
            long left = share.left.load(std::memory_order_acquire);
            while (left > 0 && !share.left.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
            }
            if (left == 0) continue;
            call_(body_, share.end - left, thread);
            done_.fetch_add(1, std::memory_order_acq_rel);
            return true;
        }
        return false;
    }

    void help(int id) {
        for (long seen = 0;;) {
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return stopping_ || round_ != seen; });
                if (stopping_) return;
                seen = round_;
            }
            for (int spins = 0; active_.load(std::memory_order_acquire);) spins = work(id) ? 0 : (pause(spins), spins + 1);
        }
    }

    static void pause(int spins) {
        if (spins > 10000) {
            std::this_thread::yield();
        } else {
#if defined(__x86_64__)
            _mm_pause();
#endif
        }
    }

    std::vector<std::thread> helpers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    long round_ = 0;
    bool stopping_ = false;
    std::atomic<bool> active_{false};
    const void* body_ = nullptr;
    void (*call_)(const void*, long, int) = nullptr;
    std::vector<Share> shares_;
    alignas(64) std::atomic<long> done_{0};
};

}  // namespace kvr
