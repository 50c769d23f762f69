// An EAGLE-3 head's part of a step before its layer: a token's embedding, and the target's or its own hidden state.
#pragma once
#include "transformer.h"

namespace tandem {

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

template <class D> void Transformer<D>::read_features(const HeadInputs& from) {
    const size_t most = shape.most_tokens, hidden = shape.hidden, width = from.features.width;
    front_ = std::make_unique<Front<D>>();
    front_->embedding = from.embedding;
    front_->features = from.features;
    front_->length = from.length;
    front_->residual_normed = from.residual_normed;
    front_->fuse = Stack<D>{{{from.fuse, shape.hidden}}, from.features.width}.packed(weights_);
    front_->hidden_norm = copied<stored>(from.hidden_norm, hidden);
    front_->gathered = Buffer<stored>(most * width);
    front_->both = Buffer<stored>(most * 2 * hidden);
    front_->kept = from.kept_states;
    front_->hidden = hidden;
    front_->states = Buffer<stored>(shape.slots * front_->kept * hidden);
    const int widest = std::max({2 * shape.hidden, int(width), shape.heads * shape.head_dim, shape.intermediate});
    for (auto& groups : groups8_) groups = Buffer<Group8>(most * Linear<D>::groups(widest));
}

// Fuses hidden states from the target's features, or takes the head's own.
template <class D> void Transformer<D>::take_in(int thread, Place& place) {
    Front<D>& front = *front_;
    const Linear<D>& qkv = layers_[0].qkv;
    const size_t hidden = shape.hidden;
    const int tokens = step_.tokens;
    auto begin = [&](int t) {
        stored *x = &x_[t * hidden_], *normed = &front.both[(2 * t + 1) * hidden];
        if (step_.reads_state(t)) std::memcpy(x, front.state(step_.slots[t], step_.before(t)), hidden * sizeof(stored));
        norm(x, front.hidden_norm.data(), shape.hidden, normed);
        if (front.residual_normed) std::memcpy(x, normed, hidden * sizeof(stored));
    };
    share(place, tokens, step_.sources ? &front.fuse : &qkv, [&](int t) {
        stored* embedded = &front.both[2 * t * hidden];
        read<D>(front.embedding, step_.ids[t], embedded);
        norm(embedded, layers_[0].attention_norm.data(), shape.hidden, embedded);
        if (!step_.sources) return begin(t);
        stored* gathered = &front.gathered[t * size_t(front.features.width)];
        if (step_.sources[t] < 0) std::memset(gathered, 0, front.features.width * sizeof(stored));
        else read<D>(front.features, step_.slots[t] * front.length + step_.sources[t], gathered);
    });
    if (!step_.sources) return;
    const Input<D> in = input(place, thread, front.fuse, {front.gathered.data(), size_t(front.features.width)}, tokens);
    multiply(place, front.fuse, nullptr, in, tokens, [&](int panel, int t, v16f first, v16f last) {
        D::keep(&x_[t * hidden_ + panel * PANEL], first);
        D::keep(&x_[t * hidden_ + panel * PANEL + LANES], last);
    });
    share(place, tokens, &qkv, begin);
}

template <class D> void Transformer<D>::keep_states() {
    const size_t hidden = shape.hidden;
    for (int t = step_.first(); t < step_.tokens; t++)
        std::memcpy(front_->state(step_.slots[t], step_.before(t) + 1), &x_[t * hidden_], hidden * sizeof(stored));
}

}  // namespace tandem
