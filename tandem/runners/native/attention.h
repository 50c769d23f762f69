// The KV cache and attention of a few queries over one KV head, each within its window and up to its own position. Keys
// are a packed matrix with positions as outputs, values one with positions as inputs, so attention uses the sums of linear
// layers, in order of positions: they depend on no later position and no other query. Rollback is free.
#pragma once
#include "system.h"
#include "vectors.h"
#include <cmath>

namespace tandem {

constexpr int SPAN = 64;  // neighbouring positions of a head that lie together

// All layers' slots, on demand: keys and values of all layers and heads for SPAN positions, then for the next ones. So
// a prefix is one range of few large pages: at position 4,096, pages of 4 KiB cost 7 % of a step.
class SlotMemory {
public:
    SlotMemory(int slots, int length, size_t position_bytes)
        : group_bytes_(SPAN * position_bytes), page_(groups(length) * group_bytes_ < MANY * LARGE_PAGE ? size_t(sysconf(_SC_PAGESIZE)) : LARGE_PAGE),
          slot_bytes_(taken(length)), bytes_(up(slots * slot_bytes_, page_)), data_(mapped(bytes_, page_, MAP_NORESERVE)) {}
    SlotMemory(const SlotMemory&) = delete;
    ~SlotMemory() { munmap(data_, bytes_); }

    char* slot(int slot) const { return data_ + slot * slot_bytes_; }
    size_t group_bytes() const { return group_bytes_; }
    size_t slot_bytes() const { return slot_bytes_; }
    // Bytes of pages for a slot's first `positions`.
    size_t taken(int positions) const { return up(groups(positions) * group_bytes_, page_); }
    // Frees a slot's memory beyond its first `positions`.
    void give_back(int slot, int positions) {
        const size_t from = taken(positions);
        if (from < slot_bytes_) madvise(this->slot(slot) + from, slot_bytes_ - from, MADV_DONTNEED);
    }

private:
    static constexpr size_t MANY = 4;  // large pages: a slot of fewer is given in small ones
    static size_t groups(int positions) { return up(positions, SPAN) / SPAN; }

    size_t group_bytes_, page_, slot_bytes_, bytes_;
    char* data_;
};

// The part of one layer.
template <class D> class LayerCache {
public:
    typedef typename D::stored stored;
    typedef typename D::unit unit;

    LayerCache(const SlotMemory& memory, int layer, int kv_heads, int head_dim)
        : heads_(kv_heads), dim_(head_dim), first_(reinterpret_cast<stored*>(memory.slot(0)) + size_t(layer) * kv_heads * 2 * SPAN * head_dim),
          slot_(memory.slot_bytes() / sizeof(stored)), group_(memory.group_bytes() / sizeof(stored)) {}

    // Keys of 16 positions: unit i of position p at [i * 16 + p].
    const unit* keys(int slot, int head, int block) const {
        return reinterpret_cast<const unit*>(keys_at(slot, head, block * LANES));
    }
    // Values of PER_UNIT neighbouring positions: value d at [d]; the group's other positions follow.
    const unit* values(int slot, int head, int unit_of_positions) const {
        return reinterpret_cast<const unit*>(values_at(slot, head, unit_of_positions * D::PER_UNIT));
    }
    void write(int slot, int head, int position, const stored* key, const stored* value) {
        stored* k = keys_at(slot, head, position / LANES * LANES);
        for (int i = 0; i < dim_ / D::PER_UNIT; i++)
            std::memcpy(k + (size_t(i) * LANES + position % LANES) * D::PER_UNIT, key + i * D::PER_UNIT, sizeof(unit));
        stored* v = values_at(slot, head, position / D::PER_UNIT * D::PER_UNIT);
        for (int d = 0; d < dim_; d++) v[d * D::PER_UNIT + position % D::PER_UNIT] = value[d];
    }

    // Copies keys and values of 16 positions of all heads from a page, or to it; returns the page's end.
    char* copy(int slot, int block, char* page, bool from) const {
        for (int head = 0; head < heads_; head++)
            for (stored* part : {keys_at(slot, head, block * LANES), values_at(slot, head, block * LANES)}) {
                std::memcpy(from ? reinterpret_cast<char*>(part) : page, from ? page : reinterpret_cast<char*>(part), block_bytes());
                page += block_bytes();
            }
        return page;
    }
    size_t page_bytes() const { return 2 * heads_ * block_bytes(); }

private:
    size_t block_bytes() const { return size_t(LANES) * dim_ * sizeof(stored); }
    stored* keys_at(int slot, int head, int position) const {
        return first_ + slot * slot_ + position / SPAN * group_ + (size_t(head) * 2 * SPAN + position % SPAN) * dim_;
    }
    stored* values_at(int slot, int head, int position) const { return keys_at(slot, head, position) + SPAN * dim_; }

    int heads_, dim_;
    stored* first_;
    size_t slot_, group_;  // from one to the next
};

constexpr int AHEAD = 2;    // blocks of 16 positions fetched ahead: the processor does not foresee the jump to the next span
constexpr int QUERIES = WIDTH == 16 ? 6 : 4;        // queries that share a pass over the keys and values
constexpr int VECTORS = WIDTH == 16 ? 4 : SIXTEEN;  // registers of them, whose products with QUERIES queries are summed at once
static_assert(SPAN % (VECTORS * WIDTH) == 0);

// Keeps what N queries need in a register: GCC would read it for each of them. Few wait for memory, not for reads.
template <int N> inline vu kept(vu value) {
    if constexpr (WIDTH == 16 && N > 3) asm("" : "+v"(value));
    return value;
}

template <class D> struct Query {
    const typename D::stored* from;  // [head_dim]
    typename D::stored* to;          // [head_dim]
    int begin, position;             // attends to positions begin .. position
};

// A thread's memory for scores of QUERIES queries over `length` positions.
template <class D> struct Scores {
    explicit Scores(int length) : stride(up(length, LANES)), scores(QUERIES * stride), weights(QUERIES * stride) {}
    size_t stride;
    Buffer<float> scores;
    Buffer<typename D::stored> weights;
};

// Where the keys and values of a step's queries lie.
template <class D> struct Seen {
    const LayerCache<D>& cache;
    int slot, head, head_dim, first, last;  // first, last: the lowest and the highest position of a query
    int begin, whole;                       // the lowest and the highest position that a query begins at
    float cap;                              // of scores, 0 for none
    bool again;                             // other queries have just read them
};

// Scores of N queries for B registers of positions of one span from `block` on; `top`: maxima so far, by lane.
template <class D, int N, int B>
inline void score(const Seen<D>& seen, int block, float scale, const Query<D>* queries, Scores<D>& scratch, vf* top) {
    typedef typename D::unit unit;
    const int units = seen.head_dim / D::PER_UNIT, blocks = seen.last / LANES + 1;
    const unit* keys = seen.cache.keys(seen.slot, seen.head, block);
    const char* soon = reinterpret_cast<const char*>(seen.cache.keys(seen.slot, seen.head, std::min(block + std::max(AHEAD, B / SIXTEEN), blocks - 1)));
    const size_t apart = size_t(units) * LANES;
    const v16i lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const bool all_seen = block * LANES >= seen.whole && block * LANES + B * WIDTH <= seen.first + 1;
    vf dot[N][B];
#pragma GCC unroll 6
    for (int q = 0; q < N; q++)
#pragma GCC unroll 6
        for (int b = 0; b < B; b++) dot[q][b] = vf{};
    for (int i = 0; i < units; i++) {
        vu key[B];
#pragma GCC unroll 6
        for (int b = 0; b < B; b++) {
            const size_t at = b / SIXTEEN * apart + size_t(i) * LANES + b % SIXTEEN * WIDTH;
            if (!seen.again && b % SIXTEEN == 0) __builtin_prefetch(soon + at * sizeof(unit));
            key[b] = kept<N>(load<vu>(keys + at));
        }
#pragma GCC unroll 6
        for (int q = 0; q < N; q++) {
            const auto value = D::everywhere(load<unit>(queries[q].from + i * D::PER_UNIT));
#pragma GCC unroll 6
            for (int b = 0; b < B; b++) dot[q][b] = D::multiply_add(dot[q][b], value, key[b]);
        }
    }
#pragma GCC unroll 6
    for (int q = 0; q < N; q++)
#pragma GCC unroll 6
        for (int b = 0; b < B; b++) {
            const int position = block * LANES + b * WIDTH;
            const vi at = load<vi>(&lanes) + position;
            vf scaled = dot[q][b] * scale;
            if (seen.cap) scaled = seen.cap * hyperbolic_tangent_of_register(scaled / seen.cap);
            if (!all_seen) scaled = select((at <= queries[q].position) & (at >= queries[q].begin), scaled, vf{} - INFINITY);
            top[q] = select(scaled > top[q], scaled, top[q]);
            store(&scratch.scores[q * scratch.stride + position], scaled);
        }
}

// Weighted sums of W registers of values from `d` on, divided by each query's total.
template <class D, int N, int W>
inline void gather(const Seen<D>& seen, int d, const Query<D>* queries, const Scores<D>& scratch, const float* total) {
    typedef typename D::unit unit;
    const int begin = (seen.whole + D::PER_UNIT - 1) / D::PER_UNIT, whole = std::max((seen.first + 1) / D::PER_UNIT, begin);
    vf out[N][W];
#pragma GCC unroll 6
    for (int q = 0; q < N; q++)
#pragma GCC unroll 6
        for (int w = 0; w < W; w++) out[q][w] = vf{};
    // Positions visible to all queries need no checks. Others' values may be NaN, and must not even count times 0.
    auto each_looked_at = [&](int i) __attribute__((always_inline)) {  // else the sums lie in memory
        const unit* values = seen.cache.values(seen.slot, seen.head, i) + d;
#pragma GCC unroll 6
        for (int q = 0; q < N; q++) {
            const int behind = queries[q].position - i * D::PER_UNIT, before = queries[q].begin - i * D::PER_UNIT;
            if (behind < 0 || before >= D::PER_UNIT) continue;
            const vu halves = vu{} + ((D::PER_UNIT == 2 && behind == 0 ? 0xffffu : 0xffffffffu) & (before == 1 ? 0xffff0000u : 0xffffffffu));
            const auto weight = D::everywhere(load<unit>(&scratch.weights[q * scratch.stride + i * D::PER_UNIT]));
#pragma GCC unroll 6
            for (int w = 0; w < W; w++) out[q][w] = D::multiply_add(out[q][w], weight, load<vu>(values + w * WIDTH) & halves);
        }
    };
    for (int i = seen.begin / D::PER_UNIT; i < std::min(begin, seen.last / D::PER_UNIT + 1); i++) each_looked_at(i);
    for (int i = begin; i < whole;) {
        const unit* values = seen.cache.values(seen.slot, seen.head, i) + d;
        const unit* soon = seen.cache.values(seen.slot, seen.head, std::min(whole - 1, i + AHEAD * LANES / D::PER_UNIT)) + d;
        for (const int end = std::min(whole, (i / (LANES / D::PER_UNIT) + 1) * (LANES / D::PER_UNIT)); i < end; i++, values += seen.head_dim, soon += seen.head_dim) {
            vu value[W];
#pragma GCC unroll 6
            for (int w = 0; w < W; w++) {
                if (!seen.again && w % SIXTEEN == 0) __builtin_prefetch(soon + w * WIDTH);
                value[w] = kept<N>(load<vu>(values + w * WIDTH));
            }
#pragma GCC unroll 6
            for (int q = 0; q < N; q++) {
                const auto weight = D::everywhere(load<unit>(&scratch.weights[q * scratch.stride + i * D::PER_UNIT]));
#pragma GCC unroll 6
                for (int w = 0; w < W; w++) out[q][w] = D::multiply_add(out[q][w], weight, value[w]);
            }
        }
    }
    for (int i = whole; i <= seen.last / D::PER_UNIT; i++) each_looked_at(i);
#pragma GCC unroll 6
    for (int q = 0; q < N; q++)
#pragma GCC unroll 6
        for (int w = 0; w < W; w += SIXTEEN) D::keep(queries[q].to + d + w * WIDTH, load<v16f>(&out[q][w]) / all(total[q]));
}

template <class D, int N>
void attend(Seen<D> seen, float scale, const Query<D>* queries, Scores<D>& scratch) {
    seen.first = queries[0].position, seen.begin = queries[0].begin;
#pragma GCC unroll 6
    for (int q = 0; q < N; q++) {
        seen.last = std::max(seen.last, queries[q].position), seen.first = std::min(seen.first, queries[q].position);
        seen.whole = std::max(seen.whole, queries[q].begin), seen.begin = std::min(seen.begin, queries[q].begin);
    }
    vf top[N];
    std::fill(top, top + N, vf{} - INFINITY);
    int block = seen.begin / (VECTORS * WIDTH) * (VECTORS / SIXTEEN);
    const int blocks = seen.last / LANES + 1;
    for (constexpr int more = VECTORS / SIXTEEN; block + more <= blocks; block += more) score<D, N, VECTORS>(seen, block, scale, queries, scratch, top);
    if constexpr (VECTORS > SIXTEEN)
        for (; block < blocks; block++) score<D, N, SIXTEEN>(seen, block, scale, queries, scratch, top);
    float total[N];
#pragma GCC unroll 6
    for (int q = 0; q < N; q++) {
        const int begin = queries[q].begin / LANES;
        const float most = largest(top[q]), *scores = &scratch.scores[q * scratch.stride + begin * LANES];
        vf mass[SIXTEEN]{}, weight[SIXTEEN];
        for (int block = begin; block <= queries[q].position / LANES; block++, scores += LANES) {
            by_register([&](int r) { mass[r] += weight[r] = bounded_exponential(load<vf>(scores + r * WIDTH) - most); });
            D::keep(&scratch.weights[q * scratch.stride + block * LANES], load<v16f>(weight));
        }
        total[q] = sum(load<v16f>(mass));
    }
    int d = 0;
    for (; d + VECTORS * WIDTH <= seen.head_dim; d += VECTORS * WIDTH) gather<D, N, VECTORS>(seen, d, queries, scratch, total);
    if constexpr (VECTORS > SIXTEEN)
        for (; d < seen.head_dim; d += LANES) gather<D, N, SIXTEEN>(seen, d, queries, scratch, total);
}

template <class D, int N = QUERIES>
void attend(const Seen<D>& seen, float scale, const Query<D>* queries, int count, Scores<D>& scratch) {
    if (count == N) return attend<D, N>(seen, scale, queries, scratch);
    if constexpr (N > 1) attend<D, N - 1>(seen, scale, queries, count, scratch);
}

}  // namespace tandem
