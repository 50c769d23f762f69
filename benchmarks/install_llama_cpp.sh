#!/bin/sh
# llama.cpp's server, a peer for benchmarks alone, built for this machine's CPU from the source package of
# llama-cpp-python, which carries llama.cpp's source. Nothing is installed.
#   sh benchmarks/install_llama_cpp.sh [FOLDER] [PYTHON]
# Needs cmake and a C++ compiler, and takes 10 minutes on 2 cores (JOBS=2 compilers at a time, at low priority).
set -eu
folder=${1:-.llama-cpp}
python=${2:-python3}
version=0.3.36
sha256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
name=llama_cpp_python-$version

for program in cmake c++; do
    command -v "$program" >/dev/null || {
        echo "$program is missing: llama.cpp is built with cmake and a C++ compiler" >&2
        exit 1
    }
done
mkdir -p "$folder"
if [ ! -f "$folder/$name.tar.gz" ]; then
    echo "llama-cpp-python==$version --hash=sha256:$sha256" > "$folder/needs.txt"
    "$python" -m pip download --no-deps --no-binary llama-cpp-python --require-hashes \
        --dest "$folder" -r "$folder/needs.txt"
fi
echo "$sha256  $folder/$name.tar.gz" | sha256sum --check --quiet
tar -xzf "$folder/$name.tar.gz" -C "$folder"
# GCC's AMX functions do not say that they read memory (seen in 12.2), so tiles would be loaded before they are written:
# llama.cpp would crash in `ldtilecfg` on a processor with AMX.
cat > "$folder/tiles.h" <<'TILES'
#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#undef _tile_loadd
#define _tile_loadd(tile, base, stride) tandem_load_tile(tile, base, stride)
#define tandem_load_tile(tile, base, stride) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"((const void *)(base)), "r"((long)(stride)) : "memory")
#define _tile_loadconfig(config) asm volatile("ldtilecfg (%0)" ::"r"(config) : "memory")
#endif
TILES
amx="$folder/$name/vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp"
sed -i "s|^#include <type_traits>|&\n#include \"$(cd "$folder" && pwd)/tiles.h\"|" "$amx"
nice cmake -S "$folder/$name/vendor/llama.cpp" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
    -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
    -DLLAMA_BUILD_COMMIT="$name"
nice cmake --build "$folder/build" --parallel "${JOBS:-2}" --target llama-server llama-quantize llama-perplexity
"$folder/build/bin/llama-server" --version
echo "llama.cpp's server: $folder/build/bin/llama-server"
