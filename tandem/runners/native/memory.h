// Memory that is read as a stream: aligned, and on large pages where the system gives them.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <sys/mman.h>
#include <utility>
#include <vector>

namespace tandem {

template <class T> class Buffer {
public:
    Buffer() = default;
    explicit Buffer(size_t count) : count_(count) {
        size_t page = size_t(2) << 20, bytes = count * sizeof(T);
        size_t aligned = bytes >= page ? page : 64;
        bytes = (bytes + aligned - 1) / aligned * aligned;
        data_ = static_cast<T*>(std::aligned_alloc(aligned, bytes ? bytes : aligned));
        if (!data_) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
        if (aligned == page) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
        std::memset(data_, 0, bytes);
    }
    Buffer(Buffer&& other) noexcept { *this = std::move(other); }
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(count_, other.count_);
        return *this;
    }
    ~Buffer() { std::free(data_); }
    T* data() const { return data_; }
    T& operator[](size_t i) const { return data_[i]; }
    size_t size() const { return count_; }

private:
    T* data_ = nullptr;
    size_t count_ = 0;
};

// Memory for what lives as long as a model: taken piece by piece from large blocks, so that small matrices lie on large
// pages too, one behind the other as a step reads them. Zeroed.
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

// Memory that will be read soon, fetched bit by bit while there is nothing else to do.
struct Soon {
    const char *at = nullptr, *end = nullptr;
    void fetch(int lines) {
        for (; lines && at < end; lines--, at += 64) __builtin_prefetch(at, 0, 2);
    }
};

inline size_t up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace tandem
