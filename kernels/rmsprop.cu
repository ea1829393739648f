// One RMSprop step for every tensor of a launch.
//
//     g <- -g if maximize;  g <- g + l2 p
//     v <- alpha v + (1 - alpha) g^2
//     a <- alpha a + (1 - alpha) g,  s = max(v - a^2, 0)            if centered, else s = v
//     b <- momentum b + g / (sqrt(s) + eps)
//     p <- p - lr b
//
// Tieleman & Hinton 2012, lecture 6.5; centered as Graves 2013 (arXiv:1308.0850). Every operation
// is rounded once, in the order written in `element`, without contraction: the bits are those of
// crates/rmsprop/src/rule.rs.
#include "elementwise.cuh"

namespace rmsprop {

using multi_tensor::u32;

// Options of the kernel; crates/rmsprop/src/rule.rs.
enum Flag : u32 { FLAG_MAXIMIZE = 1, FLAG_CENTERED = 2, FLAG_VELOCITY = 4 };

// Shared by all tensors; `scalars` of crates/rmsprop/src/rule.rs.
template <class T>
struct Scalars {
    T alpha;
    T one_minus_alpha;
    T eps;
    T momentum;
};

// Of the tensors of one group at one step; `step_scalars` of crates/rmsprop/src/rule.rs.
template <class T>
struct StepScalars {
    T lr;
    T l2;
};

static_assert(sizeof(Scalars<float>) == 16 && sizeof(Scalars<double>) == 32, "crates/rmsprop: Scalars");
static_assert(sizeof(StepScalars<float>) == 8 && sizeof(StepScalars<double>) == 16, "crates/rmsprop: StepScalars");

// State: the mean square, the mean if centered, and the velocity if one is left. Of two lists the
// second is what the flags say.
template <class T, int STATES>
struct Update {
    typedef rmsprop::Scalars<T> Scalars;
    typedef rmsprop::StepScalars<T> StepScalars;
    enum : u32 { CODINGS = codes::Codings<codes::ROOT, codes::SIGNED>::VALUE };

    Scalars scalars;
    StepScalars step_scalars;
    u32 flags;

    __device__ __forceinline__ void element(T& p, T g, T* state) const {
        g = flags & FLAG_MAXIMIZE ? -g : g;
        if (step_scalars.l2 != T(0)) {
            g = g + step_scalars.l2 * p;
        }
        const T v = scalars.alpha * state[0] + scalars.one_minus_alpha * (g * g);
        state[0] = v;
        T s = v;
        if (STATES > 2 || (STATES > 1 && (flags & FLAG_CENTERED))) {
            const T a = scalars.alpha * state[STATES > 1] + scalars.one_minus_alpha * g;
            state[STATES > 1] = a;
            s = v - a * a;
            s = s < T(0) ? T(0) : s;
        }
        T step = g / (dialect::square_root(s) + scalars.eps);
        if (STATES > 2 || (STATES > 1 && (flags & FLAG_VELOCITY))) {
            step = scalars.momentum * state[STATES - 1] + step;
            state[STATES - 1] = step;
        }
        p = p - step_scalars.lr * step;
    }
};

// Derives `step_scalars` of crates/rmsprop/src/rule.rs. Hyper-parameters: lr, lambda.
template <class T>
struct Deriver {
    typedef rmsprop::Scalars<T> Scalars;
    typedef rmsprop::StepScalars<T> StepScalars;

    __device__ __forceinline__ static StepScalars derive(const resident::Hyper& hyper, const resident::Group& own) {
        return {T(hyper.value[0] * own.lr_scale), T(resident::decay_of(own, hyper.value[1]))};
    }
};

template <class Format>
__device__ __forceinline__ void run(const unsigned char* arguments) {
    typedef typename Format::Compute Compute;
    const u32 flags = multi_tensor::header_of(arguments).flags & (FLAG_CENTERED | FLAG_VELOCITY);
    // The mean of a centered rule is not kept in codes.
    constexpr bool MAY_CENTER = !storage::IsCoded<Format>::VALUE;
    if (flags == 0) {
        elementwise::run<Format, 1, Update<Compute, 1>>(arguments);
    } else if (MAY_CENTER && flags == (FLAG_CENTERED | FLAG_VELOCITY)) {
        elementwise::run<Format, MAY_CENTER ? 3 : 2, Update<Compute, MAY_CENTER ? 3 : 2>>(arguments);
    } else {
        elementwise::run<Format, 2, Update<Compute, 2>>(arguments);
    }
}

}  // namespace rmsprop

EACH_FORMAT(UPDATE_ENTRIES, rmsprop)
EACH_CODED_FORMAT(CODED_ENTRIES, rmsprop)
STEP_SCALARS_ENTRIES(rmsprop)
