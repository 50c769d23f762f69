// Compares products by tiles with those of other instructions, byte by byte: matrices of every format, of 1 to 40 tokens and
// few and many groups. Prints what use_tiles() said, then for each format how many products it compared and how many differ.
#include "linear.h"
#include <cstdio>

using namespace tandem;

namespace {

constexpr int OUTPUTS = 2 * PANEL;
uint64_t state = 1;
uint32_t chance() { return uint32_t((state = state * 6364136223846793005u + 1442695040888963407u) >> 33); }

// The rows of a matrix, blocks of random bytes whose scales are finite.
template <class B> std::vector<uint8_t> matrix(Format format, int inputs) {
    std::vector<uint8_t> made(up(inputs, B::INPUTS) / B::INPUTS * B::BYTES * OUTPUTS);
    for (uint8_t& byte : made) byte = uint8_t(chance());
    for (size_t at = 0; at < made.size(); at += B::BYTES) {
        const size_t scale = at + (format == Q6_K ? 208 : 0);
        made[scale + 1] &= 0xbf;
        if (B::MINIMA) made[scale + 3] &= 0xbf;
    }
    return made;
}

typedef std::vector<float> Outputs;

Outputs product(const Linear<Float32>& layer, const std::vector<float>& values, int tokens) {
    Buffer<Group8> groups(size_t(tokens) * Linear<Float32>::groups(layer.inputs()));
    const Input<Float32> x{values.data(), size_t(layer.inputs()), groups.data(), size_t(tokens)};
    for (int t = 0; t < tokens; t++) quantise<Float32>(x.values + t * x.stride, layer.inputs(), groups.data() + t, tokens);
    Outputs made(size_t(tokens) * OUTPUTS);
    const Tiles by(tokens, layer.blocks());
    for (int panel = 0; panel < layer.panels(); panel++)
        layer.panel(panel, x, by, Soon{}, [&](int token, v16f first, v16f last) {
            store(&made[size_t(token) * OUTPUTS + panel * PANEL], first);
            store(&made[size_t(token) * OUTPUTS + panel * PANEL + LANES], last);
        });
    return made;
}

template <class B> void compare(Format format) {
    int compared = 0, differ = 0, passes = 0;
    for (const int inputs : {B::INPUTS, 3 * B::INPUTS, 3 * B::INPUTS - 5, 8 * B::INPUTS}) {
        const auto rows = matrix<B>(format, inputs);
        const size_t bytes = rows.size() / OUTPUTS;
        Arena arena;
        const Linear<Float32> layer(arena, inputs, OUTPUTS / PANEL, [&](int o) { return Row{&rows[o * bytes], format, float(o)}; });
        for (int tokens = 1; tokens <= 40; tokens++) {
            std::vector<float> values(size_t(tokens) * inputs);
            for (float& value : values) value = float(int32_t(chance() % 20001) - 10000) / 1000;
            use_tiles(false);
            const Outputs own = product(layer, values, tokens);
            use_tiles(true);
            const Outputs other = product(layer, values, tokens);
            differ += std::memcmp(own.data(), other.data(), own.size() * sizeof(float)) != 0;
            compared++;
            passes += Tiles(tokens, true).most() == Tiles::MOST;
        }
    }
    std::printf("%d: %d compared, %d by tiles, %d differ\n", int(format), compared, passes, differ);
}

}  // namespace

int main() {
    std::printf("%d\n", use_tiles(true));
    for (Format format : {Q4_0, Q4_1, Q8_0, Q4_K, Q6_K}) with_blocks(format, [&](auto kind) { compare<decltype(kind)>(format); });
}
