// One Adamax step for every tensor of a launch.
//
//     g <- -g if maximize;  g <- g + l2 p
//     m <- beta1 m + (1 - beta1) g        u <- max(beta2 u, |g| + eps)
//     p <- p - step_size m / u
//
// Kingma & Ba 2015, Algorithm 2 (arXiv:1412.6980), with PyTorch's eps. Every operation is rounded
// once, in the order written in `element`, without contraction: the bits are those of
// crates/adamax/src/rule.rs.
#include "elementwise.cuh"

namespace adamax {

// Shared by all tensors; `scalars` of crates/adamax/src/rule.rs.
template <class T>
struct Scalars {
    T beta1;
    T one_minus_beta1;
    T beta2;
    T eps;
};

// Of the tensors of one group at one step; `step_scalars` of crates/adamax/src/rule.rs.
template <class T>
struct StepScalars {
    T step_size;
    T l2;
};

static_assert(sizeof(Scalars<float>) == 16 && sizeof(Scalars<double>) == 32, "crates/adamax: Scalars");
static_assert(sizeof(StepScalars<float>) == 8 && sizeof(StepScalars<double>) == 16, "crates/adamax: StepScalars");

template <class T>
struct Update : elementwise::Inputs<Scalars<T>, StepScalars<T>> {
    enum : multi_tensor::u32 { CODINGS = codes::Codings<codes::SIGNED, codes::POSITIVE>::VALUE };

    __device__ __forceinline__ void element(T& p, T g, T* state) const {
        const Scalars<T>& scalars = this->scalars;
        const StepScalars<T>& step_scalars = this->step_scalars;
        g = this->flags & elementwise::FLAG_MAXIMIZE ? -g : g;
        if (step_scalars.l2 != T(0)) {
            g = g + step_scalars.l2 * p;
        }
        const T m = scalars.beta1 * state[0] + scalars.one_minus_beta1 * g;
        const T decayed = scalars.beta2 * state[1];
        const T a = (g < T(0) ? -g : g) + scalars.eps;
        // NaN if either is NaN.
        const T u = decayed > a || decayed != decayed ? decayed : a;
        state[0] = m;
        state[1] = u;
        p = p - step_scalars.step_size * (m / u);
    }
};

// Derives `step_scalars` of crates/adamax/src/rule.rs. Hyper-parameters: lr, beta1, lambda.
template <class T>
struct Deriver : elementwise::Derived<Scalars<T>, StepScalars<T>> {
    __device__ __forceinline__ static StepScalars<T> derive(const resident::Hyper& hyper, const resident::Group& own) {
        const double lr = hyper.value[0] * own.lr_scale;
        return {T(lr / (1.0 - resident::integer_power(hyper.value[1], own.step))), T(resident::decay_of(own, hyper.value[2]))};
    }
};

}  // namespace adamax

ELEMENT_RULE(adamax, 2)
