// The KV cache of one layer. Keys lie as a packed matrix whose outputs are positions, values as one whose inputs are
// positions, so that attention is made of the same sums as the linear layers. Writing is a plain store: rollback is free.
#pragma once
#include "memory.h"
#include "vectors.h"

namespace tandem {

template <class D> class LayerCache {
public:
    typedef typename D::stored stored;
    typedef typename D::unit unit;

    LayerCache(Arena& arena, int slots, int kv_heads, int length, int head_dim)
        : heads_(kv_heads), dim_(head_dim), blocks_(int(up(length, LANES)) / LANES),
          keys_(arena.take<stored>(size_t(slots) * kv_heads * blocks_ * LANES * head_dim)),
          values_(arena.take<stored>(size_t(slots) * kv_heads * blocks_ * LANES * head_dim)) {}

    // Keys of 16 positions: unit i of position p at [i * 16 + p].
    const unit* keys(int slot, int head, int block) const {
        return reinterpret_cast<const unit*>(keys_ + at(slot, head) + size_t(block) * LANES * dim_);
    }
    // Values of PER_UNIT neighbouring positions: value d at [d].
    const unit* values(int slot, int head, int unit_of_positions) const {
        return reinterpret_cast<const unit*>(values_ + at(slot, head) + size_t(unit_of_positions) * D::PER_UNIT * dim_);
    }
    void write(int slot, int head, int position, const stored* key, const stored* value) {
        stored* k = keys_ + at(slot, head) + size_t(position / LANES) * LANES * dim_;
        for (int i = 0; i < dim_ / D::PER_UNIT; i++)
            std::memcpy(k + (size_t(i) * LANES + position % LANES) * D::PER_UNIT, key + i * D::PER_UNIT, sizeof(unit));
        stored* v = values_ + at(slot, head) + size_t(position / D::PER_UNIT) * D::PER_UNIT * dim_;
        for (int d = 0; d < dim_; d++) v[d * D::PER_UNIT + position % D::PER_UNIT] = value[d];
    }

    // Moves keys and values of 16 positions of all heads between the slots and a page; returns the address behind the page.
    char* save(int slot, int block, char* page) const {
        each(slot, block, [&](const stored* part) { std::memcpy(page, part, block_bytes()); page += block_bytes(); });
        return page;
    }
    const char* load(int slot, int block, const char* page) {
        each(slot, block, [&](stored* part) { std::memcpy(part, page, block_bytes()); page += block_bytes(); });
        return page;
    }
    size_t page_bytes() const { return 2 * heads_ * block_bytes(); }

private:
    size_t block_bytes() const { return size_t(LANES) * dim_ * sizeof(stored); }
    template <class Use> void each(int slot, int block, Use use) const {
        for (int head = 0; head < heads_; head++)
            for (stored* part : {keys_, values_}) use(part + at(slot, head) + size_t(block) * LANES * dim_);
    }
    size_t at(int slot, int head) const { return (size_t(slot) * heads_ + head) * blocks_ * LANES * dim_; }

    int heads_, dim_, blocks_;
    stored *keys_, *values_;
};

}  // namespace tandem
