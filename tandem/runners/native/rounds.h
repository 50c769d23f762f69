// Rounds of rows: greedy drafts, verification by agreement, and both in one call.
#pragma once
#include "draws.h"
#include "transformer.h"

namespace tandem {

// A ragged batch: row r feeds tokens[begins[r] .. begins[r + 1]) at `starts[r]` and on of slot slots[r], changed by
// adapters[r] (0 or null: none). A head has features below position knowns[r] (null: all), else reads its own states.
// The last `silent` rows want no results.
struct Rows {
    int32_t count;
    const int32_t *slots, *starts, *begins, *tokens, *adapters = nullptr, *knowns = nullptr;
    int32_t silent = 0;
};

class Model {
public:
    virtual ~Model() = default;
    virtual void set_layer(int layer, const LayerWeights& weights) = 0;
    virtual void set_head(const void* norm, const Matrix& head) = 0;
    virtual void read_features(const HeadInputs& from) = 0;
    virtual bool reads_features() const = 0;
    virtual void hand_out(const int32_t* layers, int count, void* features) = 0;
    virtual void put_adapter(int number) = 0;
    virtual void set_adapter_layer(int number, int layer, const LayerAdapter& adapter) = 0;
    virtual bool has_adapter(int number) const = 0;
    virtual void step(const Step& step) = 0;
    virtual const Shape& shape() const = 0;
    virtual void product(int layer, int which, const void* x, int tokens, float* to) const = 0;
    virtual size_t weight_bytes() const = 0;
    virtual size_t page_bytes() const = 0;
    virtual void save_page(int slot, int block, char* page) const = 0;
    virtual void load_page(int slot, int block, const char* page) = 0;
    virtual SlotMemory& slots() = 0;
    virtual Pool& pool() = 0;

    // `wants`: 0 nothing, 1 each row's last token, 2 all. `follows`: rows continue a step, which has a head's states.
    void feed(const Rows& rows, int wants, float* logits, std::vector<Best>& best, bool follows = false) {
        if (reads_features()) return feed_head(rows, wants, logits, best, follows);
        ids_.clear(), slots_.clear(), positions_.clear(), wanted_.clear(), adapters_.clear();
        for (int r = 0; r < rows.count; r++)
            for (int i = rows.begins[r]; i < rows.begins[r + 1]; i++) {
                if (r < rows.count - rows.silent && (wants == 2 || (wants == 1 && i + 1 == rows.begins[r + 1]))) wanted_.push_back(int(ids_.size()));
                ids_.push_back(rows.tokens[i]);
                slots_.push_back(rows.slots[r]);
                positions_.push_back(rows.starts[r] + i - rows.begins[r]);
                if (rows.adapters) adapters_.push_back(rows.adapters[r]);
            }
        best.resize(wanted_.size());
        step({int(ids_.size()), int(wanted_.size()), ids_.data(), slots_.data(), positions_.data(), wanted_.data(), logits, best.data(),
              rows.adapters ? adapters_.data() : nullptr});
    }

private:
    // A head's row for the token at p reads the feature at p - 1 and has position p - 1. The first token has none: it
    // is fed only to draft after it.
    void feed_head(const Rows& rows, int wants, float* logits, std::vector<Best>& best, bool follows) {
        ids_.clear(), slots_.clear(), positions_.clear(), wanted_.clear(), sources_.clear();
        auto add = [&](int r, int i) {
            const int before = rows.starts[r] + i - rows.begins[r] - 1;
            ids_.push_back(rows.tokens[i]);
            slots_.push_back(rows.slots[r]);
            positions_.push_back(std::max(before, 0));
            sources_.push_back(rows.knowns && before >= rows.knowns[r] ? -2 - before : before);
        };
        for (int r = 0; wants && r < rows.count; r++) {
            wanted_.push_back(r);
            add(r, rows.begins[r + 1] - 1);
        }
        for (int r = 0; r < rows.count; r++)
            for (int i = rows.begins[r]; i < rows.begins[r + 1] - (wants ? 1 : 0); i++)
                if (rows.starts[r] + i > rows.begins[r]) add(r, i);
        best.resize(wanted_.size());
        if (ids_.empty()) return;
        step({int(ids_.size()), int(wanted_.size()), ids_.data(), slots_.data(), positions_.data(), wanted_.data(), logits, best.data(),
              nullptr, follows ? nullptr : sources_.data()});
    }

    std::vector<int32_t> ids_, slots_, positions_, wanted_, adapters_, sources_;
};

template <class D> class Typed : public Model {
public:
    template <class... Arguments> explicit Typed(Arguments&&... arguments) : transformer_(arguments...) {}
    void set_layer(int layer, const LayerWeights& weights) override { transformer_.set_layer(layer, weights); }
    void set_head(const void* norm, const Matrix& head) override { transformer_.set_head(norm, head); }
    void read_features(const HeadInputs& from) override { transformer_.read_features(from); }
    bool reads_features() const override { return transformer_.reads_features(); }
    void hand_out(const int32_t* layers, int count, void* features) override { transformer_.hand_out(layers, count, features); }
    void put_adapter(int number) override { transformer_.put_adapter(number); }
    void set_adapter_layer(int number, int layer, const LayerAdapter& adapter) override { transformer_.set_adapter_layer(number, layer, adapter); }
    bool has_adapter(int number) const override { return transformer_.has_adapter(number); }
    void step(const Step& step) override { transformer_.run(step); }
    const Shape& shape() const override { return transformer_.shape; }
    void product(int layer, int which, const void* x, int tokens, float* to) const override {
        transformer_.product(layer, which, x, tokens, to);
    }
    size_t weight_bytes() const override { return transformer_.weight_bytes(); }
    size_t page_bytes() const override { return transformer_.page_bytes(); }
    void save_page(int slot, int block, char* page) const override { transformer_.save_page(slot, block, page); }
    void load_page(int slot, int block, const char* page) override { transformer_.load_page(slot, block, page); }
    SlotMemory& slots() override { return transformer_.slots(); }
    Pool& pool() override { return transformer_.pool(); }

private:
    Transformer<D> transformer_;
};

// Models by number format, compiled apart.
Model* float32_model(Pool& pool, const Shape& shape, const void* embedding);
Model* bfloat16_model(Pool& pool, const Shape& shape, const void* embedding);

// Sampling callback. For rows with rows[r] set, draw(r, at, best) returns the next token, or -1 to stop; others follow
// sampled[r] (null: greedy). Row r's logits lie at logits[at * outputs ...]; `best` is their argmax, -1 if unsound.
struct Drawing {
    const int32_t* rows;
    const Sampling* sampled;
    float* logits;
    int32_t (*draw)(int32_t row, int32_t at, int32_t best);
};

// Drafts counts[r] tokens of row r into drafts[r * stride ...], greedily or by `drawing`. A row stops at unsound logits
// or a token without embedding; `counts` returns the lengths. Outputs are tokens only[...] (null: all).
inline void propose(Model& draft, const Rows& tails, int32_t* counts, const int32_t* only, int stride, int32_t* drafts, const Drawing* drawing) {
    std::vector<int32_t> active, slots, starts, begins{0}, tokens, adapters, knowns;
    for (int r = 0; r < tails.count; r++)
        if (counts[r]) {
            if (tails.knowns) knowns.push_back(tails.knowns[r]);
            active.push_back(r);
            adapters.push_back(tails.adapters ? tails.adapters[r] : 0);
            slots.push_back(tails.slots[r]);
            starts.push_back(tails.starts[r]);
            tokens.insert(tokens.end(), tails.tokens + tails.begins[r], tails.tokens + tails.begins[r + 1]);
            begins.push_back(int(tokens.size()));
        }
    std::vector<Best> best;
    for (int i = 0; !active.empty(); i++) {
        draft.feed({int(active.size()), slots.data(), starts.data(), begins.data(), tokens.data(), tails.adapters ? adapters.data() : nullptr, tails.knowns ? knowns.data() : nullptr}, 1, drawing ? drawing->logits : nullptr, best, i > 0);
        std::vector<int32_t> left, left_slots, left_starts, left_begins{0}, left_tokens, left_adapters;
        for (size_t a = 0; a < active.size(); a++) {
            const int r = active[a];
            int32_t token = !best[a].sound ? -1 : only ? only[best[a].token] : best[a].token;
            if (drawing && drawing->rows && drawing->rows[r]) token = drawing->draw(r, int32_t(a), token);
            else if (drawing && drawing->sampled && drawing->sampled[r].draws())
                token = draw(draft.pool(), drawing->logits + a * draft.shape().outputs, draft.shape().outputs, only, drawing->sampled[r], i);
            if (token < 0 || token >= draft.shape().vocabulary) {
                counts[r] = i;
                continue;
            }
            drafts[r * stride + i] = token;
            if (i + 1 >= counts[r]) continue;
            left.push_back(r);
            left_adapters.push_back(adapters[a]);
            left_slots.push_back(slots[a]);
            left_starts.push_back(starts[a] + begins[a + 1] - begins[a]);
            left_tokens.push_back(token);
            left_begins.push_back(int(left_tokens.size()));
        }
        active.swap(left), slots.swap(left_slots), starts.swap(left_starts), begins.swap(left_begins), tokens.swap(left_tokens), adapters.swap(left_adapters);
    }
}

// Verification by agreement. `said`: the target's token after each token, -1 if unsound: argmax, or for `sampled` rows
// drawn up to the first mismatch. accepted[r]: matching draft tokens, -1 if a decisive logit is unsound. `logits`:
// buffer for all tokens, or null.
inline void verify(Model& target, const Rows& rows, const Sampling* sampled, int32_t* said, int32_t* accepted, float* logits) {
    std::vector<Best> best;
    target.feed(rows, 2, logits, best);
    for (size_t i = 0; i < best.size(); i++) said[i] = best[i].sound ? best[i].token : -1;
    for (int r = 0; r < rows.count - rows.silent; r++) {
        const int32_t* drafted = rows.tokens + rows.begins[r] + 1;
        const int count = rows.begins[r + 1] - rows.begins[r] - 1, outputs = target.shape().outputs;
        for (int same = 0;; same++) {
            int32_t& own = said[rows.begins[r] + same];
            if (sampled && sampled[r].draws())
                own = draw(target.pool(), logits + size_t(rows.begins[r] + same) * outputs, outputs, nullptr, sampled[r], same);
            accepted[r] = own < 0 ? -1 : same;
            if (same == count || own != drafted[same]) break;
        }
    }
}

}  // namespace tandem
