// Products of a matrix in blocks, by the native sources that this is compiled with.
#include "linear.h"

using namespace tandem;

struct Product {
    Arena arena;
    Linear<Float32> linear;
};

extern "C" {

int switch_tiles(int use) { return use_tiles(use); }

Product* product(Format format, int inputs, int outputs, const char* blocks, size_t row_bytes) {
    auto* made = new Product;
    made->linear = {made->arena, inputs, outputs / PANEL, [&](int output) { return Row{blocks + output * row_bytes, format}; }};
    return made;
}

void multiply(const Product* by, const float* x, int tokens, float* to) {
    const Linear<Float32>& linear = by->linear;
    const size_t inputs = linear.inputs(), outputs = linear.panels() * PANEL;
    Buffer<Group8> groups(tokens * Linear<Float32>::groups(int(inputs)));
    for (int t = 0; t < tokens; t++) quantise<Float32>(x + t * inputs, int(inputs), groups.data() + t, tokens);
    const Tiles tiles(tokens, Tiles::GROUPS);
    for (int panel = 0; panel < linear.panels(); panel++)
        linear.panel(panel, {x, inputs, groups.data(), size_t(tokens)}, tiles, Soon{}, [&](int token, v16f first, v16f last) {
            store(to + token * outputs + panel * PANEL, first);
            store(to + token * outputs + panel * PANEL + LANES, last);
        });
}

}  // extern "C"
