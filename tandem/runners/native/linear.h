// Linear layers over weights packed in panels of 32 outputs, dense or in blocks. Each output is one sum in the order of the
// inputs, whatever the number of tokens: the same token has the same bits alone, among drafts, in a prefill and beside any
// neighbours.
#pragma once
#include "encode.h"
#include "quantised.h"
#include <stdexcept>

namespace tandem {

constexpr int TILE = 8;  // tokens whose sums are held in registers at once

// The weights of one output, or zeros where `at` is null: stored in one format, packed in the same, or dense ones in blocks.
struct Row {
    const void* at = nullptr;
    Format stored = DENSE, packed = DENSE;
};

// Rows of activations: `values` are `stride` apart. Layers with blocks read `groups`: group g of row t at g * `tokens` + t.
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

    // Its weights live in `arena`. `row(i)` gives the weights of output i, `bias(i)` its bias; both for i below panels * 32.
    // Throws where rows of one panel are packed in different formats.
    template <class Rows, class Biases> Linear(Arena& arena, int inputs, int panels, Rows row, Biases bias)
        : inputs_(inputs), panels_(panels), bias_(size_t(panels) * PANEL) {
        for (int which = 0; which < panels; which++) {
            Row rows[PANEL];
            for (int lane = 0; lane < PANEL; lane++) {
                rows[lane] = row(which * PANEL + lane);
                bias_[size_t(which) * PANEL + lane] = bias(which * PANEL + lane);
            }
            panels_[which] = packed(arena, rows);
            blocks_ |= panels_[which].format != DENSE;
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
    // Few tokens leave no time for it: the processor itself fetches ahead what is read as fast as memory gives it, and asked
    // for more it is slower. With more tokens there is arithmetic behind which it does not see what comes next.
    bool fetches_ahead(int tokens) const { return tokens > (blocks_ ? 4 : 2); }
    bool blocks() const { return blocks_; }
    static int groups(int inputs) { return (inputs + GROUP - 1) / GROUP; }

    // Calls done(token, first 16 outputs, last 16 outputs) for each of `tokens` rows of x, in tiles as equal as can be.
    // Meanwhile `then`, the panel after this one, is fetched, as much of it in one tile as in another.
    template <class Done> void panel(int which, const Input<D>& x, int tokens, Soon then, Done done) const {
        const int tiles = (tokens + TILE - 1) / TILE;
        for (int at = 0, left = tiles; left; left--) {
            const int count = (tokens - at + left - 1) / left;
            sized<TILE>(count, which, x, at, then, tiles, done);
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
    static int lines_of(size_t bytes, int tiles) { return int((bytes / 64 + tiles - 1) / tiles); }

    Panel packed(Arena& arena, const Row (&rows)[PANEL]) const {
        const auto first = std::find_if(rows, rows + PANEL, [](const Row& row) { return row.at; });
        const Format format = first == rows + PANEL ? DENSE : first->packed;
        for (const Row& row : rows)
            if (row.at && row.packed != format) throw std::invalid_argument("formats");
        if (format == DENSE) return packed_dense(arena, rows);
        return with_blocks(format, [&](auto blocks) { return packed_blocks<decltype(blocks)>(arena, rows, format); });
    }
    Panel packed_dense(Arena& arena, const Row (&rows)[PANEL]) const {
        const size_t units = inputs_ / D::PER_UNIT;
        unit* to = arena.take<unit>(units * PANEL);
        for (int lane = 0; lane < PANEL; lane++)
            for (size_t i = 0; rows[lane].at && i < units; i++)
                std::memcpy(to + i * PANEL + lane, static_cast<const stored*>(rows[lane].at) + i * D::PER_UNIT, sizeof(unit));
        return {DENSE, reinterpret_cast<const char*>(to), units * PANEL * sizeof(unit)};
    }
    template <class B> Panel packed_blocks(Arena& arena, const Row (&rows)[PANEL], Format format) const {
        const size_t count = (inputs_ + B::INPUTS - 1) / B::INPUTS;
        auto* to = arena.take<typename B::Packed>(count);
        std::vector<uint8_t> encoded(count * B::BYTES);
        for (int lane = 0; lane < PANEL; lane++) {
            auto* from = static_cast<const uint8_t*>(rows[lane].at);
            if (!from) continue;
            if (rows[lane].stored == DENSE) {
                encode<D>(format, inputs_, static_cast<const stored*>(rows[lane].at), encoded.data());
                from = encoded.data();
            }
            for (size_t i = 0; i < count; i++) B::pack(from + i * B::BYTES, to[i], lane);
        }
        return {format, reinterpret_cast<const char*>(to), count * sizeof(typename B::Packed)};
    }

    template <int N, class Done>
    void sized(int count, int which, const Input<D>& x, int at, Soon& then, int tiles, Done& done) const {
        if (count == N) tile<N>(which, x, at, then, tiles, done);
        else if constexpr (N > 1) sized<N - 1>(count, which, x, at, then, tiles, done);
    }

    template <int N, class Done> void tile(int which, const Input<D>& x, int at, Soon& then, int tiles, Done& done) const {
        v16f first[N], last[N];
        const Panel& panel = panels_[which];
        if (panel.format == DENSE) dense<N>(panel, x.values + at * x.stride, x.stride, then, tiles, first, last);
        else
            with_blocks(panel.format, [&](auto blocks) {
                typedef decltype(blocks) B;
                typedef typename B::Packed Packed;
                const int count = int(panel.bytes / sizeof(Packed)), lines = lines_of(sizeof(Packed) * GROUP / B::INPUTS, tiles);
                multiply_blocks<B, N>(reinterpret_cast<const Packed*>(panel.at), count, x.groups + at, x.tokens, then, lines, first, last);
            });
        v16f near = load<v16f>(&bias_[size_t(which) * PANEL]), far = load<v16f>(&bias_[size_t(which) * PANEL + LANES]);
#pragma GCC unroll 8
        for (int m = 0; m < N; m++) done(at + m, D::rounded(first[m] + near), D::rounded(last[m] + far));
    }

    template <int N> void dense(const Panel& panel, const stored* x, size_t stride, Soon& then, int tiles, v16f* firsts, v16f* lasts) const {
        const unit* w = reinterpret_cast<const unit*>(panel.at);
        const int units = inputs_ / D::PER_UNIT, lines = lines_of(BURST * PANEL * sizeof(unit), tiles);
        v16f first[N], last[N];
#pragma GCC unroll 8  // all of these loops, or else the sums lie in memory
        for (int m = 0; m < N; m++) first[m] = last[m] = v16f{};
        for (int i = 0; i < units;) {
            then.fetch(lines);
            for (const int end = std::min(i + BURST, units); i < end; i++, w += PANEL) {
                v16u near = load<v16u>(w), far = load<v16u>(w + LANES);
#pragma GCC unroll 8
                for (int m = 0; m < N; m++) {
                    unit value = load<unit>(x + m * stride + size_t(i) * D::PER_UNIT);
                    first[m] = D::multiply_add(first[m], value, near);
                    last[m] = D::multiply_add(last[m], value, far);
                }
            }
        }
#pragma GCC unroll 8
        for (int m = 0; m < N; m++) firsts[m] = first[m], lasts[m] = last[m];
    }

    int inputs_ = 0;
    bool blocks_ = false;
    std::vector<Panel> panels_;
    Buffer<float> bias_;
};

}  // namespace tandem
