// One SGD step, with or without a velocity, for every tensor of a launch.
//
//     g <- -g if maximize;  g <- rescale g;  g <- g + l2 p
//     u <- momentum u + (1 - dampening) g      only with a velocity; no dampening at the first step
//     p <- decay p - lr u                       g in place of u without, g + momentum u with
//                                               Nesterov
//
// Sutskever, Martens, Dahl & Hinton 2013, with lr outside of the velocity as PyTorch does. Every
// operation is rounded once, in the order written in `element`, without contraction: the bits are
// those of crates/fused-sgd/src/rule.rs.
#include "elementwise.cuh"

namespace fused_sgd {

using multi_tensor::u32;

// Options of the kernel; crates/fused-sgd/src/rule.rs.
enum Flag : u32 { FLAG_VELOCITY = 1, FLAG_NESTEROV = 2, FLAG_MAXIMIZE = 4 };

// Shared by all tensors; `scalars` of crates/fused-sgd/src/rule.rs.
template <class T>
struct Scalars {
    T rescale;
    T momentum;
};

// Of the tensors of one group at one step; `step_scalars` of crates/fused-sgd/src/rule.rs.
template <class T>
struct StepScalars {
    T lr;
    T decay;
    T l2;
    T one_minus_dampening;
};

static_assert(sizeof(Scalars<float>) == 8 && sizeof(Scalars<double>) == 16, "crates/fused-sgd: Scalars");
static_assert(sizeof(StepScalars<float>) == 16 && sizeof(StepScalars<double>) == 32, "crates/fused-sgd: StepScalars");

template <class T, int STATES>
struct Update {
    typedef fused_sgd::Scalars<T> Scalars;
    typedef fused_sgd::StepScalars<T> StepScalars;
    enum : u32 { CODINGS = codes::Codings<codes::SIGNED>::VALUE };

    Scalars scalars;
    StepScalars step_scalars;
    u32 flags;

    __device__ __forceinline__ void element(T& p, T g, T* state) const {
        g = flags & FLAG_MAXIMIZE ? -g : g;
        g = scalars.rescale * g;
        if (step_scalars.l2 != T(0)) {
            g = g + step_scalars.l2 * p;
        }
        T step = g;
        if constexpr (STATES > 0) {
            const T u = scalars.momentum * state[0] + step_scalars.one_minus_dampening * g;
            step = flags & FLAG_NESTEROV ? g + scalars.momentum * u : u;
            state[0] = u;
        }
        p = p * step_scalars.decay - step_scalars.lr * step;
    }
};

// Derives `step_scalars` of crates/fused-sgd/src/rule.rs. Hyper-parameters: lr, dampening,
// lambda, 1 if decay is decoupled.
template <class T>
struct Deriver {
    typedef fused_sgd::Scalars<T> Scalars;
    typedef fused_sgd::StepScalars<T> StepScalars;

    __device__ __forceinline__ static StepScalars derive(const resident::Hyper& hyper, const resident::Group& own) {
        const double lr = hyper.value[0] * own.lr_scale;
        const double lambda = resident::decay_of(own, hyper.value[2]);
        const bool decoupled = hyper.value[3] != 0.0;
        const double one_minus_dampening = own.step == 1 ? 1.0 : 1.0 - hyper.value[1];
        return {T(lr), T(decoupled ? 1.0 - lr * lambda : 1.0), T(decoupled ? 0.0 : lambda), T(one_minus_dampening)};
    }
};

template <class Format>
__device__ __forceinline__ void run(const unsigned char* arguments) {
    typedef typename Format::Compute Compute;
    // Without a velocity there is nothing to be kept in codes.
    if constexpr (storage::IsCoded<Format>::VALUE) {
        elementwise::run<Format, 1, Update<Compute, 1>>(arguments);
    } else if (multi_tensor::header_of(arguments).flags & FLAG_VELOCITY) {
        elementwise::run<Format, 1, Update<Compute, 1>>(arguments);
    } else {
        elementwise::run<Format, 0, Update<Compute, 0>>(arguments);
    }
}

}  // namespace fused_sgd

EACH_FORMAT(UPDATE_ENTRIES, fused_sgd)
EACH_CODED_FORMAT(CODED_ENTRIES, fused_sgd)
STEP_SCALARS_ENTRIES(fused_sgd)
