// Rounds of rows: greedy drafts one token after the other, verification by agreement, and both as one call.
#pragma once
#include "transformer.h"

namespace tandem {

// Rows of a ragged batch: row r feeds tokens[begins[r] .. begins[r + 1]) at `starts[r]` and on of slot slots[r].
struct Rows {
    int32_t count;
    const int32_t *slots, *starts, *begins, *tokens;
};

class Model {
public:
    virtual ~Model() = default;
    virtual void set_layer(int layer, const LayerWeights& weights) = 0;
    virtual void set_head(const void* norm, const void* weights, const void* bias) = 0;
    virtual void step(const Step& step) = 0;
    virtual const Shape& shape() const = 0;

    // Feeds rows. `wants`: 0 nothing, 1 each row's last token, 2 all tokens.
    void feed(const Rows& rows, int wants, float* logits, std::vector<Best>& best) {
        ids_.clear(), slots_.clear(), positions_.clear(), wanted_.clear();
        for (int r = 0; r < rows.count; r++)
            for (int i = rows.begins[r]; i < rows.begins[r + 1]; i++) {
                if (wants == 2 || (wants == 1 && i + 1 == rows.begins[r + 1])) wanted_.push_back(int(ids_.size()));
                ids_.push_back(rows.tokens[i]);
                slots_.push_back(rows.slots[r]);
                positions_.push_back(rows.starts[r] + i - rows.begins[r]);
            }
        best.resize(wanted_.size());
        step({int(ids_.size()), int(wanted_.size()), ids_.data(), slots_.data(), positions_.data(), wanted_.data(), logits, best.data()});
    }

private:
    std::vector<int32_t> ids_, slots_, positions_, wanted_;
};

template <class D> class Typed : public Model {
public:
    template <class... Arguments> explicit Typed(Arguments&&... arguments) : transformer_(arguments...) {}
    void set_layer(int layer, const LayerWeights& weights) override { transformer_.set_layer(layer, weights); }
    void set_head(const void* norm, const void* weights, const void* bias) override { transformer_.set_head(norm, weights, bias); }
    void step(const Step& step) override { transformer_.run(step); }
    const Shape& shape() const override { return transformer_.shape; }

private:
    Transformer<D> transformer_;
};

// Greedy drafts: `counts[r]` tokens of row r into drafts[r * stride ...]; a row whose logits are unsound ends there, with
// what it has. The head's outputs stand for tokens only[...] (null: for themselves). Returns via `counts` what was drafted.
inline void propose(Model& draft, const Rows& tails, int32_t* counts, const int32_t* only, int stride, int32_t* drafts) {
    std::vector<int32_t> active, slots, starts, begins{0}, tokens;
    for (int r = 0; r < tails.count; r++)
        if (counts[r]) {
            active.push_back(r);
            slots.push_back(tails.slots[r]);
            starts.push_back(tails.starts[r]);
            tokens.insert(tokens.end(), tails.tokens + tails.begins[r], tails.tokens + tails.begins[r + 1]);
            begins.push_back(int(tokens.size()));
        }
    std::vector<Best> best;
    for (int i = 0; !active.empty(); i++) {
        draft.feed({int(active.size()), slots.data(), starts.data(), begins.data(), tokens.data()}, 1, nullptr, best);
        std::vector<int32_t> left, left_slots, left_starts, left_begins{0}, left_tokens;
        for (size_t a = 0; a < active.size(); a++) {
            const int r = active[a];
            if (!best[a].sound) {
                counts[r] = i;
                continue;
            }
            const int32_t token = only ? only[best[a].token] : best[a].token;
            drafts[r * stride + i] = token;
            if (i + 1 >= counts[r]) continue;
            left.push_back(r);
            left_slots.push_back(slots[a]);
            left_starts.push_back(starts[a] + begins[a + 1] - begins[a]);
            left_tokens.push_back(token);
            left_begins.push_back(int(left_tokens.size()));
        }
        active.swap(left), slots.swap(left_slots), starts.swap(left_starts), begins.swap(left_begins), tokens.swap(left_tokens);
    }
}

// Greedy verification: how many of each row's tokens after the first are what the target says, and what it says at every
// token (`said`, as the rows lie). accepted[r] is -1 where a logit that counts is unsound.
inline void verify(Model& target, const Rows& rows, int32_t* said, int32_t* accepted) {
    std::vector<Best> best;
    target.feed(rows, 2, nullptr, best);
    for (int r = 0; r < rows.count; r++) {
        const int begin = rows.begins[r], drafted = rows.begins[r + 1] - begin - 1;
        accepted[r] = -1;
        for (int i = 0; i <= drafted && best[begin + i].sound; i++) {
            said[begin + i] = best[begin + i].token;
            if (i == drafted || best[begin + i].token != rows.tokens[begin + i + 1]) {
                accepted[r] = i;
                break;
            }
        }
    }
}

}  // namespace tandem
