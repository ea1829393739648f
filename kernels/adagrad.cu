// One Adagrad step for every tensor of a launch.
//
//     g <- -g if maximize;  g <- g + l2 p
//     s <- (s + initial) + g^2                          initial is 0 but at the first step
//     p <- p - step_size (g / (sqrt(s) + eps))
//
// Duchi, Hazan & Singer 2011, with eps, the decay of lr in `step_size` and the initial value as in
// PyTorch. Every operation is rounded once, in the order written in `element`, without contraction:
// the bits are those of crates/adagrad/src/rule.rs.
#include "elementwise.cuh"

namespace adagrad {

using multi_tensor::u32;

// Options of the kernel; crates/adagrad/src/rule.rs.
enum Flag : u32 { FLAG_MAXIMIZE = 1 };

// Shared by all tensors; `scalars` of crates/adagrad/src/rule.rs.
template <class T>
struct Scalars {
    T eps;
};

// Of the tensors of one group at one step; `step_scalars` of crates/adagrad/src/rule.rs, padded to
// a multiple of 8.
template <class T>
struct alignas(8) StepScalars {
    T step_size;
    T l2;
    T initial;
};

static_assert(sizeof(Scalars<float>) == 4 && sizeof(Scalars<double>) == 8, "crates/adagrad: Scalars");
static_assert(sizeof(StepScalars<float>) == 16 && sizeof(StepScalars<double>) == 24, "crates/adagrad: StepScalars");

template <class T>
struct Update {
    typedef adagrad::Scalars<T> Scalars;
    typedef adagrad::StepScalars<T> StepScalars;
    enum : u32 { CODINGS = codes::Codings<codes::ROOT>::VALUE };

    Scalars scalars;
    StepScalars step_scalars;
    u32 flags;

    __device__ __forceinline__ void element(T& p, T g, T* state) const {
        g = flags & FLAG_MAXIMIZE ? -g : g;
        if (step_scalars.l2 != T(0)) {
            g = g + step_scalars.l2 * p;
        }
        const T s = (state[0] + step_scalars.initial) + g * g;
        const T d = dialect::square_root(s) + scalars.eps;
        state[0] = s;
        p = p - step_scalars.step_size * (g / d);
    }
};

// Derives `step_scalars` of crates/adagrad/src/rule.rs. Hyper-parameters: lr, lr_decay, lambda,
// initial_sum.
template <class T>
struct Deriver {
    typedef adagrad::Scalars<T> Scalars;
    typedef adagrad::StepScalars<T> StepScalars;

    __device__ __forceinline__ static StepScalars derive(const resident::Hyper& hyper, const resident::Group& own) {
        const double lr = hyper.value[0] * own.lr_scale;
        const double steps_before = double(own.step - 1);
        const double step_size = lr / (1.0 + steps_before * hyper.value[1]);
        return {T(step_size), T(resident::decay_of(own, hyper.value[2])), T(own.step == 1 ? hyper.value[3] : 0.0)};
    }
};

template <class Format>
__device__ __forceinline__ void run(const unsigned char* arguments) {
    elementwise::run<Format, 1, Update<typename Format::Compute>>(arguments);
}

}  // namespace adagrad

EACH_FORMAT(UPDATE_ENTRIES, adagrad)
EACH_CODED_FORMAT(CODED_ENTRIES, adagrad)
STEP_SCALARS_ENTRIES(adagrad)
