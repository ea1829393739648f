// Kernels whose threads never wait.
#include "dialect.cuh"

// out[i] = 2 in[i]; `option` is added to the addresses, `count` may be wrong: the emulator has to
// notice.
template <int BYTES>
__device__ void twice(const Arguments<BYTES>& arguments) {
    const Task& t = task(arguments);
    const float* in = reinterpret_cast<const float*>(t.in + t.option);
    float* out = reinterpret_cast<float*>(t.out + t.option);
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < t.count; i += stride)
        dialect::store(out + i, 2.0f * dialect::load(in + i));
}

ENTRY(twice_small, (512), Arguments<64>, twice(arguments))
ENTRY(twice_large, (512), Arguments<32760>, twice(arguments))

ENTRY(packs, (1024), Arguments<64>, {
    const Task& t = task(arguments);
    auto pack = dialect::load_pack(reinterpret_cast<const float*>(t.in + t.option) + 4 * threadIdx.x);
    for (float& lane : pack.lane) lane = dialect::square_root(lane);
    dialect::store_pack(reinterpret_cast<float*>(t.out) + 4 * threadIdx.x, pack);
})

// Reads past the end without the dialect: only a sanitizer can see it.
ENTRY(beside_the_dialect, (32), Arguments<64>, {
    const Task& t = task(arguments);
    if (threadIdx.x == 0) *reinterpret_cast<volatile float*>(t.out) = *reinterpret_cast<const volatile float*>(t.in + t.option);
})
