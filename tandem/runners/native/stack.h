// Matrices from Python, several of them packed as one.
#pragma once
#include "linear.h"

namespace tandem {

// Weights [outputs, inputs] in a format, and biases [outputs] in the model's dtype, or null.
struct Matrix {
    const void *weights, *bias;
    Format format;
};

template <class T> Buffer<T> copied(const void* from, size_t count) {
    Buffer<T> made(from ? count : 0);
    if (from) std::memcpy(made.data(), from, count * sizeof(T));
    return made;
}

inline size_t row_bytes(Format format, int inputs) {
    return with_blocks(format, [&](auto blocks) { return up(inputs, decltype(blocks)::INPUTS) / decltype(blocks)::INPUTS * decltype(blocks)::BYTES; });
}

// Stacked matrices, and an output's row in them.
template <class D> struct Stack {
    struct Part {
        Matrix matrix;
        int rows;
    };
    std::vector<Part> parts;
    int inputs;

    template <class Found> void find(int output, Found found) const {
        for (auto& part : parts) {
            if (output < part.rows) return found(part.matrix, output);
            output -= part.rows;
        }
    }
    Row row(int output) const {
        Row result;
        find(output, [&](const Matrix& matrix, int row) {
            const size_t bytes = matrix.format == DENSE ? inputs * sizeof(typename D::stored) : row_bytes(matrix.format, inputs);
            result = {static_cast<const char*>(matrix.weights) + row * bytes, matrix.format};
        });
        return result;
    }
    float bias(int output, float beyond = 0) const {
        float result = beyond;
        find(output, [&](const Matrix& matrix, int row) {
            result = matrix.bias ? D::wide1(static_cast<const typename D::stored*>(matrix.bias)[row]) : 0;
        });
        return result;
    }
    Linear<D> packed(Arena& arena, float beyond = 0) const {
        size_t rows = 0;
        for (auto& part : parts) rows += part.rows;
        return Linear<D>(arena, inputs, int(up(rows, PANEL)) / PANEL, [&](int o) { return row(o); }, [&](int o) { return bias(o, beyond); });
    }
};

}  // namespace tandem
