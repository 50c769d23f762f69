// Formats of quantised weights as in GGUF files: blocks of neighbouring inputs of one output. Packed, the blocks of 32
// outputs are interleaved number by number, losslessly, with Q4_K's 6-bit scales as bytes. A weight is (number - ZERO)
// * scale + minimum.
#pragma once
#include "activations.h"

namespace tandem {

constexpr int PANEL = 2 * LANES;
constexpr int UNITS = GROUP / FOUR;  // units of 4 neighbouring inputs in a group

enum Format : int32_t { DENSE = 0, Q4_0 = 2, Q4_1 = 3, Q8_0 = 8, Q4_K = 12, Q6_K = 14 };  // as GGML numbers them

typedef uint8_t Units[PANEL][FOUR];  // one unit of every output

inline uint16_t half_at(const uint8_t* from) { return load<uint16_t>(from); }

// The numbers of 32 inputs, 4 bits each: unit i in the low bits of row i, unit 4 + i in its high bits.
struct Nibbles {
    Units rows[4];

    void set(int lane, const uint8_t* numbers) {
        for (int i = 0; i < GROUP; i++) {
            uint8_t& byte = rows[i / FOUR % 4][lane][i % FOUR];
            byte = uint8_t(byte | (numbers[i] & 15) << (i < GROUP / 2 ? 0 : 4));
        }
    }
    vu get(int unit, int lane) const { return load<vu>(rows[unit % 4][lane]) >> (unit / 4 * 4) & 0x0f0f0f0fu; }
};

// Factors of a group's sums for a register of outputs: one scale, or one per half of the group.
template <int PARTS> struct Factors {
    vf scale[PARTS], minimum;
};

// Every format has BYTES of a stored block of INPUTS inputs; Packed, a panel's blocks; PARTS scales a group; ZERO;
// MOST, the largest number; whether it has MINIMA. pack() puts an output's stored block into its lane; unit() and
// factors() return a group's values for outputs from `lane` on.
struct BlocksOf8 {  // Q8_0
    static constexpr int INPUTS = GROUP, BYTES = 34, PARTS = 1, ZERO = 128, MOST = 255;
    static constexpr bool MINIMA = false;
    struct Packed {
        Units rows[UNITS];
        uint16_t scale[PANEL];
    };
    static void pack(const uint8_t* from, Packed& to, int lane) {
        to.scale[lane] = half_at(from);
        for (int i = 0; i < GROUP; i++) to.rows[i / FOUR][lane][i % FOUR] = from[2 + i] ^ 128;
    }
    static vu unit(const Packed& p, int, int unit, int lane) { return load<vu>(p.rows[unit][lane]); }
    static Factors<1> factors(const Packed& p, int, int lane) { return {{from_half(load<vh>(p.scale + lane))}, vf{}}; }
};

struct BlocksOf4 {  // Q4_0
    static constexpr int INPUTS = GROUP, BYTES = 18, PARTS = 1, ZERO = 8, MOST = 15;
    static constexpr bool MINIMA = false;
    struct Packed {
        Nibbles numbers;
        uint16_t scale[PANEL];
    };
    static void pack(const uint8_t* from, Packed& to, int lane) {
        to.scale[lane] = half_at(from);
        for (int i = 0; i < GROUP; i++) to.numbers.rows[i / FOUR % 4][lane][i % FOUR] = from[2 + i % (GROUP / 2)];
    }
    static vu unit(const Packed& p, int, int unit, int lane) { return p.numbers.get(unit, lane); }
    static Factors<1> factors(const Packed& p, int, int lane) { return {{from_half(load<vh>(p.scale + lane))}, vf{}}; }
};

struct BlocksOf4AndMinima {  // Q4_1
    static constexpr int INPUTS = GROUP, BYTES = 20, PARTS = 1, ZERO = 0, MOST = 15;
    static constexpr bool MINIMA = true;
    struct Packed {
        Nibbles numbers;
        uint16_t scale[PANEL], minimum[PANEL];
    };
    static void pack(const uint8_t* from, Packed& to, int lane) {
        to.scale[lane] = half_at(from);
        to.minimum[lane] = half_at(from + 2);
        for (int i = 0; i < GROUP; i++) to.numbers.rows[i / FOUR % 4][lane][i % FOUR] = from[4 + i % (GROUP / 2)];
    }
    static vu unit(const Packed& p, int, int unit, int lane) { return p.numbers.get(unit, lane); }
    static Factors<1> factors(const Packed& p, int, int lane) {
        return {{from_half(load<vh>(p.scale + lane))}, from_half(load<vh>(p.minimum + lane))};
    }
};

struct SuperBlocksOf4 {  // Q4_K: 8 groups share a scale of scales and one of minima; products of the two are exact
    static constexpr int INPUTS = 256, BYTES = 144, PARTS = 1, ZERO = 0, MOST = 15;
    static constexpr bool MINIMA = true;
    struct Packed {
        uint16_t scale[PANEL], minimum[PANEL];
        struct {
            Nibbles numbers;
            uint8_t scale[PANEL], minimum[PANEL];
        } groups[INPUTS / GROUP];
    };
    static void pack(const uint8_t* from, Packed& to, int lane) {
        to.scale[lane] = half_at(from);
        to.minimum[lane] = half_at(from + 2);
        const uint8_t *six = from + 4, *numbers = from + 16;
        for (int group = 0; group < 8; group++) {
            auto& one = to.groups[group];
            const int low = group % 4;  // the upper two bits of groups 4 to 7 lie above the six of groups 0 to 3
            one.scale[lane] = group < 4 ? six[low] & 63 : uint8_t((six[low + 8] & 15) | (six[low] >> 6) << 4);
            one.minimum[lane] = group < 4 ? six[low + 4] & 63 : uint8_t(six[low + 8] >> 4 | (six[low + 4] >> 6) << 4);
            uint8_t own[GROUP];
            for (int i = 0; i < GROUP; i++) own[i] = uint8_t(numbers[group / 2 * GROUP + i] >> (group % 2 * 4));
            one.numbers.set(lane, own);
        }
    }
    static vu unit(const Packed& p, int group, int unit, int lane) { return p.groups[group].numbers.get(unit, lane); }
    static Factors<1> factors(const Packed& p, int group, int lane) {
        return {{from_half(load<vh>(p.scale + lane)) * wide(p.groups[group].scale + lane)},
                -(from_half(load<vh>(p.minimum + lane)) * wide(p.groups[group].minimum + lane))};
    }
};

struct SuperBlocksOf6 {  // Q6_K: 16 halves of groups share a scale of scales
    static constexpr int INPUTS = 256, BYTES = 210, PARTS = 2, ZERO = 32, MOST = 63;
    static constexpr bool MINIMA = false;
    struct Packed {
        uint16_t scale[PANEL];
        struct {
            Nibbles low;
            Units high[2];  // two bits of unit 4 j + t at 2 t of row j
            int8_t scale[2][PANEL];
        } groups[INPUTS / GROUP];
    };
    static void pack(const uint8_t* from, Packed& to, int lane) {
        const uint8_t *low = from, *high = from + 128, *scales = from + 192;
        to.scale[lane] = half_at(from + 208);
        for (int group = 0; group < 8; group++) {
            auto& one = to.groups[group];
            const int side = group / 4, quarter = group % 4;
            uint8_t own[GROUP];
            for (int i = 0; i < GROUP; i++) {
                own[i] = uint8_t(low[side * 64 + quarter % 2 * 32 + i] >> (quarter / 2 * 4));
                const int two = high[side * 32 + i] >> (2 * quarter) & 3, unit = i / FOUR;
                uint8_t& byte = one.high[unit / 4][lane][i % FOUR];
                byte = uint8_t(byte | two << (2 * (unit % 4)));
            }
            one.low.set(lane, own);
            for (int part = 0; part < 2; part++) one.scale[part][lane] = int8_t(scales[group * 2 + part]);
        }
    }
    static vu unit(const Packed& p, int group, int unit, int lane) {
        const auto& one = p.groups[group];
        const vu high = load<vu>(one.high[unit / 4][lane]);
        const int at = 2 * (unit % 4);
        return one.low.get(unit, lane) | ((at < 4 ? high << (4 - at) : high >> (at - 4)) & 0x30303030u);
    }
    static Factors<2> factors(const Packed& p, int group, int lane) {
        const vf scale = from_half(load<vh>(p.scale + lane));
        return {{scale * wide(p.groups[group].scale[0] + lane), scale * wide(p.groups[group].scale[1] + lane)}, vf{}};
    }
};

// Calls what(Blocks{}) for a quantised format's blocks.
template <class What> auto with_blocks(Format format, What what) {
    switch (format) {
        case Q4_0: return what(BlocksOf4{});
        case Q4_1: return what(BlocksOf4AndMinima{});
        case Q4_K: return what(SuperBlocksOf4{});
        case Q6_K: return what(SuperBlocksOf6{});
        default: return what(BlocksOf8{});
    }
}

}  // namespace tandem
