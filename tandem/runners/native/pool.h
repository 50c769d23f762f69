// Threads that run one function together, phase by phase, in small items: a preempted thread delays one item, not half
// of a phase.
#pragma once
#include <atomic>
#include <pthread.h>
#include <sched.h>
#include <thread>
#include <vector>

namespace tandem {

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Pool {
public:
    typedef void (*Job)(void* argument, int thread);

    explicit Pool(int threads) : count_(threads) {
#ifdef __linux__
        if (sched_getaffinity(0, sizeof(allowed_), &allowed_)) CPU_ZERO(&allowed_);
#endif
        for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { work(i); });
    }
    ~Pool() {
        job_ = nullptr;
        announce();
        for (auto& worker : workers_) worker.join();
    }
    int count() const { return count_; }

    // Runs job(argument, thread) on the first `threads` threads, the caller first; returns when all are done.
    void run(Job job, void* argument, int threads) {
        if (threads > 1) {
            leave_this_core();
            job_ = job;
            argument_ = argument;
            active_ = threads;
            running_.store(threads - 1, std::memory_order_relaxed);
            announce();
        }
        job(argument, 0);
        if (threads > 1)
            until([this] { return running_.load(std::memory_order_acquire) == 0; });
    }

    // Waits for `condition`; yields the core after some tens of microseconds.
    template <class Condition> static void until(Condition condition) {
        for (int spins = 0; !condition(); spins++) {
            if (spins < SPINS) relax();
            else sched_yield();
        }
    }

private:
    // Keeps workers off the caller's core: the system tends to wake a thread there, where each would wait for the
    // other.
    void leave_this_core() {
#ifdef __linux__
        const int core = sched_getcpu();
        if (core < 0 || core == left_ || !CPU_ISSET(core, &allowed_) || CPU_COUNT(&allowed_) < count_) return;
        cpu_set_t others = allowed_;
        CPU_CLR(core, &others);
        for (auto& worker : workers_) pthread_setaffinity_np(worker.native_handle(), sizeof(others), &others);
        left_ = core;
#endif
    }

    static constexpr int SPINS = 4000;  // some tens of microseconds

    void announce() {
        generation_.fetch_add(1, std::memory_order_release);
        generation_.notify_all();
    }
    void work(int thread) {
        uint32_t seen = 0;
        while (true) {
            uint32_t now = seen;
            for (int spins = 0; spins < SPINS && (now = generation_.load(std::memory_order_acquire)) == seen; spins++) relax();
            if (now == seen) {
                generation_.wait(seen, std::memory_order_acquire);
                continue;
            }
            seen = now;
            if (!job_) return;
            if (thread < active_) {
                job_(argument_, thread);
                running_.fetch_sub(1, std::memory_order_acq_rel);
            }
        }
    }

    int count_;
    std::vector<std::thread> workers_;
#ifdef __linux__
    cpu_set_t allowed_;
    int left_ = -1;
#endif
    Job job_ = nullptr;
    void* argument_ = nullptr;
    int active_ = 0;
    alignas(64) std::atomic<uint32_t> generation_{0};
    alignas(64) std::atomic<int> running_{0};
};

}  // namespace tandem
