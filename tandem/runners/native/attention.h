// Attention of a few queries over one KV head, each up to its own position. A query's sums run over positions in order
// and end at its own: they depend on nothing that stands behind it, nor on the other queries.
#pragma once
#include "cache.h"
#include <cmath>

namespace tandem {

constexpr int AHEAD = 2;    // blocks of 16 positions fetched ahead: the processor does not foresee the jump to the next span
constexpr int QUERIES = 4;  // queries that share a pass over the keys and values

template <class D> struct Query {
    const typename D::stored* from;  // [head_dim]
    typename D::stored* to;          // [head_dim]
    int position;                    // attends to positions 0 .. position
};

// A thread's own memory for the scores of QUERIES queries over `length` positions.
template <class D> struct Scores {
    explicit Scores(int length) : stride(up(length, LANES)), scores(QUERIES * stride), weights(QUERIES * stride) {}
    size_t stride;
    Buffer<float> scores;
    Buffer<typename D::stored> weights;
};

template <class D, int N>
void attend(const LayerCache<D>& cache, int slot, int head, int head_dim, float scale, const Query<D>* queries, Scores<D>& scratch) {
    typedef typename D::unit unit;
    int last = 0, first = queries[0].position;
#pragma GCC unroll 4
    for (int q = 0; q < N; q++) last = std::max(last, queries[q].position), first = std::min(first, queries[q].position);
    const int blocks = last / LANES + 1, units = head_dim / D::PER_UNIT, whole = (first + 1) / D::PER_UNIT;
    v16f top[N];
#pragma GCC unroll 4
    for (int q = 0; q < N; q++) top[q] = all(-INFINITY);
    const v16i lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int block = 0; block < blocks; block++) {
        const unit* keys = cache.keys(slot, head, block);
        const char* soon = reinterpret_cast<const char*>(cache.keys(slot, head, block + AHEAD < blocks ? block + AHEAD : block));
        v16f dot[N];
#pragma GCC unroll 4
        for (int q = 0; q < N; q++) dot[q] = v16f{};
        for (int i = 0; i < units; i++) {
            __builtin_prefetch(soon + i * 64);
            v16u key = load<v16u>(keys + size_t(i) * LANES);
#pragma GCC unroll 4
            for (int q = 0; q < N; q++) dot[q] = D::multiply_add(dot[q], load<unit>(queries[q].from + i * D::PER_UNIT), key);
        }
#pragma GCC unroll 4
        for (int q = 0; q < N; q++) {
            v16f scaled = select(lanes + block * LANES <= queries[q].position, dot[q] * scale, all(-INFINITY));
            top[q] = select(scaled > top[q], scaled, top[q]);
            store(&scratch.scores[q * scratch.stride + block * LANES], scaled);
        }
    }
    float total[N];
#pragma GCC unroll 4
    for (int q = 0; q < N; q++) {
        v16f most = all(largest(top[q])), mass = v16f{};
        for (int block = 0; block <= queries[q].position / LANES; block++) {
            v16f weight = exponential(load<v16f>(&scratch.scores[q * scratch.stride + block * LANES]) - most);
            mass += weight;
            D::keep(&scratch.weights[q * scratch.stride + block * LANES], weight);
        }
        total[q] = sum(mass);
    }
    for (int d = 0; d < head_dim; d += 2 * LANES) {
        const int wide = head_dim - d >= 2 * LANES ? 2 : 1, other = wide == 2 ? LANES : 0;
        v16f out[N][2];
#pragma GCC unroll 4
        for (int q = 0; q < N; q++) out[q][0] = out[q][1] = v16f{};
        // Positions that all queries see need no look at each; what stands behind a query's own is another sequence's,
        // and not even times 0 may it count: it may be NaN.
        for (int i = 0; i < whole;) {
            const unit* values = cache.values(slot, head, i) + d;
            const unit* soon = cache.values(slot, head, std::min(whole - 1, i + AHEAD * LANES / D::PER_UNIT)) + d;
            for (const int end = std::min(whole, i + LANES / D::PER_UNIT); i < end; i++, values += head_dim, soon += head_dim) {
                __builtin_prefetch(soon);
                __builtin_prefetch(soon + other);
                v16u near = load<v16u>(values), far = load<v16u>(values + other);
#pragma GCC unroll 4
                for (int q = 0; q < N; q++) {
                    unit weight = load<unit>(&scratch.weights[q * scratch.stride + i * D::PER_UNIT]);
                    out[q][0] = D::multiply_add(out[q][0], weight, near);
                    out[q][1] = D::multiply_add(out[q][1], weight, far);
                }
            }
        }
        for (int i = whole; i <= last / D::PER_UNIT; i++) {
            const unit* values = cache.values(slot, head, i) + d;
            v16u near = load<v16u>(values), far = load<v16u>(values + other);
            v16u near_half = near & 0xffffu, far_half = far & 0xffffu;
#pragma GCC unroll 4
            for (int q = 0; q < N; q++) {
                int behind = queries[q].position - i * D::PER_UNIT;
                if (behind < 0) continue;
                bool cut = D::PER_UNIT == 2 && behind == 0;
                unit weight = load<unit>(&scratch.weights[q * scratch.stride + i * D::PER_UNIT]);
                out[q][0] = D::multiply_add(out[q][0], weight, cut ? near_half : near);
                out[q][1] = D::multiply_add(out[q][1], weight, cut ? far_half : far);
            }
        }
#pragma GCC unroll 4
        for (int q = 0; q < N; q++) {
            D::keep(queries[q].to + d, out[q][0] / total[q]);
            if (wide == 2) D::keep(queries[q].to + d + LANES, out[q][1] / total[q]);
        }
    }
}

template <class D>
void attend(const LayerCache<D>& cache, int slot, int head, int head_dim, float scale, const Query<D>* queries, int count, Scores<D>& scratch) {
    switch (count) {
        case 1: return attend<D, 1>(cache, slot, head, head_dim, scale, queries, scratch);
        case 2: return attend<D, 2>(cache, slot, head, head_dim, scale, queries, scratch);
        case 3: return attend<D, 3>(cache, slot, head, head_dim, scale, queries, scratch);
        case 4: return attend<D, 4>(cache, slot, head, head_dim, scale, queries, scratch);
    }
}

}  // namespace tandem
