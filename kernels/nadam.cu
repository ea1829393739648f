// One NAdam step for every tensor of a launch.
//
//     g <- -g if maximize;  g <- g + l2 p
//     m <- beta1 m + (1 - beta1) g        v <- beta2 v + (1 - beta2) g^2
//     p <- decay p - (grad_size g + moment_size m) / (sqrt(v) + eps)
//
// Dozat 2016, Algorithm 8, with PyTorch's momenta and decay. Every operation is rounded once, in
// the order written in `element`, without contraction: the bits are those of
// crates/nadam/src/rule.rs.
#include "elementwise.cuh"

namespace nadam {

using multi_tensor::u64;

// Shared by all tensors; `scalars` of crates/nadam/src/rule.rs.
template <class T>
struct Scalars {
    T beta1;
    T one_minus_beta1;
    T beta2;
    T one_minus_beta2;
};

// Of the tensors of one group at one step; `step_scalars` of crates/nadam/src/rule.rs.
template <class T>
struct alignas(8) StepScalars {
    T grad_size;
    T moment_size;
    T eps;
    T decay;
    T l2;
};

static_assert(sizeof(Scalars<float>) == 16 && sizeof(Scalars<double>) == 32, "crates/nadam: Scalars");
static_assert(sizeof(StepScalars<float>) == 24 && sizeof(StepScalars<double>) == 40, "crates/nadam: StepScalars");

template <class T>
struct Update : elementwise::Inputs<Scalars<T>, StepScalars<T>> {
    enum : multi_tensor::u32 { CODINGS = codes::Codings<codes::SIGNED, codes::ROOT>::VALUE };

    __device__ __forceinline__ void element(T& p, T g, T* state) const {
        const Scalars<T>& scalars = this->scalars;
        const StepScalars<T>& step_scalars = this->step_scalars;
        g = this->flags & elementwise::FLAG_MAXIMIZE ? -g : g;
        if (step_scalars.l2 != T(0)) {
            g = g + step_scalars.l2 * p;
        }
        const T m = scalars.beta1 * state[0] + scalars.one_minus_beta1 * g;
        const T v = scalars.beta2 * state[1] + scalars.one_minus_beta2 * (g * g);
        state[0] = m;
        state[1] = v;
        const T d = dialect::square_root(v) + step_scalars.eps;
        p = p * step_scalars.decay - (step_scalars.grad_size * g + step_scalars.moment_size * m) / d;
    }
};

// `NAdam::momentum` of crates/nadam/src/rule.rs.
__device__ __forceinline__ double momentum_of(double beta1, const resident::Pair& power) {
    return beta1 * (1.0 - 0.5 * (power.high + power.low));
}

// `NAdam::momentum_product` there.
__device__ __forceinline__ double momentum_product(double beta1, const resident::Pair& base, u64 step) {
    constexpr double NEGLIGIBLE = 1.0 / 18446744073709551616.0;
    resident::Pair power = {1.0, 0.0};
    double product = 1.0;
    ROLLED
    for (u64 turn = 0; turn < step && product >= NEGLIGIBLE; turn++) {
        power = resident::multiply(power, base);
        product = product * momentum_of(beta1, power);
    }
    return product;
}

// Derives `step_scalars` of crates/nadam/src/rule.rs. Hyper-parameters: lr, beta1, beta2, eps,
// lambda, whether decay is decoupled, and both parts of 0.96 to the power of the momentum's decay.
template <class T>
struct Deriver : elementwise::Derived<Scalars<T>, StepScalars<T>> {
    __device__ __forceinline__ static StepScalars<T> derive(const resident::Hyper& hyper, const resident::Group& own) {
        const double lr = hyper.value[0] * own.lr_scale;
        const double beta1 = hyper.value[1];
        const resident::Pair base = {hyper.value[6], hyper.value[7]};
        const double lambda = resident::decay_of(own, hyper.value[4]);
        const bool is_decoupled = hyper.value[5] != 0.0;
        const resident::Pair power = resident::power(base, own.step);
        const double momentum = momentum_of(beta1, power);
        const double next = momentum_of(beta1, resident::multiply(power, base));
        const double product = momentum_product(beta1, base, own.step);
        const double bias2_sqrt = dialect::square_root(1.0 - resident::integer_power(hyper.value[2], own.step));
        return {
            T(lr * bias2_sqrt * (1.0 - momentum) / (1.0 - product)),
            T(lr * bias2_sqrt * next / (1.0 - product * next)),
            T(hyper.value[3] * bias2_sqrt),
            T(is_decoupled ? 1.0 - lr * lambda : 1.0),
            T(is_decoupled ? 0.0 : lambda),
        };
    }
};

}  // namespace nadam

ELEMENT_RULE(nadam, 2)
