// What models of both number formats are to their callers: weights in, rows of tokens in, logits or best tokens out.
#pragma once
#include "adapters.h"
#include "cache.h"
#include "pool.h"
#include "stack.h"

namespace tandem {

// `outputs`: rows of the head; `vocabulary`: of the embedding.
struct Shape {
    int32_t layers, hidden, heads, kv_heads, head_dim, intermediate, outputs, vocabulary, slots, length, most_tokens, threads;
    float epsilon, scale;
    // Form of the layers; zeros are a Llama's. Scales and caps: 0 for none. norm_offset: of norms that round once.
    float norm_offset, attention_cap, logit_cap, embedding_scale, residual_scale, logit_scale;
    int32_t activation, layer_norm, rounds_once, row_norms, wide_rope;  // row_norms: of all queries, and of all keys
};

// Norms are in the model's dtype, followed by biases if any; absent ones are null. Rotary tables [length, turned],
// which must outlive the model, rotate values i and i + turned of a head. `window`: positions that attention sees.
struct LayerWeights {
    const void *attention_norm, *mlp_norm, *q_norm, *k_norm, *attention_after, *mlp_after;
    Matrix q, k, v, o, gate, up, down;
    const float *cosines, *sines;
    int32_t turned, window;
};

// Rows of `width` numbers: float32 if `wide`, else bfloat16, in any head dtype.
struct Table {
    const void* rows;
    int32_t width, wide;
};

// An EAGLE-3 head: `fuse` [hidden, features.width] projects features [slots, length, features.width]; its norm is in
// the model's dtype.
struct HeadInputs {
    Table embedding, features;
    int32_t length, residual_normed, kept_states;  // kept_states: of so many last positions of a slot
    const void* hidden_norm;
    Matrix fuse;
};

// The argmax, the lowest id among equals; `sound` if it is finite and no logit is NaN.
struct Best {
    int32_t token = 0;
    bool sound = false;
};

// A step's tokens. `wanted`: the `count` tokens with results: best tokens, and `logits` [count, outputs] if not null.
// `adapters`: by token, 0 or null for none. A head's `wanted` come first; `sources` is each token's feature position,
// -1 for none, -2 - p for the own state at p; null: the previous position.
struct Step {
    int tokens, count;
    const int32_t *ids, *slots, *positions, *wanted;
    float* logits;
    Best* best;
    const int32_t *adapters = nullptr, *sources = nullptr;

    bool reads_state(int token) const { return !sources || sources[token] < -1; }
    // The position before a head's token; -1 for the first.
    int before(int token) const {
        if (!sources) return positions[token];
        return sources[token] < -1 ? -2 - sources[token] : sources[token];
    }
};

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
    Model(Pool& pool, const Shape& shape, size_t number_bytes)
        : shape(shape), pool(pool), slots(shape.slots, shape.length, 2 * number_bytes * shape.layers * shape.kv_heads * shape.head_dim) {}
    virtual ~Model() = default;
    virtual void set_layer(int layer, const LayerWeights& weights) = 0;
    virtual void set_head(const void* norm, const Matrix& head) = 0;
    // Makes this an EAGLE-3 head, before set_layer.
    virtual void read_features(const HeadInputs& from) = 0;
    virtual bool is_head() const = 0;
    // Later steps write hidden states after `layers` to features [slots, length, count, hidden].
    virtual void hand_out(const int32_t* layers, int count, void* features) = 0;
    // Registers an adapter; its layers are set before use.
    virtual void put_adapter(int number) = 0;
    virtual void set_adapter_layer(int number, int layer, const LayerAdapter& adapter) = 0;
    virtual bool has_adapter(int number) const = 0;
    virtual void run(const Step& step) = 0;
    virtual size_t weight_bytes() const = 0;  // of all matrices: what a step reads
    virtual size_t page_bytes() const = 0;    // keys and values of 16 positions in all layers, and what was handed out of them
    virtual void save_page(int slot, int block, char* page) const = 0;
    virtual void load_page(int slot, int block, const char* page) = 0;

    const Shape shape;
    Pool& pool;
    SlotMemory slots;

    // `wants`: 0 nothing, 1 each row's last token, 2 all. `follows`: rows continue a step, which has a head's states.
    void feed(const Rows& rows, int wants, float* logits, std::vector<Best>& best, bool follows = false) {
        if (is_head()) return feed_head(rows, wants, logits, best, follows);
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
        run({int(ids_.size()), int(wanted_.size()), ids_.data(), slots_.data(), positions_.data(), wanted_.data(), logits, best.data(),
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
        run({int(ids_.size()), int(wanted_.size()), ids_.data(), slots_.data(), positions_.data(), wanted_.data(), logits, best.data(),
              nullptr, follows ? nullptr : sources_.data()});
    }

    std::vector<int32_t> ids_, slots_, positions_, wanted_, adapters_, sources_;
};

// Models by number format, compiled apart. The embedding [vocabulary, hidden] must outlive them.
Model* float32_model(Pool& pool, const Shape& shape, const void* embedding);
Model* bfloat16_model(Pool& pool, const Shape& shape, const void* embedding);

}  // namespace tandem
