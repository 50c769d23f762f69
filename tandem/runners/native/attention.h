// Attention of a few queries over one KV head, each within its window and up to its own position. Sums run in order of
// positions, so they depend on no later position and no other query.
#pragma once
#include "attention_sums.h"
#include <cmath>

namespace tandem {

template <class D, int N>
void attend(Seen<D> seen, float scale, const Query<D>* queries, Scores<D>& scratch) {
    seen.first = queries[0].position, seen.begin = queries[0].begin;
#pragma GCC unroll 4
    for (int q = 0; q < N; q++) {
        seen.last = std::max(seen.last, queries[q].position), seen.first = std::min(seen.first, queries[q].position);
        seen.whole = std::max(seen.whole, queries[q].begin), seen.begin = std::min(seen.begin, queries[q].begin);
    }
    vf top[N];
#pragma GCC unroll 4
    for (int q = 0; q < N; q++) top[q] = vf{} - INFINITY;
    int block = seen.begin / (VECTORS * WIDTH) * (VECTORS / SIXTEEN);
    const int blocks = seen.last / LANES + 1;
    for (constexpr int more = VECTORS / SIXTEEN; block + more <= blocks; block += more) score<D, N, VECTORS>(seen, block, scale, queries, scratch, top);
    if constexpr (VECTORS > SIXTEEN)
        for (; block < blocks; block++) score<D, N, SIXTEEN>(seen, block, scale, queries, scratch, top);
    float total[N];
#pragma GCC unroll 4
    for (int q = 0; q < N; q++) {
        const int begin = queries[q].begin / LANES;
        const float most = largest(top[q]), *scores = &scratch.scores[q * scratch.stride + begin * LANES];
        vf mass[SIXTEEN]{}, weight[SIXTEEN];
        for (int block = begin; block <= queries[q].position / LANES; block++, scores += LANES) {
            by_register([&](int r) { mass[r] += weight[r] = exponential_of_register(load<vf>(scores + r * WIDTH) - most); });
            D::keep(&scratch.weights[q * scratch.stride + block * LANES], load<v16f>(weight));
        }
        total[q] = sum(load<v16f>(mass));
    }
    int d = 0;
    for (; d + VECTORS * WIDTH <= seen.head_dim; d += VECTORS * WIDTH) gather<D, N, VECTORS>(seen, d, queries, scratch, total);
    if constexpr (VECTORS > SIXTEEN)
        for (; d < seen.head_dim; d += LANES) gather<D, N, SIXTEEN>(seen, d, queries, scratch, total);
}

template <class D> void attend(const Seen<D>& seen, float scale, const Query<D>* queries, int count, Scores<D>& scratch) {
    switch (count) {
        case 1: return attend<D, 1>(seen, scale, queries, scratch);
        case 2: return attend<D, 2>(seen, scale, queries, scratch);
        case 3: return attend<D, 3>(seen, scale, queries, scratch);
        case 4: return attend<D, 4>(seen, scale, queries, scratch);
    }
}

}  // namespace tandem
