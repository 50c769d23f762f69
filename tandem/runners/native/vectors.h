// Vectors of 16 floats in GCC's vector types, portable; bfloat16 products use AVX-512 BF16 if present. Operations are
// lane by lane, so no result depends on how work is divided. float32 has the same bits on every CPU with fused
// multiply-add.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace tandem {

typedef float v16f __attribute__((vector_size(64)));
typedef int32_t v16i __attribute__((vector_size(64)));
typedef uint32_t v16u __attribute__((vector_size(64)));
typedef uint16_t v16h __attribute__((vector_size(32)));
typedef int8_t v16b __attribute__((vector_size(16)));
typedef uint8_t v16c __attribute__((vector_size(16)));
constexpr int LANES = 16;

// The same, one register wide, for sums of linear layers.
#if defined(__AVX512VNNI__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
typedef float vf __attribute__((vector_size(4 * WIDTH)));
typedef int32_t vi __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t vu __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t vh __attribute__((vector_size(2 * WIDTH)));
typedef int8_t vb __attribute__((vector_size(WIDTH)));
typedef uint8_t vc __attribute__((vector_size(WIDTH)));

template <class V> inline V load(const void* from) {
    V value;
    std::memcpy(&value, from, sizeof(V));
    return value;
}
template <class V> inline void store(void* to, V value) { std::memcpy(to, &value, sizeof(V)); }
// A number in every lane of a register. Adding it to zeros would turn -0 into 0.
template <class F> inline F spread(float value) { return (F)(decltype(F{} < F{}){} + load<int32_t>(&value)); }
template <class I, class F> inline F select(I mask, F yes, F no) { return (F)((mask & (I)yes) | (~mask & (I)no)); }

// Calls each(r) per register of 16 lanes: GCC compares wider vectors lane by lane.
constexpr int SIXTEEN = LANES / WIDTH;
template <class Each> inline void by_register(Each each) {
#pragma GCC unroll 4
    for (int r = 0; r < SIXTEEN; r++) each(r);
}

// f of each register of 16 lanes.
template <class F> inline v16f of_registers(v16f x, F f) {
    vf parts[SIXTEEN];
    store(parts, x);
    by_register([&](int r) { parts[r] = f(parts[r]); });
    return load<v16f>(parts);
}

// A number in all 16 lanes; GCC would go through memory.
inline v16f all(float value) {
    vf parts[SIXTEEN];
    by_register([&](int r) { parts[r] = vf{} + value; });
    return load<v16f>(parts);
}

inline float widen(uint16_t value) {
    uint32_t bits = uint32_t(value) << 16;
    return load<float>(&bits);
}
// Rounds to nearest even, as torch does; NaN stays NaN.
inline v16h narrow_exactly(v16f value) {
    v16u bits = (v16u)value;
    v16u rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    v16u nan = (bits >> 16) | 0x40u;
    v16u is_nan = (v16u)((v16i)(0x7f800000u - (bits & 0x7fffffffu)) >> 31);
    return __builtin_convertvector((is_nan & nan) | (~is_nan & rounded), v16h);
}
// Faster with AVX-512 BF16, which makes numbers below 1e-38 zero.
inline v16h narrow(v16f value) {
#ifdef __AVX512BF16__
    return (v16h)_mm512_cvtneps_pbh((__m512)value);
#else
    return narrow_exactly(value);
#endif
}
inline v16f widen(v16h value) { return (v16f)(__builtin_convertvector(value, v16u) << 16); }

// a * b + c, rounded once if the CPU can. Explicit, with -ffp-contract=off: fusing must not depend on the loop.
#if defined(__AVX512VNNI__)
inline v16f fused(v16f a, v16f b, v16f c) { return (v16f)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#else
inline vf fused(vf a, vf b, vf c) {
#if defined(__AVX2__) && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF)
    vf result;
    for (int i = 0; i < WIDTH; i++) result[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return result;
#else
    return a * b + c;
#endif
}
inline v16f fused(v16f a, v16f b, v16f c) {
    vf x[SIXTEEN], y[SIXTEEN], sum[SIXTEEN];
    store(x, a), store(y, b), store(sum, c);
    for (int i = 0; i < SIXTEEN; i++) sum[i] = fused(x[i], y[i], sum[i]);
    return load<v16f>(sum);
}
#endif

// The largest integer up to x, for x that an int32 holds.
inline vf floor_of_register(vf x) {
#if defined(__AVX512VNNI__)
    return (vf)_mm512_floor_ps((__m512)x);
#elif defined(__AVX2__)
    return (vf)_mm256_floor_ps((__m256)x);
#else
    const vf whole = __builtin_convertvector(__builtin_convertvector(x, vi), vf);
    return whole + __builtin_convertvector(vi(whole > x), vf);  // conversion rounds towards zero
#endif
}

// e^x for x <= 88 (Cephes' expf: relative error below 2e-7); -inf gives 0.
inline vf bounded_exponential(vf x) {
    const vi below = x < -87.0f;
    x = select(below, vf{} - 87.0f, x);
    vf whole = floor_of_register(x * 1.44269504088896341f + 0.5f);
    vi n = __builtin_convertvector(whole, vi);
    x = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    vf y = ((((1.9875691500e-4f * x + 1.3981999507e-3f) * x + 8.3334519073e-3f) * x + 4.1665795894e-2f) * x + 1.6666665459e-1f) * x + 5.0000001201e-1f;
    y = y * x * x + x + 1.0f;
    vf power = (vf)((n + 127) << 23);
    return select(below, vf{}, y * power);
}
inline vf exponential_of_register(vf x) {
    return bounded_exponential(select(x > 88.0f, vf{} + 88.0f, x));
}
inline v16f exponential(v16f x) { return of_registers(x, exponential_of_register); }

// tanh x, within 1e-7; NaN stays NaN.
inline vf hyperbolic_tangent_of_register(vf x) {
    const vu sign = (vu)x & 0x80000000u;
    const vf power = exponential_of_register((vf)((vu)x ^ sign) * -2.0f);
    return (vf)((vu)((1.0f - power) / (1.0f + power)) | sign);
}
inline v16f hyperbolic_tangent(v16f x) { return of_registers(x, hyperbolic_tangent_of_register); }

enum Activation { SILU, GELU_TANH, GELU };

// SiLU, or GELU by tanh, as x times a sigmoid, or by erfc (Numerical Recipes: relative error below 2e-7).
inline v16f activated(int kind, v16f x) {
    if (kind == SILU) return x / (1.0f + exponential(-x));
    if (kind == GELU_TANH) return x / (1.0f + exponential(-1.59576912160573f * (x + 0.044715f * x * x * x)));
    return of_registers(x, [](vf of) {
        const vf z = (vf)((vu)of & 0x7fffffffu) * 0.70710678118654752f, t = 1.0f / (1.0f + 0.5f * z);
        constexpr float factors[] = {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f, 0.09678418f, 0.37409196f, 1.00002368f};
        vf y = vf{} + 0.17087277f;
        for (float factor : factors) y = y * t + factor;
        const vf tail = 0.5f * t * exponential_of_register(y * t - 1.26551223f - z * z);
        return of * select(of < vf{}, tail, 1.0f - tail);
    });
}

inline float sum(v16f value) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += value[i];
    return total;
}
template <class F> inline float largest(F value) {
    float best = value[0];
    for (size_t i = 1; i < sizeof(F) / sizeof(float); i++) best = value[i] > best ? value[i] : best;
    return best;
}

// The argmax, lane by lane, the lowest of equals; whether any is NaN.
struct alignas(64) Running {
    vf value[SIXTEEN];
    vi token[SIXTEEN], nan[SIXTEEN];

    Running() { by_register([&](int r) { value[r] = vf{} - INFINITY, token[r] = vi{} + INT32_MAX, nan[r] = vi{}; }); }
    void take(v16f values, v16i tokens) {
        vf own[SIXTEEN];
        vi its[SIXTEEN];
        std::memcpy(own, &values, sizeof(values));
        std::memcpy(its, &tokens, sizeof(tokens));
        by_register([&](int r) {
            const vi better = (own[r] > value[r]) | ((own[r] == value[r]) & (its[r] < token[r]));
            token[r] = select(better, its[r], token[r]);
            value[r] = select(better, own[r], value[r]);
            nan[r] |= own[r] != own[r];
        });
    }
    void end(float& best, int32_t& its, bool& unsound) const {
        by_register([&](int r) {
            for (int lane = 0; lane < WIDTH; lane++) {
                unsound |= nan[r][lane] != 0;
                if (value[r][lane] > best || (value[r][lane] == best && token[r][lane] < its)) best = value[r][lane], its = token[r][lane];
            }
        });
    }
};

// A data type's storage, and the product of two stored values in a step of the sum, one of them in every lane.
struct Bfloat16 {
    typedef uint16_t stored, number;
    typedef uint32_t unit, factor;  // neighbours along the summed dimension
    static constexpr int PER_UNIT = 2, PARTS = 1;
    typedef Bfloat16 short_cache;
    static inline v16f wide(const stored* from) { return widen(load<v16h>(from)); }
    static inline float wide1(stored value) { return widen(value); }
    static inline void keep(stored* to, v16f value) { store(to, narrow(value)); }
    static inline void shorten(stored* to, const number* from) { std::memcpy(to, from, LANES * sizeof(stored)); }
    static inline vu part(vu both, int) { return both; }
    static inline v16f rounded(v16f value) { return widen(narrow(value)); }
    static inline vu everywhere(unit x) {
        vu both = vu{} + x;
#if defined(__AVX2__) && !defined(__AVX512BF16__)
        asm("" : "+v"(both));  // else GCC takes it apart first, and spreads each part from another kind of register
#endif
        return both;
    }
    static inline vf multiply_add(vf sum, vu x, vu w) {
#ifdef __AVX512BF16__
        return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
#else
        sum = fused((vf)(x << 16), (vf)(w << 16), sum);
        return fused((vf)(x & 0xffff0000u), (vf)(w & 0xffff0000u), sum);
#endif
    }
};

struct ShortCache;
struct Float32 {
    typedef float stored, number, unit, factor;
    static constexpr int PER_UNIT = 1, PARTS = 1;
    typedef ShortCache short_cache;
    static inline v16f wide(const stored* from) { return load<v16f>(from); }
    static inline float wide1(stored value) { return value; }
    static inline void keep(stored* to, v16f value) { store(to, value); }
    static inline void shorten(stored* to, const number* from) { std::memcpy(to, from, LANES * sizeof(stored)); }
    static inline vu part(vu value, int) { return value; }
    static inline v16f rounded(v16f value) { return value; }
    static inline vf everywhere(unit x) { return spread<vf>(x); }
    static inline vf multiply_add(vf sum, vf x, vu w) { return fused(x, (vf)w, sum); }
};

// Keys and values of a float32 model, stored as bfloat16 and widened when read: sums have the same bits on every CPU.
struct ShortCache : Float32 {
    typedef uint16_t stored;
    typedef uint32_t unit;
    static constexpr int PER_UNIT = 2, PARTS = 2;  // the two of a unit are added one after the other
    static inline void shorten(stored* to, const number* from) { store(to, narrow_exactly(load<v16f>(from))); }
    static inline vu part(vu both, int which) { return which ? both & 0xffff0000u : both << 16; }
};

}  // namespace tandem
