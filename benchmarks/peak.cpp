// The most products of bytes a thread makes in a second, on registers, with sums that do not wait for each other: `vpdpbusd`
// with AVX-512 VNNI, `vpmaddubsw` and the addition that each needs with AVX2; and by AMX, tiles of 16 tokens, 16 outputs and 64
// inputs.
#include <time.h>
#if defined(__AVX512VNNI__) && defined(__linux__) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#include "../tandem/runners/native/amx.h"
#endif
#if defined(__AVX2__)
#include <immintrin.h>

namespace {

#if defined(__AVX512VNNI__)
constexpr const char* NAME = "vpdpbusd";
constexpr int SUMS = 12;
typedef __m512i Register;
inline void add(Register& sum, Register bytes) { asm volatile("vpdpbusd %1, %1, %0" : "+v"(sum) : "v"(bytes)); }
#else
constexpr const char* NAME = "vpmaddubsw with vpaddw";
constexpr int SUMS = 7;
typedef __m256i Register;
inline void add(Register& sum, Register bytes) {
    Register products;
    asm volatile("vpmaddubsw %2, %2, %0\n\tvpaddw %0, %1, %1" : "=&x"(products), "+x"(sum) : "x"(bytes));
}
#endif

double seconds() {
    timespec at;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &at);
    return double(at.tv_sec) + 1e-9 * double(at.tv_nsec);
}

}  // namespace

extern "C" const char* instruction() { return NAME; }

extern "C" double peak() {
    constexpr int TIMES = 5000;
    Register sums[SUMS] = {}, bytes = {};
    const double began = seconds();
    for (int i = 0; i < TIMES; i++)
#pragma GCC unroll 12
        for (int s = 0; s < SUMS; s++) add(sums[s], bytes);
    return double(TIMES) * SUMS * sizeof(Register) / (seconds() - began);
}
#else
extern "C" const char* instruction() { return ""; }
extern "C" double peak() { return 0; }
#endif

// 0 where compiler, processor or system have no tiles.
#ifdef ON_TILES
extern "C" double peak_of_tiles() {
    using namespace tandem;
    constexpr int TIMES = 5000, SUMS = 6;
    alignas(64) unsigned char shapes[64] = {1};
    for (int tile = 0; tile < 8; tile++) shapes[16 + 2 * tile] = 64, shapes[48 + tile] = 16;
    if (!have_tiles() || !tiles_permitted()) return 0;
    set_shapes(shapes);  // which leaves zeros in them
    const double began = seconds();
    for (int i = 0; i < TIMES; i++) {
        multiply_tile<0, 6, 7>();
        multiply_tile<1, 6, 7>();
        multiply_tile<2, 6, 7>();
        multiply_tile<3, 6, 7>();
        multiply_tile<4, 6, 7>();
        multiply_tile<5, 6, 7>();
    }
    const double taken = seconds() - began;
    release_tiles();
    return double(TIMES) * SUMS * 16 * 16 * 64 / taken;
}
#else
extern "C" double peak_of_tiles() { return 0; }
#endif
