// Threads that run one function together, and aligned memory for sequential reads, on large pages if available.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

namespace tandem {

inline size_t up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

constexpr size_t LARGE_PAGE = size_t(2) << 20;

// Zeroed memory from the system, allocated on first write, on pages of `page` bytes: malloc's may be on small ones, at half
// the speed.
inline char* mapped(size_t bytes, size_t page, int flags = 0) {
    char* at = static_cast<char*>(mmap(nullptr, bytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0));
    if (at == MAP_FAILED) throw std::bad_alloc();
    char* aligned = reinterpret_cast<char*>(up(reinterpret_cast<size_t>(at), page));
    if (aligned > at) munmap(at, aligned - at);
    if (aligned < at + page) munmap(aligned + bytes, at + page - aligned);
#ifdef MADV_HUGEPAGE
    madvise(aligned, bytes, page == LARGE_PAGE ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#endif
    return aligned;
}

// Zeroed memory.
template <class T> class Buffer {
public:
    Buffer() = default;
    explicit Buffer(size_t count) : count_(count) {
        if (maps()) {
            data_ = reinterpret_cast<T*>(mapped(bytes(), LARGE_PAGE));
            return;
        }
        data_ = static_cast<T*>(std::aligned_alloc(64, std::max<size_t>(bytes(), 64)));
        if (!data_) throw std::bad_alloc();
        std::memset(static_cast<void*>(data_), 0, bytes());
    }
    Buffer(Buffer&& other) noexcept { *this = std::move(other); }
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(count_, other.count_);
        return *this;
    }
    ~Buffer() {
        if (data_ && maps()) munmap(data_, bytes());
        else std::free(data_);
    }
    T* data() const { return data_; }
    T& operator[](size_t i) const { return data_[i]; }
    size_t size() const { return count_; }

private:
#ifdef __SANITIZE_ADDRESS__
    static constexpr bool MAPS = false;  // a sanitizer sees only malloc's
#else
    static constexpr bool MAPS = true;
#endif
    bool maps() const { return MAPS && count_ * sizeof(T) >= LARGE_PAGE; }
    size_t bytes() const { return up(count_ * sizeof(T), maps() ? LARGE_PAGE : 64); }

    T* data_ = nullptr;
    size_t count_ = 0;
};

// Zeroed memory for a model's lifetime, from large blocks, so that small matrices lie on large pages in step order.
class Arena {
public:
    template <class T> T* take(size_t count) {
        size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
        if (blocks_.empty() || used_ + bytes > blocks_.back().size()) {
            blocks_.emplace_back(std::max(bytes, BLOCK));
            used_ = 0;
        }
        char* at = blocks_.back().data() + used_;
        used_ += bytes;
        return reinterpret_cast<T*>(at);
    }

private:
    static constexpr size_t BLOCK = size_t(16) << 20;
    std::vector<Buffer<char>> blocks_;
    size_t used_ = 0;
};

// Whether the processor itself prefetches sequential reads at memory speed.
inline bool prefetches_well() {
#ifdef __x86_64__
    return !__builtin_cpu_is("intel");
#else
    return true;
#endif
}

// Prefetches memory bit by bit while idle.
struct Soon {
    const char *at = nullptr, *end = nullptr;
    void fetch(int lines) {
        const char* to = at + std::min<ptrdiff_t>(64 * lines, end - at);
        for (const char* line = at; line < to; line += 64) __builtin_prefetch(line, 0, 2);
        at = to;
    }
};

// --- a step's time by thread, phase and part, where benchmarks.phases compiles it in ---

enum Kind { EMBED, TO_QKV, ROTATE, ATTEND, TO_O, TO_GATE_UP, TO_DOWN, TO_HEAD, KINDS };
enum Part { ALL, INPUT, CLAIMS, WAITING, PARTS };  // ALL: with claims and waiting

#ifdef TANDEM_PHASES
inline int64_t spent[2][KINDS][PARTS];  // nanoseconds of two threads
class Timer {
public:
    template <class Place> Timer(const Place& place, Part part) : to_(spent[place.thread % 2][place.kind][part]) {}
    ~Timer() { to_ += now() - since_; }

private:
    static int64_t now() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }
    int64_t& to_;
    const int64_t since_ = now();
};
#else
struct Timer {
    template <class Place> Timer(const Place&, Part) {}
};
#endif

// --- threads: phase by phase, in small items: a preempted thread delays one item, not half of a phase ---

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
