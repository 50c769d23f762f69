// Inputs of an EAGLE-3 head's layer: a token's embedding, and the target's or its own hidden state.
#pragma once
#include "linear.h"

namespace tandem {

// Rows of `width` numbers: float32 if `wide`, else bfloat16, in any head dtype.
struct Table {
    const void* rows;
    int32_t width, wide;
};

// A row in the numbers of D. Values that are not finite become 0, or they would spread through the cache.
template <class D> void read(const Table& from, size_t row, typename D::stored* to) {
    const size_t first = row * from.width;
    for (int i = 0; i < from.width; i += LANES) {
        const v16f value = from.wide ? load<v16f>(static_cast<const float*>(from.rows) + first + i)
                                     : widen(load<v16h>(static_cast<const uint16_t*>(from.rows) + first + i));
        const v16i sound = (v16i)(((v16u)value & 0x7f800000u) != 0x7f800000u);
        D::keep(to + i, select(sound, value, v16f{}));
    }
}

template <class D> struct Front {
    typedef typename D::stored stored;

    Table embedding, features;  // [vocabulary, hidden], [slots, length, features.width]
    size_t length;
    bool residual_normed;  // the residual stream starts from the normed hidden state
    Linear<D> fuse;        // features to a hidden state
    Buffer<stored> hidden_norm;
    Buffer<stored> gathered, both;  // of a step's tokens: features; embeddings beside hidden states, both normed
    // [slots, kept, hidden]: own hidden states; position p is in place p % kept.
    Buffer<stored> states;
    size_t kept, hidden;

    stored* state(int slot, int position) const { return &states[(slot * kept + position % kept) * hidden]; }
};

}  // namespace tandem
