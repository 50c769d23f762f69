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

// One layer's part. K, in which keys and values are stored: Float32, Bfloat16 or ShortCache, of `number_bytes` a number.
class LayerCache {
public:
    LayerCache(const SlotMemory& memory, int layer, int kv_heads, int head_dim, size_t number_bytes)
        : heads_(kv_heads), dim_(head_dim), number_(number_bytes), first_(memory.slot(0) + size_t(layer) * kv_heads * 2 * SPAN * head_dim * number_bytes),
          slot_(memory.slot_bytes()), group_(memory.group_bytes()) {}

    // Keys of 16 positions: unit i of position p at [i * 16 + p].
    template <class K> const typename K::unit* keys(int slot, int head, int block) const {
        return reinterpret_cast<const typename K::unit*>(keys_at(slot, head, block * LANES));
    }
    // Values of PER_UNIT neighbouring positions: value d at [d]; the group's other positions follow.
    template <class K> const typename K::unit* values(int slot, int head, int unit_of_positions) const {
        return reinterpret_cast<const typename K::unit*>(values_at(slot, head, unit_of_positions * K::PER_UNIT));
    }
    template <class K> void write(int slot, int head, int position, const typename K::number* key, const typename K::number* value) {
        typedef typename K::stored stored;
        stored* k = reinterpret_cast<stored*>(keys_at(slot, head, position / LANES * LANES)) + position % LANES * K::PER_UNIT;
        stored* v = reinterpret_cast<stored*>(values_at(slot, head, position / K::PER_UNIT * K::PER_UNIT)) + position % K::PER_UNIT;
        for (int d = 0; d < dim_; d += LANES) {
            stored keys[LANES], values[LANES];
            K::shorten(keys, key + d), K::shorten(values, value + d);
            for (int i = 0; i < LANES; i += K::PER_UNIT) std::memcpy(k + (d + i) * LANES, keys + i, sizeof(typename K::unit));
            for (int i = 0; i < LANES; i++) v[(d + i) * K::PER_UNIT] = values[i];
        }
    }

    // Copies keys and values of 16 positions of all heads from a page, or to it; returns the page's end.
    char* copy(int slot, int block, char* page, bool from) const {
        for (int head = 0; head < heads_; head++)
            for (char* part : {keys_at(slot, head, block * LANES), values_at(slot, head, block * LANES)}) {
                std::memcpy(from ? part : page, from ? page : part, block_bytes());
                page += block_bytes();
            }
        return page;
    }
    size_t page_bytes() const { return 2 * heads_ * block_bytes(); }

private:
    size_t block_bytes() const { return LANES * dim_ * number_; }
    char* keys_at(int slot, int head, int position) const {
        return first_ + slot * slot_ + position / SPAN * group_ + (size_t(head) * 2 * SPAN + position % SPAN) * dim_ * number_;
    }
    char* values_at(int slot, int head, int position) const { return keys_at(slot, head, position) + SPAN * dim_ * number_; }

    int heads_;
    size_t dim_, number_;
    char* first_;
    size_t slot_, group_;  // bytes from one to the next
};

constexpr int AHEAD = 2;    // blocks of 16 keys or units of values fetched ahead: the processor does not foresee the jump to the next span
constexpr int QUERIES = WIDTH == 16 ? 6 : 4;        // queries that share a pass over the keys and values
constexpr int VECTORS = WIDTH == 16 ? 4 : SIXTEEN;  // registers of them, whose products with QUERIES queries are summed at once
static_assert(SPAN % (VECTORS * WIDTH) == 0);

// Keeps what N queries need in a register: GCC would read it for each of them. Few wait for memory, not for reads.
template <int N> inline vu kept(vu value) {
    if constexpr (WIDTH == 16 && N > 3) asm("" : "+v"(value));
    return value;
}

template <class K> struct Query {
    const typename K::number* from;  // [head_dim]
    typename K::number* to;          // [head_dim]
    int begin, position;             // attends to positions begin .. position
};

// A thread's memory for scores of QUERIES queries over `length` positions.
template <class Number> struct Scores {
    explicit Scores(int length) : stride(up(length, LANES)), scores(QUERIES * stride), weights(QUERIES * stride) {}
    size_t stride;
    Buffer<float> scores;
    Buffer<Number> weights;
};

// Where the keys and values of a step's queries lie.
struct Seen {
    const LayerCache& cache;
    int slot, head, head_dim, first, last;  // first, last: the lowest and the highest position of a query
    int begin, whole;                       // the lowest and the highest position that a query begins at
    float cap;                              // of scores, 0 for none
    bool again;                             // other queries have just read them
};

// Multiplies registers at(b) of keys or values by each query's factors of(q) and adds the products to sums[q][b], in the order of
// the numbers in a unit.
template <class K, int N, int B, class At, class Of> __attribute__((always_inline)) inline void add(vf (*sums)[B], At at, Of of) {
#pragma GCC unroll 2
    for (int part = 0; part < K::PARTS; part++) {
        vu read[B];
#pragma GCC unroll 6
        for (int b = 0; b < B; b++) read[b] = kept<N>(K::part(at(b), part));
#pragma GCC unroll 6
        for (int q = 0; q < N; q++) {
            const auto factor = K::everywhere(load<typename K::factor>(of(q) + part));
#pragma GCC unroll 6
            for (int b = 0; b < B; b++) sums[q][b] = K::multiply_add(sums[q][b], factor, read[b]);
        }
    }
}

// Scores of N queries for B registers of positions of one span from `block` on; `top`: maxima so far, by lane.
template <class K, int N, int B>
inline void score(const Seen& seen, int block, float scale, const Query<K>* queries, Scores<typename K::number>& scratch, vf* top) {
    typedef typename K::unit unit;
    const int units = seen.head_dim / K::PER_UNIT, blocks = seen.last / LANES + 1;
    const unit* keys = seen.cache.keys<K>(seen.slot, seen.head, block);
    const char* soon = reinterpret_cast<const char*>(seen.cache.keys<K>(seen.slot, seen.head, std::min(block + std::max(AHEAD, B / SIXTEEN), blocks - 1)));
    const size_t apart = size_t(units) * LANES;
    const v16i lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const bool all_seen = block * LANES >= seen.whole && block * LANES + B * WIDTH <= seen.first + 1;
    vf dot[N][B];
#pragma GCC unroll 6
    for (int q = 0; q < N; q++)
#pragma GCC unroll 6
        for (int b = 0; b < B; b++) dot[q][b] = vf{};
    for (int i = 0; i < units; i++) {
        const auto at = [&](int b) { return b / SIXTEEN * apart + size_t(i) * LANES + b % SIXTEEN * WIDTH; };
#pragma GCC unroll 6
        for (int b = 0; b < B; b += SIXTEEN)
            if (!seen.again) __builtin_prefetch(soon + at(b) * sizeof(unit));
        add<K, N, B>(dot, [&](int b) { return load<vu>(keys + at(b)); }, [&](int q) { return queries[q].from + i * K::PER_UNIT; });
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
template <class K, int N, int W>
inline void gather(const Seen& seen, int d, const Query<K>* queries, const Scores<typename K::number>& scratch, const float* total) {
    typedef typename K::unit unit;
    const int begin = (seen.whole + K::PER_UNIT - 1) / K::PER_UNIT, whole = std::max((seen.first + 1) / K::PER_UNIT, begin);
    vf out[N][W];
#pragma GCC unroll 6
    for (int q = 0; q < N; q++)
#pragma GCC unroll 6
        for (int w = 0; w < W; w++) out[q][w] = vf{};
    const auto weights = [&](int q, int unit) { return &scratch.weights[q * scratch.stride + unit * K::PER_UNIT]; };
    // Positions visible to all queries need no checks. Others' values may be NaN, and must not even count times 0.
    auto each_looked_at = [&](int i) __attribute__((always_inline)) {  // else the sums lie in memory
        const unit* values = seen.cache.values<K>(seen.slot, seen.head, i) + d;
#pragma GCC unroll 6
        for (int q = 0; q < N; q++) {
            const int behind = queries[q].position - i * K::PER_UNIT, before = queries[q].begin - i * K::PER_UNIT;
            if (behind < 0 || before >= K::PER_UNIT) continue;
            const vu halves = vu{} + ((K::PER_UNIT == 2 && behind == 0 ? 0xffffu : 0xffffffffu) & (before == 1 ? 0xffff0000u : 0xffffffffu));
            add<K, 1, W>(out + q, [&](int w) { return load<vu>(values + w * WIDTH) & halves; }, [&](int) { return weights(q, i); });
        }
    };
    for (int i = seen.begin / K::PER_UNIT; i < std::min(begin, seen.last / K::PER_UNIT + 1); i++) each_looked_at(i);
    for (int i = begin; i < whole;) {
        const unit* values = seen.cache.values<K>(seen.slot, seen.head, i) + d;
        const unit* soon = seen.cache.values<K>(seen.slot, seen.head, std::min(whole - 1, i + AHEAD * LANES)) + d;
        for (const int end = std::min(whole, (i / (LANES / K::PER_UNIT) + 1) * (LANES / K::PER_UNIT)); i < end; i++, values += seen.head_dim, soon += seen.head_dim) {
#pragma GCC unroll 6
            for (int w = 0; w < W; w += SIXTEEN)
                if (!seen.again) __builtin_prefetch(soon + w * WIDTH);
            add<K, N, W>(out, [&](int w) { return load<vu>(values + w * WIDTH); }, [&](int q) { return weights(q, i); });
        }
    }
    for (int i = whole; i <= seen.last / K::PER_UNIT; i++) each_looked_at(i);
#pragma GCC unroll 6
    for (int q = 0; q < N; q++)
#pragma GCC unroll 6
        for (int w = 0; w < W; w += SIXTEEN) K::keep(queries[q].to + d + w * WIDTH, load<v16f>(&out[q][w]) / all(total[q]));
}

template <class K, int N>
void attend(Seen seen, float scale, const Query<K>* queries, Scores<typename K::number>& scratch) {
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
    for (constexpr int more = VECTORS / SIXTEEN; block + more <= blocks; block += more) score<K, N, VECTORS>(seen, block, scale, queries, scratch, top);
    if constexpr (VECTORS > SIXTEEN)
        for (; block < blocks; block++) score<K, N, SIXTEEN>(seen, block, scale, queries, scratch, top);
    float total[N];
#pragma GCC unroll 6
    for (int q = 0; q < N; q++) {
        const int begin = queries[q].begin / LANES;
        const float most = largest(top[q]), *scores = &scratch.scores[q * scratch.stride + begin * LANES];
        vf mass[SIXTEEN]{}, weight[SIXTEEN];
        for (int block = begin; block <= queries[q].position / LANES; block++, scores += LANES) {
            by_register([&](int r) { mass[r] += weight[r] = bounded_exponential(load<vf>(scores + r * WIDTH) - most); });
            K::keep(&scratch.weights[q * scratch.stride + block * LANES], load<v16f>(weight));
        }
        total[q] = sum(load<v16f>(mass));
    }
    int d = 0;
    for (; d + VECTORS * WIDTH <= seen.head_dim; d += VECTORS * WIDTH) gather<K, N, VECTORS>(seen, d, queries, scratch, total);
    if constexpr (VECTORS > SIXTEEN)
        for (; d < seen.head_dim; d += LANES) gather<K, N, SIXTEEN>(seen, d, queries, scratch, total);
}

template <class K, int N = QUERIES>
void attend(const Seen& seen, float scale, const Query<K>* queries, int count, Scores<typename K::number>& scratch) {
    if (count == N) return attend<K, N>(seen, scale, queries, scratch);
    if constexpr (N > 1) attend<K, N - 1>(seen, scale, queries, count, scratch);
}

}  // namespace tandem
