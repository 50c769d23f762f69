// Attention of a few queries over one KV head, each up to its own position. A query's sums run over positions in order
// and end at its own: they depend on nothing that stands behind it, nor on the other queries.
#pragma once
#include "attention_sums.h"
#include <cmath>

namespace tandem {

template <class D, int N>
void attend(const LayerCache<D>& cache, int slot, int head, int head_dim, float scale, const Query<D>* queries, Scores<D>& scratch) {
    Seen<D> seen{cache, slot, head, head_dim, queries[0].position, 0};
#pragma GCC unroll 4
    for (int q = 0; q < N; q++) seen.last = std::max(seen.last, queries[q].position), seen.first = std::min(seen.first, queries[q].position);
    vf top[N];
#pragma GCC unroll 4
    for (int q = 0; q < N; q++) top[q] = vf{} - INFINITY;
    int block = 0;
    const int blocks = seen.last / LANES + 1;
    for (constexpr int more = VECTORS / SIXTEEN; block + more <= blocks; block += more) score<D, N, VECTORS>(seen, block, scale, queries, scratch, top);
    if constexpr (VECTORS > SIXTEEN)
        for (; block < blocks; block++) score<D, N, SIXTEEN>(seen, block, scale, queries, scratch, top);
    float total[N];
#pragma GCC unroll 4
    for (int q = 0; q < N; q++) {
        const float most = largest(top[q]), *scores = &scratch.scores[q * scratch.stride];
        vf mass[SIXTEEN]{}, weight[SIXTEEN];
        for (int block = 0; block <= queries[q].position / LANES; block++, scores += LANES) {
            by_register([&](int r) { mass[r] += weight[r] = exponential_of_register(load<vf>(scores + r * WIDTH) - most); });
            D::keep(&scratch.weights[q * scratch.stride + block * LANES], load<v16f>(weight));
        }
        total[q] = sum(load<v16f>(mass));
    }
    int d = 0;
    for (; d + VECTORS * WIDTH <= head_dim; d += VECTORS * WIDTH) gather<D, N, VECTORS>(seen, d, queries, scratch, total);
    if constexpr (VECTORS > SIXTEEN)
        for (; d < head_dim; d += LANES) gather<D, N, SIXTEEN>(seen, d, queries, scratch, total);
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
