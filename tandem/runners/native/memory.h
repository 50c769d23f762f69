// Aligned memory for sequential reads, on large pages if available.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>
#include <vector>

namespace tandem {

inline size_t up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

constexpr size_t LARGE_PAGE = size_t(2) << 20;

// Zeroed memory from the system, on pages of `page` bytes: malloc's may be on small ones, at half the speed.
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

// Zeroed memory that the system allocates on first write. `page`: LARGE_PAGE, or the system's.
class OnDemand {
public:
    OnDemand(size_t bytes, size_t page) : bytes_(up(bytes, page)), data_(mapped(bytes_, page, MAP_NORESERVE)) {}
    OnDemand(const OnDemand&) = delete;
    OnDemand& operator=(const OnDemand&) = delete;
    ~OnDemand() { munmap(data_, bytes_); }
    char* data() const { return data_; }
    // Gives back whole pages.
    void give_back(size_t from, size_t end) { if (from < end) madvise(data_ + from, end - from, MADV_DONTNEED); }
    static size_t small() { return size_t(sysconf(_SC_PAGESIZE)); }

private:
    size_t bytes_;
    char* data_;
};

// Prefetches memory bit by bit while idle.
struct Soon {
    const char *at = nullptr, *end = nullptr;
    void fetch(int lines) {
        const char* to = at + std::min<ptrdiff_t>(64 * lines, end - at);
        for (const char* line = at; line < to; line += 64) __builtin_prefetch(line, 0, 2);
        at = to;
    }
};

}  // namespace tandem
