// Products of int8 activations and panels of blocks by AMX, whose instructions multiply tiles of up to 16 tokens. What they sum
// are integers, scaled and added as in quantised.h: the same bits.
#pragma once
#include "quantised.h"

namespace tandem {

// What becomes of AMX in a process: processor, system or compiler have none; it is used; the system refuses it; its sums are
// not those of other instructions; it is switched off.
enum TileState : int { NO_TILES, TILES_USED, TILES_REFUSED, TILES_WRONG, TILES_OFF };

// The first call asks the system for permission and compares products of every format. `use`: whether tiles are from now on.
TileState use_tiles(bool use);

// The same as multiply_blocks for up to Tiles::MOST tokens, where the thread has Tiles; may read the row behind the last token's.
void multiply_tiles(Format format, int tokens, const void* packed, int count, const Group8* x, size_t stride, Soon& then, int lines, float (*to)[PANEL]);

// While it lives, its thread has AMX tiles for products of `tokens` tokens with `blocks`, where they are used and pay: from the
// number on for which others need two passes. Not longer, since the thread may run other libraries that set up their own.
class Tiles {
public:
    static constexpr int MOST = 16;

    Tiles(int tokens, bool blocks);
    ~Tiles();
    Tiles(const Tiles&) = delete;
    int most() const { return on_ ? MOST : TILE; }
    template <class... Rest> void multiply(Rest&&... rest) const { (on_ ? multiply_tiles : plain)(rest...); }
    const int tokens;

private:
    static constexpr auto plain = static_cast<decltype(&multiply_tiles)>(multiply_blocks);
    const bool on_;
};

}  // namespace tandem
