// AMX's instructions and who may use them; included by products.cpp alone. They are written in assembler: GCC's own functions don't
// say that a tile is loaded from memory.
#pragma once
#include <cpuid.h>
#include <cstddef>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef __clang__
#define ON_TILES __attribute__((target("amx-tile,amx-int8,amx-bf16"))) inline  // what it may assemble
#else
#define ON_TILES inline
#endif

namespace tandem {
namespace {

bool have_tiles() {
    unsigned a, b, c, d;  // AMX-BF16, AMX-TILE and AMX-INT8; eight tiles of 16 rows of 64 bytes
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 22 & 13) != 13) return false;
    return __get_cpuid_count(0x1d, 1, &a, &b, &c, &d) && a >> 16 == 1024 && b == (8u << 16 | 64) && (c & 0xffff) == 16;
}
bool tiles_permitted() { return !syscall(SYS_arch_prctl, 0x1023, 18); }  // ARCH_REQ_XCOMP_PERM for XTILEDATA, to all threads

ON_TILES void set_shapes(const void* shapes) { asm volatile("ldtilecfg (%0)" : : "r"(shapes) : "memory"); }
ON_TILES void release_tiles() { asm volatile("tilerelease"); }
template <int T> ON_TILES void zero_tile() { asm volatile("tilezero %%tmm%c0" : : "i"(T)); }
template <int T> ON_TILES void load_tile(const void* from, size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T> ON_TILES void store_tile(void* to, size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(T) : "memory");
}
// Adds products of signed values and unsigned numbers.
template <int SUM, int SIGNED, int UNSIGNED> ON_TILES void multiply_tile() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(SIGNED), "i"(UNSIGNED));
}
// Adds products of pairs of bfloat16 numbers.
template <int SUM, int X, int W> ON_TILES void multiply_pairs_tile() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(X), "i"(W));
}

}  // namespace
}  // namespace tandem
