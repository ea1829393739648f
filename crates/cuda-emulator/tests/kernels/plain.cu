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

extern "C" __global__ void __launch_bounds__(512) twice_small(const __grid_constant__ Arguments<64> arguments) { twice(arguments); }
extern "C" __global__ void __launch_bounds__(512) twice_large(const __grid_constant__ Arguments<32760> arguments) { twice(arguments); }

extern "C" __global__ void __launch_bounds__(1024) packs(const __grid_constant__ Arguments<64> arguments) {
    const Task& t = task(arguments);
    auto pack = dialect::load_pack(reinterpret_cast<const float*>(t.in + t.option) + 4 * threadIdx.x);
    for (float& lane : pack.lane) lane = dialect::square_root(lane);
    dialect::store_pack(reinterpret_cast<float*>(t.out) + 4 * threadIdx.x, pack);
}

// Reads past the end without the dialect: only a sanitizer can see it.
extern "C" __global__ void __launch_bounds__(32) beside_the_dialect(const __grid_constant__ Arguments<64> arguments) {
    const Task& t = task(arguments);
    if (threadIdx.x == 0) *reinterpret_cast<volatile float*>(t.out) = *reinterpret_cast<const volatile float*>(t.in + t.option);
}
