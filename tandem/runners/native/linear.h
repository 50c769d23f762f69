// Linear layers over weights packed in panels of 32 outputs, dense or in blocks. Each output is one sum in the order of
// inputs, so a token has the same bits in every batch.
#pragma once
#include "quantised.h"
#include <memory>
#include <stdexcept>

namespace tandem {

// An output's weights, or zeros for null `at`.
struct Row {
    const void* at = nullptr;
    Format format = DENSE;
    float bias = 0;
};

// Activations: `values` are `stride` apart; with blocks, group g of row t is groups[g * `tokens` + t].
template <class D> struct Input {
    const typename D::stored* values;
    size_t stride;
    const Group8* groups;
    size_t tokens;
};

template <class D> class Linear {
public:
    typedef typename D::stored stored;
    typedef typename D::unit unit;

    Linear() = default;

    // Weights live in `arena`. `row(i)`: of output i < panels * 32. Throws for different formats in a panel.
    template <class Rows> Linear(Arena& arena, int inputs, int panels, Rows row)
        : inputs_(inputs), panels_(panels), bias_(size_t(panels) * PANEL) {
        if (D::PER_UNIT == 2 && inputs % (D::PER_UNIT * LANES) == 0 && tiles_multiply_pairs()) by_ = Tiles::PAIRS;
        for (int which = 0; which < panels; which++) {
            Row rows[PANEL];
            for (int lane = 0; lane < PANEL; lane++) {
                rows[lane] = row(which * PANEL + lane);
                bias_[size_t(which) * PANEL + lane] = rows[lane].bias;
            }
            panels_[which] = packed(arena, rows);
            if (panels_[which].format != DENSE) by_ = Tiles::GROUPS;  // tiles have one shape in a layer: its dense panels go without
        }
    }
    int inputs() const { return inputs_; }
    int panels() const { return int(panels_.size()); }
    Soon soon(int which) const { return {panels_[which].at, panels_[which].at + panels_[which].bytes}; }
    size_t bytes() const {
        size_t total = 0;
        for (const Panel& panel : panels_) total += panel.bytes;
        return total;
    }
    // With AVX-512 and few tokens AMD's processors prefetch at memory speed, and hints slow them; with more tokens arithmetic
    // hides the next reads from them. Intel's always need hints: without, a step of one token took 1.2 times as long.
    bool fetches_ahead(int tokens) const { return WIDTH < 16 || !prefetches_well() || tokens > (blocks() ? 4 : 2); }
    bool blocks() const { return by_ == Tiles::GROUPS; }  // of some panels
    Tiles::Operands by() const { return by_; }  // in every batch, so sums of pairs have tdpbf16ps's order for few tokens too
    static int groups(int inputs) { return (inputs + GROUP - 1) / GROUP; }

    // Calls done(token, first 16 outputs, last 16 outputs) per row of x, in tiles of nearly equal size, smaller ones
    // first. Meanwhile prefetches `then`, the next panel, in equal parts.
    template <class Done> void panel(int which, const Input<D>& x, const Tiles& by, Soon then, Done done) const {
        const v16f near = load<v16f>(&bias_[size_t(which) * PANEL]), far = load<v16f>(&bias_[size_t(which) * PANEL + LANES]);
        const int most = panels_[which].format == DENSE && by_ != Tiles::PAIRS ? DENSE_TILE : by.most(), tiles = (by.tokens + most - 1) / most;
        alignas(64) float sums[Tiles::MOST][PANEL];
        for (int at = 0, left = tiles; left; left--) {
            const int count = (by.tokens - at) / left;
            tile(which, x, at, count, by, then, tiles, sums);
            for (int m = 0; m < count; m++)
                done(at + m, D::rounded(load<v16f>(sums[m]) + near), D::rounded(load<v16f>(sums[m] + LANES) + far));
            at += count;
        }
    }

private:
    struct Panel {
        Format format = DENSE;
        const char* at = nullptr;
        size_t bytes = 0;
    };
    static constexpr int BURST = 8;  // units between two fetches
    // Dense weights: bfloat16 halves take registers that AVX2 lacks for more.
    static constexpr int DENSE_TILE = WIDTH == 8 && D::PER_UNIT == 2 ? 4 : TILE;
    static int lines_of(size_t bytes, int tiles) { return int((bytes / 64 + tiles - 1) / tiles); }

    Panel packed(Arena& arena, const Row (&rows)[PANEL]) const {
        const auto first = std::find_if(rows, rows + PANEL, [](const Row& row) { return row.at; });
        const Format format = first == rows + PANEL ? DENSE : first->format;
        for (const Row& row : rows)
            if (row.at && row.format != format) throw std::invalid_argument("formats");
        if (format == DENSE) return packed_dense(arena, rows);
        return with_blocks(format, [&](auto blocks) { return packed_blocks<decltype(blocks)>(arena, rows, format); });
    }
    Panel packed_dense(Arena& arena, const Row (&rows)[PANEL]) const {
        const size_t units = inputs_ / D::PER_UNIT;
        unit* to = arena.take<unit>(units * PANEL);
        for (size_t i = 0; i < units; i++)  // so that what is written lies together
            for (int lane = 0; lane < PANEL; lane++)
                if (rows[lane].at) std::memcpy(to + i * PANEL + lane, static_cast<const stored*>(rows[lane].at) + i * D::PER_UNIT, sizeof(unit));
        return {DENSE, reinterpret_cast<const char*>(to), units * PANEL * sizeof(unit)};
    }
    template <class B> Panel packed_blocks(Arena& arena, const Row (&rows)[PANEL], Format format) const {
        const size_t count = (inputs_ + B::INPUTS - 1) / B::INPUTS;
        auto* to = arena.take<typename B::Packed>(count);
        for (int lane = 0; lane < PANEL; lane++)
            for (size_t i = 0; rows[lane].at && i < count; i++) B::pack(static_cast<const uint8_t*>(rows[lane].at) + i * B::BYTES, to[i], lane);
        return {format, reinterpret_cast<const char*>(to), count * sizeof(typename B::Packed)};
    }

    void tile(int which, const Input<D>& x, int at, int count, const Tiles& by, Soon& then, int tiles, float (*sums)[PANEL]) const {
        const Panel& panel = panels_[which];
        const stored* values = x.values + at * x.stride;
        if (by_ == Tiles::PAIRS) return by.multiply_pairs(panel.at, inputs_, values, x.stride * sizeof(stored), then, lines_of(LANES * PANEL * sizeof(unit), tiles), sums);
        if (panel.format == DENSE) return sized<DENSE_TILE>(count, panel, values, x.stride, then, tiles, sums);
        const auto [size, inputs] = with_blocks(panel.format, [](auto blocks) {
            return std::pair(sizeof(typename decltype(blocks)::Packed), decltype(blocks)::INPUTS);
        });
        const int lines = lines_of(size * GROUP / inputs, tiles);
        by.multiply(panel.format, count, panel.at, int(panel.bytes / size), x.groups + at, x.tokens, then, lines, sums);
    }

    template <int N>
    void sized(int count, const Panel& panel, const stored* x, size_t stride, Soon& then, int tiles, float (*sums)[PANEL]) const {
        if (count == N) return dense<N>(panel, x, stride, then, tiles, sums);
        if constexpr (N > 1) sized<N - 1>(count, panel, x, stride, then, tiles, sums);
    }

    // As many outputs at a time as registers hold.
    template <int N> [[gnu::noinline]] void dense(const Panel& panel, const stored* x, size_t stride, Soon& then, int tiles, float (*to)[PANEL]) const {
        constexpr int TOGETHER = N * REGISTERS <= 16 - 8 * (WIDTH == 8) ? REGISTERS : REGISTERS / 2;
        const int units = inputs_ / D::PER_UNIT, lines = lines_of(BURST * WIDTH * TOGETHER * sizeof(unit), tiles);
        for (int from = 0; from < PANEL; from += TOGETHER * WIDTH) {
            const unit* w = reinterpret_cast<const unit*>(panel.at) + from;
            vf sums[TOGETHER][N];
#pragma GCC unroll 8  // all of these loops, or else the sums lie in memory
            for (int r = 0; r < TOGETHER; r++)
#pragma GCC unroll 8
                for (int m = 0; m < N; m++) sums[r][m] = vf{};
            for (int i = 0; i < units;) {
                then.fetch(lines);
                for (const int end = std::min(i + BURST, units); i < end; i++, w += PANEL) {
                    vu numbers[TOGETHER];
#pragma GCC unroll 8
                    for (int r = 0; r < TOGETHER; r++) numbers[r] = load<vu>(w + r * WIDTH);
#pragma GCC unroll 8
                    for (int m = 0; m < N; m++) {
                        const auto value = D::everywhere(load<unit>(x + m * stride + size_t(i) * D::PER_UNIT));
#pragma GCC unroll 8
                        for (int r = 0; r < TOGETHER; r++) sums[r][m] = D::multiply_add(sums[r][m], value, numbers[r]);
                    }
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < TOGETHER; r++)
#pragma GCC unroll 8
                for (int m = 0; m < N; m++) store(to[m] + from + r * WIDTH, sums[r][m]);
        }
    }

    int inputs_ = 0;
    Tiles::Operands by_ = Tiles::NOTHING;
    std::vector<Panel> panels_;
    Buffer<float> bias_;
};

// Weights [outputs, inputs] in a format, and biases [outputs] in the model's dtype, or null.
struct Matrix {
    const void *weights, *bias;
    Format format;
};

template <class T> Buffer<T> copied(const void* from, size_t count) {
    Buffer<T> made(from ? count : 0);
    if (from) std::memcpy(made.data(), from, count * sizeof(T));
    return made;
}

inline size_t row_bytes(Format format, int inputs) {
    return with_blocks(format, [&](auto blocks) { return up(inputs, decltype(blocks)::INPUTS) / decltype(blocks)::INPUTS * decltype(blocks)::BYTES; });
}

// Stacked matrices, and an output's row in them.
template <class D> struct Stack {
    struct Part {
        Matrix matrix;
        int rows;
    };
    std::vector<Part> parts;
    int inputs;

    // `beyond`: the bias of outputs that no part has.
    Row row(int output, float beyond = 0) const {
        for (const auto& [matrix, rows] : parts) {
            if (output < rows) {
                const size_t bytes = matrix.format == DENSE ? inputs * sizeof(typename D::stored) : row_bytes(matrix.format, inputs);
                const auto* bias = static_cast<const typename D::stored*>(matrix.bias);
                return {static_cast<const char*>(matrix.weights) + output * bytes, matrix.format, bias ? D::wide1(bias[output]) : 0};
            }
            output -= rows;
        }
        return {nullptr, DENSE, beyond};
    }
    Linear<D> packed(Arena& arena, float beyond = 0) const {
        size_t rows = 0;
        for (auto& part : parts) rows += part.rows;
        return Linear<D>(arena, inputs, int(up(rows, PANEL)) / PANEL, [&](int o) { return row(o, beyond); });
    }
};

// --- LoRA adapters of packed matrices' outputs, by row. Sums are float32, over inputs, then ranks, in every batch. ---

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
