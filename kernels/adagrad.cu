// One Adagrad step for every tensor of a launch.
//
//     g <- -g if maximize;  g <- g + l2 p
//     s <- (s + initial) + g^2                                      initial is 0 but at the first step
//     p <- p - step_size (g / (sqrt(s) + eps))
//
// Duchi, Hazan & Singer 2011, with eps, the decay of lr in `step_size` and the initial value as in PyTorch. Every operation is
// rounded once, in the order written in `element`, without contraction: the bits are those of crates/adagrad/src/cpu.rs.
#include "elementwise.cuh"

namespace adagrad {

using multi_tensor::u32;

// Options of the kernel; crates/adagrad/src/device.rs.
enum Flag : u32 { FLAG_MAXIMIZE = 1 };

// Shared by all tensors; crates/adagrad/src/device.rs: Scalars.
template <class T>
struct Scalars {
    T eps;
};

// Of the tensors of one class at one step; crates/adagrad/src/device.rs: Set, padded to a multiple of 8 bytes.
template <class T>
struct alignas(8) Set {
    T step_size;
    T l2;
    T initial;
};

static_assert(sizeof(Scalars<float>) == 4 && sizeof(Scalars<double>) == 8, "crates/adagrad: Scalars");
static_assert(sizeof(Set<float>) == 16 && sizeof(Set<double>) == 24, "crates/adagrad: Set");

template <class T>
struct Update {
    typedef adagrad::Scalars<T> Scalars;
    typedef adagrad::Set<T> Set;

    Scalars scalars;
    Set set;
    u32 flags;

    __device__ __forceinline__ void element(T& p, T g, T* state) const {
        g = flags & FLAG_MAXIMIZE ? -g : g;
        if (set.l2 != T(0)) {
            g = g + set.l2 * p;
        }
        const T s = (state[0] + set.initial) + g * g;
        const T d = dialect::square_root(s) + scalars.eps;
        state[0] = s;
        p = p - set.step_size * (g / d);
    }
};

template <class Storage, class Compute>
__device__ __forceinline__ void run(const unsigned char* arguments) {
    elementwise::update_chunk<Storage, Compute, 1, Update<Compute>>(arguments);
}

}  // namespace adagrad

extern "C" __global__ void __launch_bounds__(512) adagrad_f32_4k(const __grid_constant__ multi_tensor::Arguments<multi_tensor::CLASSIC_BYTES> arguments) {
    adagrad::run<float, float>(arguments.bytes);
}

extern "C" __global__ void __launch_bounds__(512) adagrad_f32_32k(const __grid_constant__ multi_tensor::Arguments<multi_tensor::LARGE_BYTES> arguments) {
    adagrad::run<float, float>(arguments.bytes);
}

extern "C" __global__ void __launch_bounds__(512) adagrad_f64_4k(const __grid_constant__ multi_tensor::Arguments<multi_tensor::CLASSIC_BYTES> arguments) {
    adagrad::run<double, double>(arguments.bytes);
}

extern "C" __global__ void __launch_bounds__(512) adagrad_f64_32k(const __grid_constant__ multi_tensor::Arguments<multi_tensor::LARGE_BYTES> arguments) {
    adagrad::run<double, double>(arguments.bytes);
}
