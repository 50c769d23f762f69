// Models with float32 activations, compiled apart.
#include "transformer.h"

namespace tandem {

Model* float32_model(Pool& pool, const Shape& shape, const void* embedding) {
    return new Transformer<Float32>(pool, shape, embedding);
}

}  // namespace tandem
