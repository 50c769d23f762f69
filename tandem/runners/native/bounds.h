// Bounds of calls. api.cpp checks each call before it reads or writes, so no token id, count or position escapes.
#pragma once
#include "rounds.h"

namespace tandem {

// A call's fault, or 0, plus FAULTS times the row at fault (named in library.py).
enum Fault { SOUND, SLOT, POSITION, TOKEN, ADAPTER, COUNT, ROOM, CALL, FAULTS = 16 };

inline bool within(int64_t value, int64_t end) { return value >= 0 && value < end; }

// Rows that fit a step, with up to counts[r] draft tokens (null: none) after row r, all but the last fed. Count 0 omits
// a row; `most` bounds counts. Each row has a token.
inline int fault_of(const Model& model, const Rows& rows, const int32_t* counts = nullptr, int most = 0) {
    const Shape& shape = model.shape;
    int64_t tokens = 0;
    if (!within(rows.silent, rows.count + int64_t(1))) return CALL;
    for (int r = 0; r < rows.count; r++) {
        const int64_t count = counts ? counts[r] : 1, length = int64_t(rows.begins[r + 1]) - rows.begins[r];
        Fault fault = SOUND;
        if (counts && !within(count, int64_t(most) + 1)) fault = COUNT;
        else if (!count) continue;
        else if (length < 1 || (tokens += length) > shape.most_tokens) fault = ROOM;
        else if (!within(rows.slots[r], shape.slots)) fault = SLOT;
        else if (rows.starts[r] < 0 || rows.starts[r] + length + count - 1 > shape.length) fault = POSITION;
        else if (rows.adapters && rows.adapters[r] && !model.has_adapter(rows.adapters[r])) fault = ADAPTER;
        for (int i = rows.begins[r]; !fault && i < rows.begins[r + 1]; i++)
            if (!within(rows.tokens[i], shape.vocabulary)) fault = TOKEN;
        if (fault) return FAULTS * r + fault;
    }
    return SOUND;
}

// Sampling of rows (null: none). `outputs`: a token's logits, or 0 if they are of some tokens only.
inline int fault_of_draws(const Sampling* sampled, int rows, const float* logits, int outputs) {
    for (int r = 0; sampled && r < rows; r++)
        if (sampled[r].draws() && (!logits || !sampled[r].sound() || (outputs && sampled[r].tokens != outputs))) return FAULTS * r + CALL;
    return SOUND;
}

// Drafts of counts[r] <= `stride` tokens after each row, of ids only[...] (null: all).
inline int fault_of_drafts(const Model& draft, const Rows& tails, const int32_t* counts, int stride, const int32_t* only, const Drawing* drawing) {
    if (const int fault = fault_of(draft, tails, counts, stride)) return fault;
    return drawing ? fault_of_draws(drawing->sampled, tails.count, drawing->logits, only ? 0 : draft.shape.outputs) : SOUND;
}

// Blocks first .. first + count of a slot, and as many of `stored` pages.
inline int fault_of_pages(const Model& model, int slot, int first, int count, const int32_t* pages, int stored) {
    const Shape& shape = model.shape;
    if (!within(slot, shape.slots)) return SLOT;
    if (first < 0 || count < 0 || (int64_t(first) + count) * LANES > shape.length) return POSITION;
    for (int i = 0; i < count; i++)
        if (!within(pages[i], stored)) return ROOM;
    return SOUND;
}

}  // namespace tandem
