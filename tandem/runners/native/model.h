// What models of both number formats are to their callers, and rounds of rows: drafts and verification by agreement.
#pragma once
#include "attention.h"
#include "linear.h"
#include "system.h"

namespace tandem {

// A row's draws, the first at `position`, from `tokens` ids. Temperature 0: none.
struct Sampling {
    double temperature, top_p, min_p;
    uint64_t seed;
    int64_t position;
    int32_t top_k, tokens;

    bool draws() const { return temperature != 0; }
    bool sound() const {
        return temperature > 0 && std::isfinite(temperature) && top_p > 0 && top_p <= 1 && min_p >= 0 && min_p <= 1 && top_k >= 0 &&
               position >= 0 && position < int64_t(1) << 62 && tokens > 0 && tokens < 1 << 28;
    }
};

// The token `ahead` positions further, or -1 for unsound logits, which are of tokens only[0 .. outputs) (null: all).
int32_t draw(Pool& pool, const float* logits, int outputs, const int32_t* only, const Sampling& by, int ahead);

// The largest softmax probability, approximately; 0 for unsound logits.
double largest_probability(Pool& pool, const float* logits, int count);

// Per row of `count` logits: totals[r] = log(sum(exp(logits[r]))) (NaN: unsound), and ids[r * top ...], the `top`
// largest in order, lower ids first among equals.
void logprobs(Pool& pool, const float* const* logits, int rows, int count, int top, double* totals, int32_t* ids);

// `outputs`: rows of the head; `vocabulary`: of the embedding.
struct Shape {
    int32_t layers, hidden, heads, kv_heads, head_dim, intermediate, outputs, vocabulary, slots, length, most_tokens, threads;
    float epsilon, scale;
    // Form of the layers; zeros are a Llama's. Scales and caps: 0 for none. norm_offset: of norms that round once.
    float norm_offset, attention_cap, logit_cap, embedding_scale, residual_scale, logit_scale;
    // row_norms: of all queries, and of all keys. short_cache: keys and values in bfloat16 whatever the activations are.
    int32_t activation, layer_norm, rounds_once, row_norms, wide_rope, short_cache;
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

// A step's tokens. The last `count` have results: best tokens, and `logits` [count, outputs] if not null. `adapters`: by
// token, 0 or null for none. `sources`, of a head: each token's feature position, -1 for none, -2 - p for the own state at
// p; null: the previous position.
struct Step {
    int tokens, count;
    const int32_t *ids, *slots, *positions;
    float* logits;
    Best* best;
    const int32_t *adapters = nullptr, *sources = nullptr;

    int first() const { return tokens - count; }  // of those with results
    bool reads_state(int token) const { return !sources || sources[token] < -1; }
    // The position before a head's token; -1 for the first.
    int before(int token) const {
        if (!sources) return positions[token];
        return sources[token] < -1 ? -2 - sources[token] : sources[token];
    }
};

// A ragged batch: row r feeds tokens[begins[r] .. begins[r + 1]) at `starts[r]` and on of slot slots[r], changed by
// adapters[r] (0 or null: none). A head has features below position knowns[r] (null: all), else reads its own states.
// A row's first quiet[r] tokens (null: none) want no results.
struct Rows {
    int32_t count;
    const int32_t *slots, *starts, *begins, *tokens, *adapters = nullptr, *knowns = nullptr;
    const int32_t* quiet = nullptr;

    int first(int row) const { return begins[row] + (quiet ? quiet[row] : 0); }  // of its tokens with results
};

class Model {
public:
    Model(Pool& pool, const Shape& shape, size_t number_bytes)
        : shape(shape), pool(pool), kv_number_bytes(shape.short_cache ? sizeof(uint16_t) : number_bytes),
          slots(shape.slots, shape.length, 2 * kv_number_bytes * shape.layers * shape.kv_heads * shape.head_dim) {}
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
    virtual void copy_page(int slot, int block, char* page, bool from) = 0;  // from the page to the slot, or back

    const Shape shape;
    Pool& pool;
    const size_t kv_number_bytes;  // of each key and value
    SlotMemory slots;

    // `wants`: 0 nothing, 1 each row's last token, 2 all; of a head, last ones. `follows`: rows continue a step, which has a
    // head's states. A head's row for the token at p reads the feature at p - 1 and has position p - 1. The first token has
    // none: it is fed only to draft after it.
    void feed(const Rows& rows, int wants, float* logits, std::vector<Best>& best, bool follows = false) {
        for (auto* each : {&ids_, &slots_, &positions_, &adapters_, &sources_}) each->clear();
        const bool head = is_head();
        auto add = [&](bool results) {
            for (int r = 0; r < rows.count; r++)
                for (int i = rows.begins[r], last = rows.begins[r + 1] - 1; i <= last; i++) {
                    const int position = rows.starts[r] + i - rows.begins[r] - head;
                    const bool has_result = wants && i >= rows.first(r) && (i == last || (wants == 2 && !head));
                    if (has_result != results || (position < 0 && !results)) continue;
                    ids_.push_back(rows.tokens[i]);
                    slots_.push_back(rows.slots[r]);
                    positions_.push_back(std::max(position, 0));
                    adapters_.push_back(rows.adapters ? rows.adapters[r] : 0);
                    sources_.push_back(rows.knowns && position >= rows.knowns[r] ? -2 - position : position);
                }
            return ids_.size();
        };
        const size_t others = add(false), tokens = add(true);
        best.resize(tokens - others);
        if (!tokens) return;
        run({int(tokens), int(best.size()), ids_.data(), slots_.data(), positions_.data(), logits, best.data(),
             rows.adapters && !head ? adapters_.data() : nullptr, head && !follows ? sources_.data() : nullptr});
    }

private:
    std::vector<int32_t> ids_, slots_, positions_, adapters_, sources_;
};

// Models by number format, compiled apart. The embedding [vocabulary, hidden] must outlive them.
Model* float32_model(Pool& pool, const Shape& shape, const void* embedding);
Model* bfloat16_model(Pool& pool, const Shape& shape, const void* embedding);

// Sampling callback. For rows with rows[r] set, draw(r, at, best) returns the next token, or -1 to stop; others follow
// sampled[r] (null: greedy). Row r's logits lie at logits[at * outputs ...]; `best` is their argmax, -1 if unsound. A draft
// ends behind the token where the product of largest probabilities falls below least[r] (null: none).
struct Drawing {
    const int32_t* rows;
    const Sampling* sampled;
    float* logits;
    int32_t (*draw)(int32_t row, int32_t at, int32_t best);
    const float* least;
};

// Rows of a step, each of which is row of[i] of a call.
struct Batch {
    std::vector<int32_t> of, slots, starts, begins{0}, tokens, adapters, knowns;

    void add(int row, const Rows& call, int start, const int32_t* first, const int32_t* last) {
        of.push_back(row);
        slots.push_back(call.slots[row]);
        starts.push_back(start);
        tokens.insert(tokens.end(), first, last);
        begins.push_back(int(tokens.size()));
        adapters.push_back(call.adapters ? call.adapters[row] : 0);
        knowns.push_back(call.knowns ? call.knowns[row] : 0);
    }
    Rows rows(const Rows& call) const {
        return {int(of.size()), slots.data(), starts.data(), begins.data(), tokens.data(), call.adapters ? adapters.data() : nullptr, call.knowns ? knowns.data() : nullptr};
    }
};

// Drafts counts[r] tokens of row r into drafts[r * stride ...], greedily or by `drawing`. A row stops at unsound logits
// or a token without embedding; `counts` returns the lengths. Outputs are tokens only[...] (null: all).
inline void propose(Model& draft, const Rows& tails, int32_t* counts, const int32_t* only, int stride, int32_t* drafts, const Drawing* drawing) {
    Batch batch;
    for (int r = 0; r < tails.count; r++)
        if (counts[r]) batch.add(r, tails, tails.starts[r], tails.tokens + tails.begins[r], tails.tokens + tails.begins[r + 1]);
    std::vector<Best> best;
    std::vector<double> sure(tails.count, 1);
    for (int i = 0; !batch.of.empty(); i++) {
        draft.feed(batch.rows(tails), 1, drawing ? drawing->logits : nullptr, best, i > 0);
        Batch next;
        for (size_t a = 0; a < batch.of.size(); a++) {
            const int r = batch.of[a];
            int32_t token = !best[a].sound ? -1 : only ? only[best[a].token] : best[a].token;
            if (drawing && drawing->rows && drawing->rows[r]) token = drawing->draw(r, int32_t(a), token);
            else if (drawing && drawing->sampled && drawing->sampled[r].draws())
                token = draw(draft.pool, drawing->logits + a * draft.shape.outputs, draft.shape.outputs, only, drawing->sampled[r], i);
            if (token < 0 || token >= draft.shape.vocabulary) {
                counts[r] = i;
                continue;
            }
            drafts[r * stride + i] = token;
            if (drawing && drawing->least && drawing->least[r] > 0 && i + 1 < counts[r]) {
                sure[r] *= largest_probability(draft.pool, drawing->logits + a * draft.shape.outputs, draft.shape.outputs);
                if (sure[r] < drawing->least[r]) counts[r] = i + 1;
            }
            if (i + 1 < counts[r]) next.add(r, tails, batch.starts[a] + batch.begins[a + 1] - batch.begins[a], &token, &token + 1);
        }
        batch = std::move(next);
    }
}

// Verification by agreement. `said`: the target's token after each token that is not quiet, -1 if unsound: argmax, or for
// `sampled` rows drawn up to the first mismatch. accepted[r]: matching draft tokens, -1 if a decisive logit is unsound.
// `logits`: buffer for the tokens of `said`, or null.
inline void verify(Model& target, const Rows& rows, const Sampling* sampled, int32_t* said, int32_t* accepted, float* logits) {
    std::vector<Best> best;
    target.feed(rows, 2, logits, best);
    for (size_t i = 0; i < best.size(); i++) said[i] = best[i].sound ? best[i].token : -1;
    for (int r = 0, begin = 0; r < rows.count; r++) {
        const int32_t* drafted = rows.tokens + rows.first(r) + 1;
        const int count = rows.begins[r + 1] - rows.first(r) - 1, outputs = target.shape.outputs;
        for (int same = 0; count >= 0; same++) {
            int32_t& own = said[begin + same];
            if (sampled && sampled[r].draws())
                own = draw(target.pool, logits + size_t(begin + same) * outputs, outputs, nullptr, sampled[r], same);
            accepted[r] = own < 0 ? -1 : same;
            if (same == count || own != drafted[same]) break;
        }
        begin += count + 1;
    }
}

}  // namespace tandem
