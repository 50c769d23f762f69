// The KV cache. Keys are a packed matrix with positions as outputs, values one with positions as inputs, so attention
// uses the sums of linear layers. Rollback is free.
#pragma once
#include "memory.h"
#include "vectors.h"

namespace tandem {

constexpr int SPAN = 64;  // neighbouring positions of a head that lie together

// All layers' slots, on demand: keys and values of all layers and heads for SPAN positions, then for the next ones. So
// a prefix is one range of few large pages: at position 4,096, pages of 4 KiB cost 7 % of a step.
class SlotMemory {
public:
    SlotMemory(int slots, int length, size_t position_bytes)
        : group_bytes_(SPAN * position_bytes), page_(groups(length) * group_bytes_ < MANY * OnDemand::LARGE ? OnDemand::small() : OnDemand::LARGE),
          slot_bytes_(taken(length)), memory_(slots * slot_bytes_, page_) {}

    char* slot(int slot) const { return memory_.data() + slot * slot_bytes_; }
    size_t group_bytes() const { return group_bytes_; }
    size_t slot_bytes() const { return slot_bytes_; }
    // Bytes of pages for a slot's first `positions`.
    size_t taken(int positions) const { return up(groups(positions) * group_bytes_, page_); }
    // Frees a slot's memory beyond its first `positions`.
    void give_back(int slot, int positions) { memory_.give_back(slot * slot_bytes_ + taken(positions), (slot + 1) * slot_bytes_); }

private:
    static constexpr size_t MANY = 4;  // large pages: a slot of fewer is given in small ones
    static size_t groups(int positions) { return up(positions, SPAN) / SPAN; }

    size_t group_bytes_, page_, slot_bytes_;
    OnDemand memory_;
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

    // Copies keys and values of 16 positions of all heads between slots and a page; returns the page's end.
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
            for (stored* part : {keys_at(slot, head, block * LANES), values_at(slot, head, block * LANES)}) use(part);
    }
    stored* keys_at(int slot, int head, int position) const {
        return first_ + slot * slot_ + position / SPAN * group_ + (size_t(head) * 2 * SPAN + position % SPAN) * dim_;
    }
    stored* values_at(int slot, int head, int position) const { return keys_at(slot, head, position) + SPAN * dim_; }

    int heads_, dim_;
    stored* first_;
    size_t slot_, group_;  // from one to the next
};

}  // namespace tandem
