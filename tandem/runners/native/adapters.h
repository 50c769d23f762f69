// LoRA adapters of packed matrices' outputs, by row. Sums are float32, over inputs, then ranks, in every batch.
#pragma once
#include "linear.h"
#include <memory>
#include <vector>

namespace tandem {

// Adds up * (down * x) * scale to a matrix's outputs: down [rank, inputs], up [outputs, rank]; nothing for rank 0.
struct LowRank {
    const float *down, *up;
    int32_t rank;
    float scale;
};

struct LayerAdapter {
    LowRank q, k, v, o, gate, up, down;
};

// Additions to matrices packed together. `shrunk` [rank]: all products down * x.
template <class D> class Addition {
public:
    struct Part {
        LowRank added;
        int outputs;
    };
    struct Outputs {  // 16 neighbouring outputs: those of a part from `row` on
        int part, row;
    };

    Addition() = default;
    // `from(i)`: the outputs at 16 * i and on, part -1 for none, of `groups` such groups.
    template <class From> Addition(const std::vector<Part>& parts, int inputs, int groups, From from)
        : stride_(up(inputs, LANES)), groups_(groups) {
        std::vector<int> firsts;
        for (const Part& part : parts) firsts.push_back(rank_), rank_ += part.added.rank;
        down_ = Buffer<float>(rank_ * stride_);
        for (size_t p = 0; p < parts.size(); p++)
            for (int r = 0; r < parts[p].added.rank; r++)
                std::memcpy(&down_[(firsts[p] + r) * stride_], parts[p].added.down + size_t(r) * inputs, inputs * sizeof(float));
        std::vector<float> ups;
        for (int g = 0; g < groups; g++) {
            const Outputs outputs = from(g);
            if (outputs.part < 0) continue;
            const Part& part = parts[outputs.part];
            groups_[g] = {firsts[outputs.part], part.added.rank, part.added.scale, ups.size()};
            for (int r = 0; r < part.added.rank; r++)
                for (int row = outputs.row; row < outputs.row + LANES; row++)
                    ups.push_back(row < part.outputs ? part.added.up[size_t(row) * part.added.rank + r] : 0);
        }
        up_ = copied<float>(ups.data(), ups.size());
    }
    int rank() const { return rank_; }

    // Products first .. last of x, which is zero-padded to a multiple of 16.
    void shrink(const typename D::stored* x, int first, int last, float* shrunk) const {
        for (; first + ABREAST <= last; first += ABREAST) multiplied<ABREAST>(x, first, shrunk);
        for (; first < last; first++) multiplied<1>(x, first, shrunk);
    }
    // Adds the adapter to a panel's 32 outputs.
    void extend(int panel, const float* shrunk, v16f& near, v16f& far) const {
        const Group &a = groups_[2 * panel], &b = groups_[2 * panel + 1];
        v16f first{}, last{};
        const int both = std::min(a.rank, b.rank);
        for (int r = 0; r < both; r++) first = added(a, r, shrunk, first), last = added(b, r, shrunk, last);
        for (int r = both; r < a.rank; r++) first = added(a, r, shrunk, first);
        for (int r = both; r < b.rank; r++) last = added(b, r, shrunk, last);
        if (a.rank) near = D::rounded(near + first * a.scale);
        if (b.rank) far = D::rounded(far + last * b.scale);
    }

private:
    static constexpr int ABREAST = 4;  // sums that do not wait for each other
    struct Group {
        int first = 0, rank = 0;
        float scale = 0;
        size_t at = 0;
    };
    template <int N> void multiplied(const typename D::stored* x, int first, float* shrunk) const {
        v16f total[N] = {};
        for (size_t i = 0; i < stride_; i += LANES) {
            const v16f value = D::wide(x + i);
#pragma GCC unroll 4
            for (int r = 0; r < N; r++) total[r] = fused(value, load<v16f>(&down_[(first + r) * stride_ + i]), total[r]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < N; r++) shrunk[first + r] = sum(total[r]);
    }
    v16f added(const Group& group, int rank, const float* shrunk, v16f to) const {
        return fused(all(shrunk[group.first + rank]), load<v16f>(&up_[group.at + rank * LANES]), to);
    }
    int rank_ = 0;
    size_t stride_ = 0;
    std::vector<Group> groups_;
    Buffer<float> down_, up_;
};

// Sizes that an adapter must fit.
struct LayerSizes {
    int hidden, queries, keys, intermediate;  // queries, keys: outputs of q, and of k and of v
};

enum Stacked { QKV, O, GATE_UP, DOWN, STACKS };

// One adapter by layer, with rank 0 for unchanged layers.
template <class D> class LoraAdapter {
public:
    LoraAdapter(int layers, const LayerSizes& sizes) : sizes_(sizes), layers_(layers) {}

    void set_layer(int index, const LayerAdapter& from) {
        Layer& layer = layers_[index];
        const int hidden = sizes_.hidden, queries = sizes_.queries, keys = sizes_.keys, inner = sizes_.intermediate;
        auto groups = [](int outputs) { return int(up(outputs, PANEL)) / LANES; };
        auto whole = [](int outputs) { return [outputs](int group) { return group * LANES < outputs ? at(0, group * LANES) : at(-1, 0); }; };
        layer.additions[QKV] = {{{from.q, queries}, {from.k, keys}, {from.v, keys}}, hidden, groups(queries + 2 * keys), [&](int group) {
            const int output = group * LANES;
            if (output < queries) return at(0, output);
            if (output < queries + keys) return at(1, output - queries);
            return output < queries + 2 * keys ? at(2, output - queries - keys) : at(-1, 0);
        }};
        layer.additions[O] = {{{from.o, hidden}}, queries, groups(hidden), whole(hidden)};
        layer.additions[GATE_UP] = {{{from.gate, inner}, {from.up, inner}}, hidden, 2 * int(up(inner, LANES)) / LANES, [](int group) {
            return at(group % 2, group / 2 * LANES);
        }};
        layer.additions[DOWN] = {{{from.down, hidden}}, inner, groups(hidden), whole(hidden)};
        for (const auto& addition : layer.additions) rank_ = std::max(rank_, addition.rank());
    }
    const Addition<D>& of(int layer, Stacked which) const { return layers_[layer].additions[which]; }
    int rank() const { return rank_; }  // the most of any addition

private:
    static typename Addition<D>::Outputs at(int part, int row) { return {part, row}; }
    struct Layer {
        Addition<D> additions[STACKS];
    };
    LayerSizes sizes_;
    std::vector<Layer> layers_;
    int rank_ = 0;
};

}  // namespace tandem
