// Prints a hash of the logits of made-up models, one for each format of weights: what every CPU must print alike.
// Numbers come from integers and one rounded division, so that no library's cosine is in them.
#include "transformer.h"
#include <cstdio>

using namespace tandem;

namespace {

constexpr int WIDTH = 256, HEADS = 4, KV = 2, DIM = 64, INNER = 512, OUTPUTS = 300, LENGTH = 64, TOKENS = 20;

struct Numbers {  // a linear congruential generator
    uint64_t state = 1;
    uint32_t next() {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return uint32_t(state >> 33);
    }
    float value(float size) { return size * (float(int(next() % 20001) - 10000) / 10000.0f); }
    std::vector<float> values(size_t count, float size, float middle = 0) {
        std::vector<float> made(count);
        for (float& each : made) each = middle + value(size);
        return made;
    }
};

// Weights in the format that is asked for: float32, quantised in Q8_0 and Q4_1, or blocks of random bytes with small scales.
struct Weights {
    std::vector<float> dense;
    std::vector<uint8_t> blocks;
    Matrix matrix;

    Weights(Numbers& numbers, Format format, int outputs, int inputs) {
        if (format == DENSE || format == Q8_0 || format == Q4_1) {
            dense = numbers.values(size_t(outputs) * inputs, 0.2f);
            matrix = {dense.data(), nullptr, format};
            if (format == DENSE) return;
            const size_t bytes = row_bytes(format, inputs);
            blocks.resize(outputs * bytes);
            for (int row = 0; row < outputs; row++) encode(format, inputs, &dense[size_t(row) * inputs], &blocks[row * bytes]);
            matrix.weights = blocks.data();
            return;
        }
        with_blocks(format, [&](auto kind) {
            typedef decltype(kind) B;
            blocks.resize(size_t(outputs) * inputs / B::INPUTS * B::BYTES);
            for (uint8_t& byte : blocks) byte = uint8_t(numbers.next());
            for (size_t at = 0; at < blocks.size(); at += B::BYTES) {
                const size_t scale = at + (format == Q6_K ? 208 : 0);
                store_half(&blocks[scale], (format == Q4_0 ? 0.02f : 0.0004f) + numbers.value(0.0003f));
                if (format == Q4_K) store_half(&blocks[scale + 2], 0.003f + numbers.value(0.0003f));
            }
        });
        matrix = {blocks.data(), nullptr, format};
    }
};

uint64_t hash(const std::vector<float>& values) {
    uint64_t found = 14695981039346656037u;
    for (float each : values)
        for (int i = 0; i < 4; i++) found = (found ^ (load<uint32_t>(&each) >> (8 * i) & 255)) * 1099511628211u;
    return found;
}

uint64_t run(Pool& pool, Format format) {
    Numbers numbers;
    const Shape shape{2, WIDTH, HEADS, KV, DIM, INNER, OUTPUTS, OUTPUTS, 1, LENGTH, LENGTH, pool.count(), 1e-5f, 0.125f};
    const auto embedding = numbers.values(size_t(OUTPUTS) * WIDTH, 1), cosines = numbers.values(LENGTH * DIM / 2, 1);
    const auto sines = numbers.values(LENGTH * DIM / 2, 1), norm = numbers.values(WIDTH, 0.5f, 1);
    Transformer<Float32> model(pool, shape, embedding.data());
    auto made = [&](int outputs, int inputs) { return Weights(numbers, format, outputs, inputs); };
    for (int layer = 0; layer < 2; layer++) {
        Weights q = made(HEADS * DIM, WIDTH), k = made(KV * DIM, WIDTH), v = made(KV * DIM, WIDTH), o = made(WIDTH, HEADS * DIM);
        Weights gate = made(INNER, WIDTH), up = made(INNER, WIDTH), down = made(WIDTH, INNER);
        model.set_layer(layer, {norm.data(), norm.data(), nullptr, nullptr, nullptr, nullptr, q.matrix, k.matrix, v.matrix, o.matrix, gate.matrix, up.matrix, down.matrix, cosines.data(), sines.data(), DIM / 2, 0});
    }
    Weights head = made(OUTPUTS, WIDTH);
    model.set_head(norm.data(), head.matrix);
    std::vector<int32_t> tokens(TOKENS);
    for (int32_t& token : tokens) token = int32_t(numbers.next() % OUTPUTS);
    const int32_t slot = 0, start = 0, begins[2] = {0, TOKENS};
    std::vector<float> logits(size_t(TOKENS) * OUTPUTS);
    std::vector<Best> best;
    model.feed({1, &slot, &start, begins, tokens.data()}, 2, logits.data(), best);
    for (const Best& each : best)
        if (!each.sound) return 0;  // no hash: equal garbage would prove nothing
    return hash(logits);
}

}  // namespace

int main() {
    Pool pool(2);
    for (Format format : {DENSE, Q4_0, Q4_1, Q8_0, Q4_K, Q6_K}) std::printf("%d %016llx\n", int(format), (unsigned long long)run(pool, format));
}
