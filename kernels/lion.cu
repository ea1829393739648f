// One Lion step for every tensor of a launch.
//
//     g <- -g if maximize
//     p <- decay p - lr sign(beta1 m + (1 - beta1) g)               sign(0) = 0
//     m <- beta2 m + (1 - beta2) g
//
// Chen et al. 2023, Algorithm 2 (arXiv:2302.06675). Every operation is rounded once, in the order
// written in `element`, without contraction: the bits are those of crates/lion/src/cpu.rs.
#include "elementwise.cuh"

namespace lion {

using multi_tensor::u32;

// Options of the kernel; crates/lion/src/device.rs.
enum Flag : u32 { FLAG_MAXIMIZE = 1 };

// Shared by all tensors; crates/lion/src/device.rs: Scalars.
template <class T>
struct Scalars {
    T beta1;
    T one_minus_beta1;
    T beta2;
    T one_minus_beta2;
};

// Of the tensors of one class at one step; crates/lion/src/device.rs: Set.
template <class T>
struct Set {
    T lr;
    T decay;
};

static_assert(sizeof(Scalars<float>) == 16 && sizeof(Scalars<double>) == 32, "crates/lion: Scalars");
static_assert(sizeof(Set<float>) == 8 && sizeof(Set<double>) == 16, "crates/lion: Set");

// 1, -1, or the value itself if it is zero or NaN.
template <class T>
__device__ __forceinline__ T sign(T x) {
    const T negative = x < T(0) ? T(-1) : x;
    return x > T(0) ? T(1) : negative;
}

template <class T>
struct Update {
    typedef lion::Scalars<T> Scalars;
    typedef lion::Set<T> Set;

    Scalars scalars;
    Set set;
    u32 flags;

    __device__ __forceinline__ void element(T& p, T g, T* state) const {
        const T m = state[0];
        g = flags & FLAG_MAXIMIZE ? -g : g;
        const T c = scalars.beta1 * m + scalars.one_minus_beta1 * g;
        state[0] = scalars.beta2 * m + scalars.one_minus_beta2 * g;
        p = p * set.decay - set.lr * sign(c);
    }
};

// The sets of a step; crates/lion/src/config.rs: set. Hyper-parameters: lr, lambda.
template <class T>
struct Sets {
    typedef lion::Scalars<T> Scalars;
    typedef lion::Set<T> Set;

    __device__ __forceinline__ static Set derive(const resident::Hyper& hyper, const resident::Class& own) {
        const double lr = hyper.value[0] * own.lr_scale;
        return {T(lr), T(1.0 - lr * resident::decay_of(own, hyper.value[1]))};
    }
};

template <class Format, class Source>
__device__ __forceinline__ void run(Source arguments) {
    elementwise::run<Format, 1, Update<typename Format::Compute>>(arguments);
}

}  // namespace lion

// A format of storage.cuh, and the same for either size of the argument block.
extern "C" __global__ void __launch_bounds__(512) lion_f32_4k(const __grid_constant__ multi_tensor::Arguments<multi_tensor::CLASSIC_BYTES> arguments) { lion::run<storage::Plain<float, float, float>>(arguments.bytes); }
extern "C" __global__ void __launch_bounds__(512) lion_f32_32k(const __grid_constant__ multi_tensor::Arguments<multi_tensor::LARGE_BYTES> arguments) { lion::run<storage::Plain<float, float, float>>(arguments.bytes); }
extern "C" __global__ void __launch_bounds__(512) lion_f64_4k(const __grid_constant__ multi_tensor::Arguments<multi_tensor::CLASSIC_BYTES> arguments) { lion::run<storage::Plain<double, double, double>>(arguments.bytes); }
extern "C" __global__ void __launch_bounds__(512) lion_f64_32k(const __grid_constant__ multi_tensor::Arguments<multi_tensor::LARGE_BYTES> arguments) { lion::run<storage::Plain<double, double, double>>(arguments.bytes); }
extern "C" __global__ void __launch_bounds__(512) lion_f32_s16_4k(const __grid_constant__ multi_tensor::Arguments<multi_tensor::CLASSIC_BYTES> arguments) { lion::run<storage::Plain<float, storage::BF16, float>>(arguments.bytes); }
extern "C" __global__ void __launch_bounds__(512) lion_f32_s16_32k(const __grid_constant__ multi_tensor::Arguments<multi_tensor::LARGE_BYTES> arguments) { lion::run<storage::Plain<float, storage::BF16, float>>(arguments.bytes); }
extern "C" __global__ void __launch_bounds__(512) lion_f16_4k(const __grid_constant__ multi_tensor::Arguments<multi_tensor::CLASSIC_BYTES> arguments) { lion::run<storage::Plain<storage::F16, float, float>>(arguments.bytes); }
extern "C" __global__ void __launch_bounds__(512) lion_f16_32k(const __grid_constant__ multi_tensor::Arguments<multi_tensor::LARGE_BYTES> arguments) { lion::run<storage::Plain<storage::F16, float, float>>(arguments.bytes); }
extern "C" __global__ void __launch_bounds__(512) lion_f16_m32_4k(const __grid_constant__ multi_tensor::Arguments<multi_tensor::CLASSIC_BYTES> arguments) { lion::run<storage::WithMaster<storage::F16, float>>(arguments.bytes); }
extern "C" __global__ void __launch_bounds__(512) lion_f16_m32_32k(const __grid_constant__ multi_tensor::Arguments<multi_tensor::LARGE_BYTES> arguments) { lion::run<storage::WithMaster<storage::F16, float>>(arguments.bytes); }
extern "C" __global__ void __launch_bounds__(512) lion_bf16_4k(const __grid_constant__ multi_tensor::Arguments<multi_tensor::CLASSIC_BYTES> arguments) { lion::run<storage::Plain<storage::BF16, float, float>>(arguments.bytes); }
extern "C" __global__ void __launch_bounds__(512) lion_bf16_32k(const __grid_constant__ multi_tensor::Arguments<multi_tensor::LARGE_BYTES> arguments) { lion::run<storage::Plain<storage::BF16, float, float>>(arguments.bytes); }
extern "C" __global__ void __launch_bounds__(512) lion_bf16_m32_4k(const __grid_constant__ multi_tensor::Arguments<multi_tensor::CLASSIC_BYTES> arguments) { lion::run<storage::WithMaster<storage::BF16, float>>(arguments.bytes); }
extern "C" __global__ void __launch_bounds__(512) lion_bf16_m32_32k(const __grid_constant__ multi_tensor::Arguments<multi_tensor::LARGE_BYTES> arguments) { lion::run<storage::WithMaster<storage::BF16, float>>(arguments.bytes); }
extern "C" __global__ void __launch_bounds__(512) lion_bf16_r16_4k(const __grid_constant__ multi_tensor::Arguments<multi_tensor::CLASSIC_BYTES> arguments) { lion::run<storage::WithRemainder<float>>(arguments.bytes); }
extern "C" __global__ void __launch_bounds__(512) lion_bf16_r16_32k(const __grid_constant__ multi_tensor::Arguments<multi_tensor::LARGE_BYTES> arguments) { lion::run<storage::WithRemainder<float>>(arguments.bytes); }
extern "C" __global__ void __launch_bounds__(512) lion_bf16_s16_4k(const __grid_constant__ multi_tensor::Arguments<multi_tensor::CLASSIC_BYTES> arguments) { lion::run<storage::Plain<storage::BF16, storage::BF16, float>>(arguments.bytes); }
extern "C" __global__ void __launch_bounds__(512) lion_bf16_s16_32k(const __grid_constant__ multi_tensor::Arguments<multi_tensor::LARGE_BYTES> arguments) { lion::run<storage::Plain<storage::BF16, storage::BF16, float>>(arguments.bytes); }
extern "C" __global__ void __launch_bounds__(512) lion_bf16_m32_s16_4k(const __grid_constant__ multi_tensor::Arguments<multi_tensor::CLASSIC_BYTES> arguments) { lion::run<storage::WithMaster<storage::BF16, storage::BF16>>(arguments.bytes); }
extern "C" __global__ void __launch_bounds__(512) lion_bf16_m32_s16_32k(const __grid_constant__ multi_tensor::Arguments<multi_tensor::LARGE_BYTES> arguments) { lion::run<storage::WithMaster<storage::BF16, storage::BF16>>(arguments.bytes); }
extern "C" __global__ void __launch_bounds__(512) lion_bf16_r16_s16_4k(const __grid_constant__ multi_tensor::Arguments<multi_tensor::CLASSIC_BYTES> arguments) { lion::run<storage::WithRemainder<storage::BF16>>(arguments.bytes); }
extern "C" __global__ void __launch_bounds__(512) lion_bf16_r16_s16_32k(const __grid_constant__ multi_tensor::Arguments<multi_tensor::LARGE_BYTES> arguments) { lion::run<storage::WithRemainder<storage::BF16>>(arguments.bytes); }

// As above, from a resident table.
extern "C" __global__ void __launch_bounds__(512) lion_f32_resident(const __grid_constant__ multi_tensor::Resident resident) { lion::run<storage::Plain<float, float, float>>(multi_tensor::in_memory(resident)); }
extern "C" __global__ void __launch_bounds__(512) lion_f64_resident(const __grid_constant__ multi_tensor::Resident resident) { lion::run<storage::Plain<double, double, double>>(multi_tensor::in_memory(resident)); }
extern "C" __global__ void __launch_bounds__(512) lion_f32_s16_resident(const __grid_constant__ multi_tensor::Resident resident) { lion::run<storage::Plain<float, storage::BF16, float>>(multi_tensor::in_memory(resident)); }
extern "C" __global__ void __launch_bounds__(512) lion_f16_resident(const __grid_constant__ multi_tensor::Resident resident) { lion::run<storage::Plain<storage::F16, float, float>>(multi_tensor::in_memory(resident)); }
extern "C" __global__ void __launch_bounds__(512) lion_f16_m32_resident(const __grid_constant__ multi_tensor::Resident resident) { lion::run<storage::WithMaster<storage::F16, float>>(multi_tensor::in_memory(resident)); }
extern "C" __global__ void __launch_bounds__(512) lion_bf16_resident(const __grid_constant__ multi_tensor::Resident resident) { lion::run<storage::Plain<storage::BF16, float, float>>(multi_tensor::in_memory(resident)); }
extern "C" __global__ void __launch_bounds__(512) lion_bf16_m32_resident(const __grid_constant__ multi_tensor::Resident resident) { lion::run<storage::WithMaster<storage::BF16, float>>(multi_tensor::in_memory(resident)); }
extern "C" __global__ void __launch_bounds__(512) lion_bf16_r16_resident(const __grid_constant__ multi_tensor::Resident resident) { lion::run<storage::WithRemainder<float>>(multi_tensor::in_memory(resident)); }
extern "C" __global__ void __launch_bounds__(512) lion_bf16_s16_resident(const __grid_constant__ multi_tensor::Resident resident) { lion::run<storage::Plain<storage::BF16, storage::BF16, float>>(multi_tensor::in_memory(resident)); }
extern "C" __global__ void __launch_bounds__(512) lion_bf16_m32_s16_resident(const __grid_constant__ multi_tensor::Resident resident) { lion::run<storage::WithMaster<storage::BF16, storage::BF16>>(multi_tensor::in_memory(resident)); }
extern "C" __global__ void __launch_bounds__(512) lion_bf16_r16_s16_resident(const __grid_constant__ multi_tensor::Resident resident) { lion::run<storage::WithRemainder<storage::BF16>>(multi_tensor::in_memory(resident)); }

// As above, with sums over what is changed.
extern "C" __global__ void __launch_bounds__(512, 1) lion_f32_measured(const __grid_constant__ multi_tensor::Resident resident) { lion::run<storage::Plain<float, float, float>>(multi_tensor::measured(resident)); }
extern "C" __global__ void __launch_bounds__(512, 1) lion_f64_measured(const __grid_constant__ multi_tensor::Resident resident) { lion::run<storage::Plain<double, double, double>>(multi_tensor::measured(resident)); }
extern "C" __global__ void __launch_bounds__(512, 1) lion_f32_s16_measured(const __grid_constant__ multi_tensor::Resident resident) { lion::run<storage::Plain<float, storage::BF16, float>>(multi_tensor::measured(resident)); }
extern "C" __global__ void __launch_bounds__(512, 1) lion_f16_measured(const __grid_constant__ multi_tensor::Resident resident) { lion::run<storage::Plain<storage::F16, float, float>>(multi_tensor::measured(resident)); }
extern "C" __global__ void __launch_bounds__(512, 1) lion_f16_m32_measured(const __grid_constant__ multi_tensor::Resident resident) { lion::run<storage::WithMaster<storage::F16, float>>(multi_tensor::measured(resident)); }
extern "C" __global__ void __launch_bounds__(512, 1) lion_bf16_measured(const __grid_constant__ multi_tensor::Resident resident) { lion::run<storage::Plain<storage::BF16, float, float>>(multi_tensor::measured(resident)); }
extern "C" __global__ void __launch_bounds__(512, 1) lion_bf16_m32_measured(const __grid_constant__ multi_tensor::Resident resident) { lion::run<storage::WithMaster<storage::BF16, float>>(multi_tensor::measured(resident)); }
extern "C" __global__ void __launch_bounds__(512, 1) lion_bf16_r16_measured(const __grid_constant__ multi_tensor::Resident resident) { lion::run<storage::WithRemainder<float>>(multi_tensor::measured(resident)); }
extern "C" __global__ void __launch_bounds__(512, 1) lion_bf16_s16_measured(const __grid_constant__ multi_tensor::Resident resident) { lion::run<storage::Plain<storage::BF16, storage::BF16, float>>(multi_tensor::measured(resident)); }
extern "C" __global__ void __launch_bounds__(512, 1) lion_bf16_m32_s16_measured(const __grid_constant__ multi_tensor::Resident resident) { lion::run<storage::WithMaster<storage::BF16, storage::BF16>>(multi_tensor::measured(resident)); }
extern "C" __global__ void __launch_bounds__(512, 1) lion_bf16_r16_s16_measured(const __grid_constant__ multi_tensor::Resident resident) { lion::run<storage::WithRemainder<storage::BF16>>(multi_tensor::measured(resident)); }

// The sets of a resident table.
extern "C" __global__ void __launch_bounds__(512) lion_sets_f32_resident(const __grid_constant__ multi_tensor::Resident resident) { resident::derive_sets<lion::Sets<float>>(resident); }
extern "C" __global__ void __launch_bounds__(512) lion_sets_f64_resident(const __grid_constant__ multi_tensor::Resident resident) { resident::derive_sets<lion::Sets<double>>(resident); }
