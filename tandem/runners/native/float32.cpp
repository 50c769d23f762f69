// Models whose activations are float32. Each number format is compiled apart, beside the others.
#include "rounds.h"

namespace tandem {

Model* float32_model(Pool& pool, const Shape& shape, const void* embedding) {
    return new Typed<Float32>(pool, shape, embedding);
}

}  // namespace tandem
