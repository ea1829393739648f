// One LARS momentum step for every tensor of a launch.
//
//     P = |p|        G = rescale |g|
//     local = lr coefficient P / (G + lambda P + eps) if trusted, P > 0 and G > 0, else lr
//     u <- momentum u + local (rescale g + lambda p)        p <- p - u
//
// You, Gitman & Ginsburg 2017 (arXiv:1708.03888), with lr inside of the velocity. Norms and rates
// are f64, elements `Compute`; every operation is rounded once, in the order written, without
// contraction: the bits are those of crates/lars-momentum/src/rule.rs.
#include "normed.cuh"

namespace lars_momentum {

// Shared by all tensors; crates/lars-momentum/src/rule.rs: rate_scalars, scalars.
template <class T>
struct Scalars {
    normed::Workspace workspace;
    double trust_coefficient;
    double eps;
    double rescale_norm;
    T momentum;
    T rescale;
};

// Of the tensors of one group; crates/elementwise/src/normed_kernel.rs writes them.
struct StepScalars {
    double lr;
    double lambda;
    double trust;
};

template <class T>
struct Finished {
    T local;
    T lambda;
};

static_assert(sizeof(Scalars<float>) == 56 && sizeof(Scalars<double>) == 64, "crates/lars-momentum: Scalars");
static_assert(sizeof(StepScalars) == 24, "crates/lars-momentum: StepScalars");

template <class FormatType>
struct Rule {
    typedef FormatType Format;
    typedef typename Format::Compute Compute;
    typedef lars_momentum::Scalars<Compute> Scalars;
    typedef lars_momentum::StepScalars StepScalars;
    typedef lars_momentum::Finished<Compute> Finished;
    // The norm of the gradient is scaled as a whole, in `finish`.
    enum : int { STATES = 1, VALUES = 3, READ = 2, SCALED_TERMS = 0 };
    enum : normed::u32 { CODINGS = codes::Codings<codes::SIGNED>::VALUE };

    __device__ __forceinline__ static void terms(const Compute (&element)[READ], const Scalars&, const StepScalars&, Compute (&terms)[2]) {
        terms[0] = element[0];
        terms[1] = element[1];
    }

    // False if a norm or the rate is not finite: the tensor is left as it is.
    __device__ __forceinline__ static bool finish(const double (&sums)[2], const Scalars& scalars, const StepScalars& step_scalars, double grad_factor, Finished& finished) {
        const double p = dialect::square_root(sums[0]);
        const double g = (scalars.rescale_norm * grad_factor) * dialect::square_root(sums[1]);
        double local = step_scalars.lr;
        if (step_scalars.trust != 0.0 && p > 0.0 && g > 0.0) {
            local = step_scalars.lr * scalars.trust_coefficient * p / (g + step_scalars.lambda * p + scalars.eps);
        }
        finished.local = Compute(local);
        finished.lambda = Compute(step_scalars.lambda);
        return p - p == 0.0 && g - g == 0.0 && finished.local - finished.local == Compute(0);
    }

    __device__ __forceinline__ static void update(Compute (&element)[VALUES], const Scalars& scalars, const Finished& finished) {
        const Compute p = element[0];
        const Compute d = scalars.rescale * element[1] + finished.lambda * p;
        const Compute u = scalars.momentum * element[2] + finished.local * d;
        element[0] = p - u;
        element[2] = u;
    }
};

// Derives `step_scalars` of crates/lars-momentum/src/rule.rs. Hyper-parameters: lr, lambda, 1 if
// excluded tensors take the plain rate.
template <class T>
struct Deriver {
    typedef lars_momentum::Scalars<T> Scalars;
    typedef lars_momentum::StepScalars StepScalars;

    __device__ __forceinline__ static StepScalars derive(const resident::Hyper& hyper, const resident::Group& own) {
        return {hyper.value[0] * own.lr_scale, resident::decay_of(own, hyper.value[1]), resident::trust_of(own, hyper.value[2])};
    }
};

}  // namespace lars_momentum

#define ALONE_lars_momentum_update_f16 ALONE
#define ALONE_lars_momentum_update_bf16 ALONE
#define ALONE_lars_momentum_update_bf16_m32_s16 ALONE
#define ALONE_lars_momentum_update_f32_s16 ALONE
#define ALONE_lars_momentum_update_bf16_s16 ALONE
#define ALONE_lars_momentum_update_bf16_r16_s16 ALONE
#define ALONE_lars_momentum_update_f32_s8 ALONE
#define ALONE_lars_momentum_update_bf16_s8 ALONE
#define ALONE_lars_momentum_update_bf16_m32_s8 ALONE
#define ALONE_lars_momentum_update_bf16_r16_s8 ALONE
#define ALONE_lars_momentum_update_bf16_r8_s8 ALONE
EACH_FORMAT(NORMED_ENTRIES, lars_momentum)
EACH_CODED_FORMAT(NORMED_ENTRIES, lars_momentum)
STEP_SCALARS_ENTRIES(lars_momentum)
