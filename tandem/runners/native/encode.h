// Quantises dense weights to Q8_0 or Q4_1. Scales are rounded as stored before the nearest numbers are chosen.
#pragma once
#include "blocks.h"
#include <algorithm>

namespace tandem {

inline void store_half(uint8_t* to, float value) {
    const uint16_t half = to_half(value);
    std::memcpy(to, &half, sizeof(half));
}

struct Weights32 {
    v16f parts[2];
};

// value / scale as the nearest integer in `least` .. `most`; 0 for scale 0.
inline v16f nearest(v16f value, float scale, float least, float most) {
    if (!(scale > 0)) return v16f{};
    const v16f magic = all(0x1.8p23f), number = (value / scale + magic) - magic;
    return select(number < least, all(least), select(number > most, all(most), number));
}

// A block of Q8_0.
inline void encode_8(const Weights32& weights, uint8_t* to) {
    Values32 values;
    std::memcpy(values, weights.parts, sizeof(values));
    const uint32_t bits = magnitude(values);
    store_half(to, load<float>(&bits) / 127);
    const float scale = from_half(half_at(to));
    for (int part = 0; part < 2; part++) {
        const v16f numbers = nearest(weights.parts[part], scale, -127, 127);
        store(to + 2 + part * LANES, __builtin_convertvector(__builtin_convertvector(numbers, v16i), v16b));
    }
}

// A Q4_1 block whose numbers 0 and 15 are `least` and `most`. Returns the squared error.
inline float encode_4(const Weights32& weights, float least, float most, uint8_t* to) {
    store_half(to, (most - least) / 15);
    store_half(to + 2, least);
    const float scale = from_half(half_at(to)), minimum = from_half(half_at(to + 2));
    v16f error{}, numbers[2];
    for (int part = 0; part < 2; part++) {
        numbers[part] = nearest(weights.parts[part] - minimum, scale, 0, 15);
        const v16f off = numbers[part] * scale + minimum - weights.parts[part];
        error += off * off;
    }
    store(to + 4, __builtin_convertvector(__builtin_convertvector(numbers[0] + numbers[1] * 16.0f, v16i), v16c));
    return sum(error);
}

// Also tries a range without the outermost weights.
inline void encode_4(const Weights32& weights, uint8_t* to) {
    float least = INFINITY, most = -INFINITY;
    for (const v16f& part : weights.parts)
        for (int i = 0; i < LANES; i++) least = std::min(least, part[i]), most = std::max(most, part[i]);
    constexpr int TRIES = 4;
    const float step = 0.03f * (most - least);
    float best = INFINITY;
    for (int below = 0; below <= TRIES; below++)
        for (int above = 0; above <= TRIES; above++) {
            uint8_t tried[BlocksOf4AndMinima::BYTES];
            const float error = encode_4(weights, least + below * step, most - above * step, tried);
            if (error < best || !(below || above)) best = error, std::memcpy(to, tried, sizeof(tried));
        }
}

// `inputs` weights as blocks of `format`, zero-padded.
inline void encode(Format format, int inputs, const float* weights, uint8_t* to) {
    const int bytes = format == Q4_1 ? BlocksOf4AndMinima::BYTES : BlocksOf8::BYTES;
    for (int begin = 0; begin < inputs; begin += GROUP, to += bytes) {
        Weights32 block{};
        std::memcpy(block.parts, weights + begin, std::min(GROUP, inputs - begin) * sizeof(float));
        if (format == Q4_1) encode_4(block, to);
        else encode_8(block, to);
    }
}

}  // namespace tandem
