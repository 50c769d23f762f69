// Log-probabilities of rows of logits: the logarithm of the sum of their exponentials, and the largest of them. Threads
// share the work in blocks; sums are added lane by lane and block by block in one order, so equal logits give equal bits.
#pragma once
#include "pool.h"
#include "vectors.h"
#include <algorithm>
#include <cmath>
#include <vector>

namespace tandem {

typedef double v8d __attribute__((vector_size(64)));
typedef int64_t v8l __attribute__((vector_size(64)));
typedef float v8f __attribute__((vector_size(32)));

inline v8d fused(v8d a, v8d b, v8d c) {
#if defined(__AVX512F__)
    return (v8d)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#else
    return a * b + c;
#endif
}

// e^x for x <= 0, to about 1e-15; what would be below 1e-300 is that. x = n ln 2 + r with |r| <= ln 2 / 2.
inline v8d exponential(v8d x) {
    const v8d least = v8d{} - 690.0, magic = v8d{} + 0x1.8p52;
    x = x < least ? least : x;
    const v8d shifted = fused(x, v8d{} + 0x1.71547652b82fep+0, magic), n = shifted - magic;
    const v8d r = fused(n, v8d{} - 0x1.ef35793c7673p-45, fused(n, v8d{} - 0x1.62e42fefa38p-1, x));
    // The series of e^r up to r^12 / 12!, in pairs of terms, which the CPU computes beside each other.
    auto pair = [r](double higher, double lower) { return fused(r, v8d{} + higher, v8d{} + lower); };
    const v8d r2 = r * r, r4 = r2 * r2, r8 = r4 * r4;
    const v8d low = fused(r4, fused(r2, pair(1.0 / 5040, 1.0 / 720), pair(1.0 / 120, 1.0 / 24)), fused(r2, pair(1.0 / 6, 0.5), r + 1.0));
    const v8d high = fused(r4, v8d{} + 1.0 / 479001600, fused(r2, pair(1.0 / 39916800, 1.0 / 3628800), pair(1.0 / 362880, 1.0 / 40320)));
    const v8d p = fused(r8, high, low);
    return (v8d)((v8l)p + ((v8l)shifted << 52));
}

inline float largest(const float* logits, int count) {
    v16f most = all(-INFINITY);
    int i = 0;
    for (; i + LANES <= count; i += LANES) {
        const v16f next = load<v16f>(logits + i);
        most = select(next > most, next, most);
    }
    return i < count ? std::max(largest(most), *std::max_element(logits + i, logits + count)) : largest(most);
}

// The sum of e^(logit - most).
inline double total(const float* logits, int count, float most) {
    v8d sums{};
    int i = 0;
    for (; i + 8 <= count; i += 8) sums += exponential(__builtin_convertvector(load<v8f>(logits + i), v8d) - double(most));
    double rest[8] = {};
    for (int lane = 0; i + lane < count; lane++) rest[lane] = exponential(v8d{} + (double(logits[i + lane]) - double(most)))[0];
    for (int lane = 0; lane < 8; lane++) sums[lane] += rest[lane];
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// A list of the `top` largest logits: ids, the largest first and the lower id first among equals. Ids come in rising order,
// or, where all before are smaller, in the order of such a list.
class Largest {
public:
    Largest(const float* logits, int top, int32_t* ids) : logits_(logits), top_(top), ids_(ids) {}
    int found() const { return found_; }
    float last() const { return logits_[ids_[found_ - 1]]; }
    void offer(int32_t id) {
        if (found_ == top_ && !(logits_[id] > last())) return;
        int at = found_ < top_ ? found_++ : found_ - 1;
        for (; at > 0 && logits_[id] > logits_[ids_[at - 1]]; at--) ids_[at] = ids_[at - 1];
        ids_[at] = id;
    }

private:
    const float* logits_;
    int top_, found_ = 0;
    int32_t* ids_;
};

// What a thread finds in a block of a row.
struct Part {
    float most = 0;
    double sum = 0;
    int found = 0;
};
constexpr int BLOCK = 8192, STRIP = 8 * LANES;

inline bool any_above(const float* logits, int count, float bound) {
    v16i above{};
    for (int i = 0; i < count; i += LANES) above |= (v16i)(load<v16f>(logits + i) > all(bound));
    const v8l pairs = (v8l)above;
    return ((pairs[0] | pairs[1]) | (pairs[2] | pairs[3])) | ((pairs[4] | pairs[5]) | (pairs[6] | pairs[7]));
}

inline Part part(const float* logits, int begin, int end, int top, int32_t* ids) {
    const float most = largest(logits + begin, end - begin);
    Largest best(logits, top, ids);
    for (int i = begin; top && i < end;) {  // strips without a candidate cost a comparison for 16 logits
        const bool full = best.found() == top;
        if (full && i + STRIP <= end && !any_above(logits + i, STRIP, best.last())) {
            i += STRIP;
            continue;
        }
        for (const int strip = std::min(end, i + STRIP); i < strip;) {
            const int stop = std::min(strip, i + LANES);
            if (best.found() < top || stop - i < LANES || any_above(logits + i, LANES, best.last()))
                for (int id = i; id < stop; id++) best.offer(id);
            i = stop;
        }
    }
    return {most, total(logits + begin, end - begin, most), best.found()};
}

// Of `rows` rows of `count` logits: totals[r] is log(sum(exp(logits[r]))), ids[r * top ...] those of the `top` largest.
inline void logprobs(Pool& pool, const float* const* logits, int rows, int count, int top, double* totals, int32_t* ids) {
    const int blocks = (count + BLOCK - 1) / BLOCK;
    std::vector<Part> parts(size_t(rows) * blocks);
    std::vector<int32_t> candidates(parts.size() * top);
    std::atomic<int> next{0};
    auto work = [&] {
        for (int i = next++; i < rows * blocks; i = next++) {
            const int begin = i % blocks * BLOCK;
            parts[i] = part(logits[i / blocks], begin, std::min(count, begin + BLOCK), top, candidates.data() + size_t(i) * top);
        }
    };
    pool.run([](void* work_, int) { (*static_cast<decltype(work)*>(work_))(); }, &work, pool.count());
    for (int r = 0; r < rows; r++) {
        const Part* own = &parts[size_t(r) * blocks];
        float most = own[0].most;
        for (int b = 1; b < blocks; b++) most = std::max(most, own[b].most);
        double sum = 0;
        Largest best(logits[r], top, ids + size_t(r) * top);
        for (int b = 0; b < blocks; b++) {
            sum += own[b].sum * std::exp(double(own[b].most) - double(most));
            for (int i = 0; i < own[b].found; i++) best.offer(candidates[(size_t(r) * blocks + b) * top + i]);
        }
        totals[r] = double(most) + std::log(sum);
    }
}

}  // namespace tandem
