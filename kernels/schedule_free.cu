// One step of Schedule-Free AdamW for every tensor of a launch. The parameter is y, where gradients
// are taken.
//
//     z <- y at the first step
//     v <- beta2 v + (1 - beta2) g^2
//     n = b (g / (sqrt(v) + eps)) + lambda y            b and eps corrected for the bias of v
//     y <- y + share (z - y) - own_step n
//     z <- z - lr n
//
// Defazio et al. 2024, arXiv:2405.15682. Every operation is rounded once, in the order written in
// `element`, without contraction: the bits are those of crates/schedule-free/src/rule.rs.
#include "elementwise.cuh"

namespace schedule_free {

// Shared by all tensors; `scalars` of crates/schedule-free/src/rule.rs.
template <class T>
struct Scalars {
    T beta2;
    T one_minus_beta2;
};

// Of the tensors of one group at one step; `step_scalars` of crates/schedule-free/src/rule.rs. The
// share of the first step is 1, that of no other.
template <class T>
struct StepScalars {
    T lr;
    T share;
    T own_step;
    T bias2_sqrt;
    T eps;
    T lambda;
};

static_assert(sizeof(Scalars<float>) == 8 && sizeof(Scalars<double>) == 16, "crates/schedule-free: Scalars");
static_assert(sizeof(StepScalars<float>) == 24 && sizeof(StepScalars<double>) == 48, "crates/schedule-free: StepScalars");

// State: the second moment and z.
template <class T>
struct Update {
    typedef schedule_free::Scalars<T> Scalars;
    typedef schedule_free::StepScalars<T> StepScalars;

    Scalars scalars;
    StepScalars step_scalars;
    multi_tensor::u32 flags;

    __device__ __forceinline__ void element(T& p, T g, T* state) const {
        const T z = step_scalars.share == T(1) ? p : state[1];
        const T v = scalars.beta2 * state[0] + scalars.one_minus_beta2 * (g * g);
        T n = step_scalars.bias2_sqrt * (g / (dialect::square_root(v) + step_scalars.eps));
        if (step_scalars.lambda != T(0)) {
            n = n + step_scalars.lambda * p;
        }
        state[0] = v;
        state[1] = z - step_scalars.lr * n;
        p = p + step_scalars.share * (z - p) - step_scalars.own_step * n;
    }
};

// Derives `step_scalars` of crates/schedule-free/src/rule.rs. Hyper-parameters: lr, beta1,
// beta2, eps, lambda, warmup_steps.
template <class T>
struct Deriver {
    typedef schedule_free::Scalars<T> Scalars;
    typedef schedule_free::StepScalars<T> StepScalars;

    __device__ __forceinline__ static StepScalars derive(const resident::Hyper& hyper, const resident::Group& own) {
        const double t = double(own.step);
        const double w = hyper.value[5];
        double warmed = 1.0;
        double share = 1.0 / t;
        if (t < w) {
            warmed = t / w;
            share = 6.0 * t / ((t + 1.0) * (2.0 * t + 1.0));
        } else if (w > 0.0) {
            const double rising = (w + 1.0) * (2.0 * w + 1.0) / (6.0 * w);
            share = 1.0 / (rising + (t - w));
        }
        const double lr = hyper.value[0] * own.lr_scale * warmed;
        const double own_step = lr * (1.0 - hyper.value[1] * (1.0 - share));
        const double bias2_sqrt = dialect::square_root(1.0 - resident::integer_power(hyper.value[2], own.step));
        return {T(lr), T(share), T(own_step), T(bias2_sqrt), T(hyper.value[3] * bias2_sqrt),
                T(resident::decay_of(own, hyper.value[4]))};
    }
};

template <class Format>
__device__ __forceinline__ void run(const unsigned char* arguments) {
    elementwise::run<Format, 2, Update<typename Format::Compute>>(arguments);
}

}  // namespace schedule_free

EACH_FORMAT(UPDATE_ENTRIES, schedule_free)
STEP_SCALARS_ENTRIES(schedule_free)
