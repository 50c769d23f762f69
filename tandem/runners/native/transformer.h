// A decoder of the form in Shape and LayerWeights: tokens at positions of slots in, logits or best tokens out, rounded
// as in transformers. All threads run a step together.
#pragma once
#include "attention.h"
#include "model.h"
#include <algorithm>
#include <memory>

namespace tandem {

template <class D> struct Front;  // what an EAGLE-3 head has before its layer

template <class D> class Transformer : public Model {
    typedef typename D::stored stored;

public:
    Transformer(Pool& pool, const Shape& shape, const void* embedding);
    void set_layer(int layer, const LayerWeights& weights) override;
    void set_head(const void* norm, const Matrix& head) override {
        final_norm_ = copied<stored>(norm, shape.hidden * (shape.layer_norm ? 2 : 1));
        head_ = Stack<D>{{{head, shape.outputs}}, shape.hidden}.packed(weights_, -INFINITY);
    }
    void read_features(const HeadInputs& from) override;
    bool is_head() const override { return bool(front_); }
    void hand_out(const int32_t* layers, int count, void* features) override {
        taps_.assign(layers, layers + count);
        features_ = static_cast<stored*>(features);
    }
    void put_adapter(int number) override {
        const LayerSizes sizes{shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.intermediate};
        auto made = std::make_unique<LoraAdapter<D>>(shape.layers, sizes);
        if (size_t(number) >= adapters_.size()) adapters_.resize(number + 1);
        adapters_[number] = std::move(made);
    }
    void set_adapter_layer(int number, int layer, const LayerAdapter& from) override {
        LoraAdapter<D>& adapter = *adapters_[number];
        adapter.set_layer(layer, from);
        if (size_t(adapter.rank()) <= most_rank_) return;
        shrunk_ = Buffer<float>(size_t(shape.most_tokens) * adapter.rank());
        most_rank_ = adapter.rank();
    }
    bool has_adapter(int number) const override { return size_t(number) < adapters_.size() && adapters_[number]; }
    void run(const Step& step) override;
    size_t weight_bytes() const override {
        size_t total = head_.bytes() + (front_ ? front_->fuse.bytes() : 0);
        for (const Layer& layer : layers_) total += layer.qkv.bytes() + layer.o.bytes() + layer.gate_up.bytes() + layer.down.bytes();
        return total;
    }
    size_t page_bytes() const override {
        size_t total = 0;
        for (const Layer& layer : layers_) total += layer.cache->page_bytes();
        return total + LANES * feature_bytes();
    }
    void copy_page(int slot, int block, char* page, bool from) override {
        for (Layer& layer : layers_) page = layer.cache->copy(slot, block, page, from);
        if (!features_) return;
        char* own = reinterpret_cast<char*>(features_at(slot, block * LANES));
        std::memcpy(from ? own : page, from ? page : own, LANES * feature_bytes());
    }

private:
    static constexpr int DEALT = 8;  // tokens of a step from which on norming and quantising them is shared work

    struct Layer {
        Linear<D> qkv, o, gate_up, down;
        Buffer<stored> attention_norm, mlp_norm, q_norm, k_norm, attention_after, mlp_after;
        const float *cosines, *sines;
        int turned, window;
        std::unique_ptr<LayerCache> cache;
    };
    struct Group {  // neighbouring tokens of one slot whose queries a thread takes together
        int first, tokens;
    };
    struct Activations {  // rows `stride` apart, from token `first` on, to be normed where `norm` is given
        const stored* values;
        size_t stride;
        const Buffer<stored>* norm = nullptr;
        int first = 0;
    };

    struct Place {  // where a thread is: the phase, and the pieces of it that it has claimed, if any
        int thread;
        uint32_t phase = 0;
        int claimed = NONE, until = 0;
        int done = 0, expected = 0;  // pieces of this step: done by the thread; of all phases that have ended
        Kind kind = EMBED;
    };
    struct Progress {  // of a thread in a step, read by all
        alignas(64) std::atomic<uint64_t> claimed;  // the phase, and how many of the thread's own pieces are claimed
        alignas(64) std::atomic<int> done;          // pieces of all phases
    };
    static constexpr int NONE = -1, FEW = 6, PANELS = 8;  // of FEW tokens a thread claims all its panels at once, else PANELS

    void work(int thread);
    size_t feature_bytes() const { return taps_.size() * shape.hidden * sizeof(stored); }  // of a position
    stored* features_at(int slot, int position) const {
        return features_ + (size_t(slot) * shape.length + position) * taps_.size() * shape.hidden;
    }
    void take_in(int thread, Place& place);
    void keep_states();
    void copy_out(int layer, Place& place);
    void shrink(int layer, Stacked which, const Linear<D>* then, const Activations& from, int thread, Place& place);
    void extend(int layer, Stacked which, int panel, int token, v16f& first, v16f& last) const;
    void work_layer(int index, const Linear<D>* then, int thread, Place& place);
    // A thread's part of a phase, in items or panels; `then` is the next phase's input.
    template <class Piece> void share(Place& place, int pieces, const Linear<D>* then, Piece piece);
    static int first_of(int thread, int pieces, int threads) { return int(int64_t(pieces) * thread / threads); }
    int claim(Place& place, int pieces, int most = 1);
    template <class Done>
    void multiply(Place& place, const Linear<D>& layer, const Linear<D>* then, const Input<D>& input, int tokens, Done done);
    void finish(Place& place, int pieces, const Linear<D>* then);
    Input<D> input(Place& place, int thread, const Linear<D>& layer, const Activations& from, int tokens);
    void norm(const stored* from, const stored* weight, int width, stored* to) const;
    void layer_norm(const stored* from, const stored* weight, int width, stored* to) const;
    void join(stored* x, v16f value) const;
    v16f final_logits(v16f value) const;
    void rotate(Layer& layer, int token, int head);
    // Calls what(K{}) for the type in which keys and values are stored.
    template <class What> void with_cache(What what) const {
        if (shape.short_cache) what(typename D::short_cache{});
        else what(D{});
    }
    template <class K> void attend_group(Layer& layer, const Group& group, int head, int thread);
    void choose(int thread, int panel, int wanted, v16f first, v16f last);
    void group(int first, int end);
    void settle();

    Arena weights_;
    const stored* embedding_;
    std::vector<Layer> layers_;
    Linear<D> head_;
    std::unique_ptr<Front<D>> front_;
    Buffer<stored> final_norm_;
    size_t hidden_, wide_, inner_;
    Buffer<stored> x_, qkv_, attended_, gated_, added_;  // added_: what is normed before it is added to x_
    std::vector<Buffer<stored>> normed_;
    std::vector<Buffer<Group8>> groups8_;  // input of a layer with blocks, each thread's own or in the first for all
    std::vector<Scores<stored>> scores_;
    std::vector<std::vector<Running>> running_;  // of the panels that each thread took
    std::vector<Group> groups_;
    int first_, first_group_;  // the first token and group of which the last layer computes more than keys and values
    std::vector<Progress> progress_;
    std::vector<int32_t> taps_;
    std::vector<std::unique_ptr<LoraAdapter<D>>> adapters_;  // by number
    std::vector<int32_t> adapted_;                           // tokens of the step that have one
    Buffer<float> shrunk_;
    size_t most_rank_ = 0;
    stored* features_ = nullptr;
    Step step_{};
    int threads_;
};

template <class D>
Transformer<D>::Transformer(Pool& pool, const Shape& given, const void* embedding)
    : Model(pool, given, sizeof(stored)), embedding_(static_cast<const stored*>(embedding)), layers_(given.layers), hidden_(up(given.hidden, PANEL)),
      wide_(up(size_t(given.heads + 2 * given.kv_heads) * given.head_dim, PANEL)), inner_(up(given.intermediate, LANES)),
      x_(given.most_tokens * hidden_), qkv_(given.most_tokens * wide_),
      attended_(size_t(given.most_tokens) * given.heads * given.head_dim), gated_(given.most_tokens * inner_),
      running_(given.threads), progress_(given.threads), threads_(given.threads) {
    for (int t = 0; t < threads_; t++) {
        normed_.emplace_back(given.most_tokens * hidden_);
        const int widest = std::max({given.hidden, given.heads * given.head_dim, given.intermediate});
        groups8_.emplace_back(size_t(given.most_tokens) * Linear<D>::groups(widest));
        scores_.emplace_back(given.length);
    }
}

template <class D> void Transformer<D>::set_layer(int index, const LayerWeights& w) {
    Layer& layer = layers_[index];
    const int dim = shape.head_dim, kv = shape.kv_heads * dim, width = shape.hidden * (shape.layer_norm ? 2 : 1);
    layer.attention_norm = copied<stored>(w.attention_norm, width);
    layer.mlp_norm = copied<stored>(w.mlp_norm, width);
    layer.attention_after = copied<stored>(w.attention_after, width);
    layer.mlp_after = copied<stored>(w.mlp_after, width);
    layer.q_norm = copied<stored>(w.q_norm, shape.row_norms ? shape.heads * dim : dim);
    layer.k_norm = copied<stored>(w.k_norm, shape.row_norms ? kv : dim);
    layer.cosines = w.cosines, layer.sines = w.sines, layer.turned = w.turned, layer.window = w.window;
    if (w.attention_after && !added_.size()) added_ = Buffer<stored>(x_.size());
    layer.qkv = Stack<D>{{{w.q, shape.heads * dim}, {w.k, kv}, {w.v, kv}}, shape.hidden * (front_ ? 2 : 1)}.packed(weights_);
    layer.o = Stack<D>{{{w.o, shape.hidden}}, shape.heads * dim}.packed(weights_);
    // A panel has 16 outputs of the gate and the same 16 of up.
    Stack<D> gate{{{w.gate, shape.intermediate}}, shape.hidden}, up_part{{{w.up, shape.intermediate}}, shape.hidden};
    auto part = [&](int output) -> const Stack<D>& { return output % PANEL < LANES ? gate : up_part; };
    auto row = [](int output) { return output / PANEL * LANES + output % LANES; };
    layer.gate_up = Linear<D>(weights_, shape.hidden, int(inner_) / LANES, [&](int o) { return part(o).row(row(o)); });
    layer.down = Stack<D>{{{w.down, shape.hidden}}, shape.intermediate}.packed(weights_);
    layer.cache = std::make_unique<LayerCache>(slots, index, shape.kv_heads, dim, kv_number_bytes);
}

template <class D> void Transformer<D>::run(const Step& step) {
    step_ = step;
    for (Progress& each : progress_) each.claimed.store(0, std::memory_order_relaxed), each.done.store(0, std::memory_order_relaxed);
    for (auto& running : running_) running.assign(step.count, Running{});
    adapted_.clear();
    for (int t = 0; step.adapters && t < step.tokens; t++)
        if (step.adapters[t]) adapted_.push_back(t);
    first_ = std::ranges::count(taps_, shape.layers) ? 0 : step.first();
    groups_.clear();
    group(0, first_);
    first_group_ = int(groups_.size());
    group(first_, step.tokens);
    pool.run([](void* self, int thread) { static_cast<Transformer*>(self)->work(thread); }, this, threads_);
    settle();
    if (front_) keep_states();
}

}  // namespace tandem

#include "step.h"
#include "head.h"
