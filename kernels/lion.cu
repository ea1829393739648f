// One Lion step for every tensor of a launch.
//
//     g <- -g if maximize
//     p <- decay p - lr sign(beta1 m + (1 - beta1) g)               sign(0) = 0
//     m <- beta2 m + (1 - beta2) g
//
// Chen et al. 2023, Algorithm 2 (arXiv:2302.06675). Every operation is rounded once, in the order
// written in `element`, without contraction: the bits are those of crates/lion/src/rule.rs.
#include "elementwise.cuh"

namespace lion {

using multi_tensor::u32;

// Options of the kernel; crates/lion/src/rule.rs.
enum Flag : u32 { FLAG_MAXIMIZE = 1 };

// Shared by all tensors; `scalars` of crates/lion/src/rule.rs.
template <class T>
struct Scalars {
    T beta1;
    T one_minus_beta1;
    T beta2;
    T one_minus_beta2;
};

// Of the tensors of one group at one step; `step_scalars` of crates/lion/src/rule.rs.
template <class T>
struct StepScalars {
    T lr;
    T decay;
};

static_assert(sizeof(Scalars<float>) == 16 && sizeof(Scalars<double>) == 32, "crates/lion: Scalars");
static_assert(sizeof(StepScalars<float>) == 8 && sizeof(StepScalars<double>) == 16, "crates/lion: StepScalars");

// 1, -1, or the value itself if it is zero or NaN.
template <class T>
__device__ __forceinline__ T sign(T x) {
    const T negative = x < T(0) ? T(-1) : x;
    return x > T(0) ? T(1) : negative;
}

template <class T>
struct Update {
    typedef lion::Scalars<T> Scalars;
    typedef lion::StepScalars<T> StepScalars;
    enum : u32 { CODINGS = codes::Codings<codes::SIGNED>::VALUE };

    Scalars scalars;
    StepScalars step_scalars;
    u32 flags;

    __device__ __forceinline__ void element(T& p, T g, T* state) const {
        const T m = state[0];
        g = flags & FLAG_MAXIMIZE ? -g : g;
        const T c = scalars.beta1 * m + scalars.one_minus_beta1 * g;
        state[0] = scalars.beta2 * m + scalars.one_minus_beta2 * g;
        p = p * step_scalars.decay - step_scalars.lr * sign(c);
    }
};

// Derives `step_scalars` of crates/lion/src/rule.rs. Hyper-parameters: lr, lambda.
template <class T>
struct Deriver {
    typedef lion::Scalars<T> Scalars;
    typedef lion::StepScalars<T> StepScalars;

    __device__ __forceinline__ static StepScalars derive(const resident::Hyper& hyper, const resident::Group& own) {
        const double lr = hyper.value[0] * own.lr_scale;
        return {T(lr), T(1.0 - lr * resident::decay_of(own, hyper.value[1]))};
    }
};

template <class Format>
__device__ __forceinline__ void run(const unsigned char* arguments) {
    elementwise::run<Format, 1, Update<typename Format::Compute>>(arguments);
}

}  // namespace lion

EACH_FORMAT(UPDATE_ENTRIES, lion)
EACH_CODED_FORMAT(CODED_ENTRIES, lion)
STEP_SCALARS_ENTRIES(lion)
