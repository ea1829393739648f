// One LAMB step for every tensor of a launch.
//
//     m <- beta1 m + (1 - beta1) g        v <- beta2 v + (1 - beta2) g^2
//     r = scale m / (sqrt(v) + eps) + lambda p, bias-corrected through scale and eps
//     p <- p - lr phi r        phi = |p| / |r| if trusted and neither is 0, else 1
//
// You et al. 2020, Algorithm 2 (arXiv:1904.00962). Norms and step sizes are f64, elements
// `Compute`; every operation is rounded once, in the order written, without contraction: the bits
// are those of crates/lamb/src/rule.rs. The moments are computed twice and written once, so that a
// tensor that is skipped keeps every bit.
#include "normed.cuh"

namespace lamb {

// Shared by all tensors; crates/lamb/src/rule.rs: scalars.
template <class T>
struct Scalars {
    normed::Workspace workspace;
    T beta1;
    T one_minus_beta1;
    T beta2;
    T one_minus_beta2;
};

// What the direction takes; crates/lamb/src/rule.rs: step_scalars.
template <class T>
struct Direction {
    T scale;
    T eps;
    T lambda;
};

// Of the tensors of one group at one step; crates/elementwise/src/normed_kernel.rs writes them.
template <class T>
struct StepScalars {
    double lr;
    double trust;
    Direction<T> direction;
};

template <class T>
struct Finished {
    T step_size;
    Direction<T> direction;
};

static_assert(sizeof(Scalars<float>) == 40 && sizeof(Scalars<double>) == 56, "crates/lamb: Scalars");
static_assert(sizeof(StepScalars<float>) == 32 && sizeof(StepScalars<double>) == 40, "crates/lamb: StepScalars");

// The new moments, and the direction of the step.
template <class T>
__device__ __forceinline__ T direction(const Scalars<T>& scalars, const Direction<T>& step_scalars, T p, T g, T& m, T& v) {
    m = scalars.beta1 * m + scalars.one_minus_beta1 * g;
    v = scalars.beta2 * v + scalars.one_minus_beta2 * (g * g);
    const T d = dialect::square_root(v) + step_scalars.eps;
    return step_scalars.scale * (m / d) + step_scalars.lambda * p;
}

template <class FormatType>
struct Rule {
    typedef FormatType Format;
    typedef typename Format::Compute Compute;
    typedef lamb::Scalars<Compute> Scalars;
    typedef lamb::StepScalars<Compute> StepScalars;
    typedef lamb::Finished<Compute> Finished;
    enum : int { STATES = 2, VALUES = 4, READ = 4, SCALED_TERMS = 1 };
    enum : normed::u32 { CODINGS = codes::Codings<codes::SIGNED, codes::ROOT>::VALUE };

    __device__ __forceinline__ static void terms(const Compute (&element)[READ], const Scalars& scalars, const StepScalars& step_scalars, Compute (&terms)[2]) {
        Compute m = element[2];
        Compute v = element[3];
        terms[0] = element[0];
        terms[1] = direction(scalars, step_scalars.direction, element[0], element[1], m, v);
    }

    // False if a norm or the step size is not finite: the tensor is left as it is.
    __device__ __forceinline__ static bool finish(const double (&sums)[2], const Scalars&, const StepScalars& step_scalars, double, Finished& finished) {
        const double p = dialect::square_root(sums[0]);
        const double r = dialect::square_root(sums[1]);
        double ratio = 1.0;
        if (step_scalars.trust != 0.0 && p > 0.0 && r > 0.0) {
            ratio = p / r;
        }
        finished.step_size = Compute(step_scalars.lr * ratio);
        finished.direction = step_scalars.direction;
        return p - p == 0.0 && r - r == 0.0 && finished.step_size - finished.step_size == Compute(0);
    }

    __device__ __forceinline__ static void update(Compute (&element)[VALUES], const Scalars& scalars, const Finished& finished) {
        const Compute r = direction(scalars, finished.direction, element[0], element[1], element[2], element[3]);
        element[0] = element[0] - finished.step_size * r;
    }
};

// Derives `step_scalars` of crates/lamb/src/rule.rs. Hyper-parameters: lr, beta1, beta2, lambda,
// 1 if excluded tensors take the plain rate, eps.
template <class T>
struct Deriver {
    typedef lamb::Scalars<T> Scalars;
    typedef lamb::StepScalars<T> StepScalars;

    __device__ __forceinline__ static StepScalars derive(const resident::Hyper& hyper, const resident::Group& own) {
        const double bias2_sqrt = dialect::square_root(1.0 - resident::integer_power(hyper.value[2], own.step));
        const double scale = bias2_sqrt / (1.0 - resident::integer_power(hyper.value[1], own.step));
        const double lambda = resident::decay_of(own, hyper.value[3]);
        return {hyper.value[0] * own.lr_scale, resident::trust_of(own, hyper.value[4]), {T(scale), T(hyper.value[5] * bias2_sqrt), T(lambda)}};
    }
};

}  // namespace lamb

#define ALONE_lamb_update_f16 ALONE
#define ALONE_lamb_update_f32_s16 ALONE
#define ALONE_lamb_update_bf16_m32 ALONE
#define ALONE_lamb_update_bf16_r16 ALONE
#define ALONE_lamb_update_bf16_m32_s16 ALONE
#define ALONE_lamb_update_bf16_r16_s16 ALONE
#define ALONE_lamb_sums_bf16_m32_s16 ALONE
#define ALONE_lamb_update_f16_m32 ALONE
#define ALONE_lamb_update_bf16 ALONE
#define ALONE_lamb_update_bf16_s16 ALONE
#define ALONE_lamb_update_f32_s8 ALONE
#define ALONE_lamb_update_bf16_s8 ALONE
#define ALONE_lamb_update_bf16_m32_s8 ALONE
#define ALONE_lamb_update_bf16_r16_s8 ALONE
#define ALONE_lamb_update_bf16_r8_s8 ALONE
#define ALONE_lamb_sums_f32_s8 ALONE
EACH_FORMAT(NORMED_ENTRIES, lamb)
EACH_CODED_FORMAT(NORMED_ENTRIES, lamb)
STEP_SCALARS_ENTRIES(lamb)
