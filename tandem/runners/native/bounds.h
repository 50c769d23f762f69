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
    const Shape& shape = model.shape();
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

// Verification in a fused call: each row's last token, and up to counts[r] draft tokens below `known`.
inline int fault_of_rounds(const Model& target, const Rows& tails, const int32_t* counts, const int32_t* given, const int32_t* adapters,
                           const int32_t* drafts, int known, int stride) {
    const Shape& shape = target.shape();
    if (known < 0 || known > shape.vocabulary) return CALL;
    int64_t tokens = 0;
    for (int r = 0; r < tails.count; r++) {
        if (!within(counts[r], int64_t(stride) + 1)) return FAULTS * r + COUNT;
        const int64_t length = int64_t(tails.begins[r + 1]) - tails.begins[r], last = tails.starts[r] + length - 1;
        Fault fault = SOUND;
        if (length < 1 || (tokens += 1 + counts[r]) > shape.most_tokens) fault = ROOM;
        else if (!within(tails.slots[r], shape.slots)) fault = SLOT;
        else if (last < 0 || last + 1 + counts[r] > shape.length) fault = POSITION;
        else if (adapters && adapters[r] && !target.has_adapter(adapters[r])) fault = ADAPTER;
        else if (!within(tails.tokens[tails.begins[r + 1] - 1], shape.vocabulary)) fault = TOKEN;
        for (int i = 0; !fault && given[r] && i < counts[r]; i++)
            if (drafts[size_t(r) * stride + i] < 0) fault = TOKEN;
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
inline int fault_of_drawing(const Model& draft, const Drawing* drawing, int rows, const int32_t* only) {
    return drawing ? fault_of_draws(drawing->sampled, rows, drawing->logits, only ? 0 : draft.shape().outputs) : SOUND;
}

// Blocks first .. first + count of a slot, and as many of `stored` pages.
inline int fault_of_pages(const Model& model, int slot, int first, int count, const int32_t* pages, int stored) {
    const Shape& shape = model.shape();
    if (!within(slot, shape.slots)) return SLOT;
    if (first < 0 || count < 0 || (int64_t(first) + count) * LANES > shape.length) return POSITION;
    for (int i = 0; i < count; i++)
        if (!within(pages[i], stored)) return ROOM;
    return SOUND;
}

}  // namespace tandem
