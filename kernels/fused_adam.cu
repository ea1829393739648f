// One AdamW, Adam or AMSGrad step for every tensor of a launch.
//
//     g <- -g if maximize;  g <- g + l2 p
//     m <- beta1 m + (1 - beta1) g        v <- beta2 v + (1 - beta2) g^2
//     w <- v, or the largest v so far (AMSGrad)
//     p <- decay p - step_size m / (sqrt(w) + eps), bias-corrected through step_size and eps
//
// Kingma & Ba 2015, Algorithm 1 (arXiv:1412.6980); Loshchilov & Hutter 2019, Algorithm 2
// (arXiv:1711.05101), with the decay multiplied by the learning rate; Reddi, Kale & Kumar 2018 for
// AMSGrad. Every operation is rounded once, in the order written in `update`, without contraction:
// the bits are those of crates/fused-adam/src/rule.rs.
#include "coded.cuh"

namespace fused_adam {

using multi_tensor::Lanes;
using multi_tensor::u32;

// Options of the kernel; crates/fused-adam/src/rule.rs.
enum Flag : u32 { FLAG_AMSGRAD = 1, FLAG_MAXIMIZE = 2 };

// Which second moment is under the root. The largest so far is a fifth list.
enum class SecondMoment { running, largest };

// Shared by all tensors; `scalars` of crates/fused-adam/src/rule.rs.
template <class T>
struct Scalars {
    T beta1;
    T one_minus_beta1;
    T beta2;
    T one_minus_beta2;
};

// Of the tensors of one group at one step; `step_scalars` of crates/fused-adam/src/rule.rs.
template <class T>
struct StepScalars {
    T step_size;
    T eps;
    T decay;
    T l2;
};

static_assert(sizeof(Scalars<float>) == 16 && sizeof(Scalars<double>) == 32, "crates/fused-adam: Scalars");
static_assert(sizeof(StepScalars<float>) == 16 && sizeof(StepScalars<double>) == 32, "crates/fused-adam: StepScalars");

template <class T>
struct Element {
    T param;
    T moment1;
    T moment2;
    T max_moment2;
};

template <class T, SecondMoment SECOND>
__device__ __forceinline__ void update(Element<T>& element, T g, const Scalars<T>& scalars, const StepScalars<T>& step_scalars, u32 flags) {
    const T p = element.param;
    g = flags & FLAG_MAXIMIZE ? -g : g;
    if (step_scalars.l2 != T(0)) {
        g = g + step_scalars.l2 * p;
    }
    const T m = scalars.beta1 * element.moment1 + scalars.one_minus_beta1 * g;
    const T v = scalars.beta2 * element.moment2 + scalars.one_minus_beta2 * (g * g);
    T w = v;
    if constexpr (SECOND == SecondMoment::largest) {
        w = element.max_moment2 > v ? element.max_moment2 : v;
        element.max_moment2 = w;
    }
    const T d = dialect::square_root(w) + step_scalars.eps;
    element.param = p * step_scalars.decay - step_scalars.step_size * (m / d);
    element.moment1 = m;
    element.moment2 = v;
}

// The update beside state in codes.
template <SecondMoment SECOND>
struct CodedUpdate {
    typedef fused_adam::Scalars<float> Scalars;
    typedef fused_adam::StepScalars<float> StepScalars;
    enum : u32 { CODINGS = codes::Codings<codes::SIGNED, codes::ROOT, codes::ROOT>::VALUE };

    Scalars scalars;
    StepScalars step_scalars;
    u32 flags;

    __device__ __forceinline__ void element(float& p, float g, float* state) const {
        constexpr int LARGEST = SECOND == SecondMoment::largest ? 2 : 1;
        Element<float> element = {p, state[0], state[1], state[LARGEST]};
        update<float, SECOND>(element, g, scalars, step_scalars, flags);
        p = element.param;
        state[0] = element.moment1;
        state[1] = element.moment2;
        if constexpr (SECOND == SecondMoment::largest) {
            state[LARGEST] = element.max_moment2;
        }
    }
};

// One chunk in all lists.
template <class Format, SecondMoment SECOND, bool AT_RANDOM>
struct Body {
    typedef typename Format::Param Param;
    typedef typename Format::Master Master;
    typedef typename Format::State State;
    typedef typename Format::Compute Compute;

    Param* param;
    // The chunk's start in the list of gradients, which may be wider than the parameter.
    multi_tensor::u64 grad;
    State* moment1;
    State* moment2;
    State* max_moment2;
    Master* master;
    Scalars<Compute> scalars;
    StepScalars<Compute> step_scalars;
    const multi_tensor::Header& header;
    storage::Draws draws;

    template <int WIDTH, int IN_FLIGHT>
    __device__ __forceinline__ void visit(u32 first, u32 stride) const {
        // Read anew each time: kept over the loop, it costs the registers that f64 has not got.
        const Compute grad_factor = Compute(multi_tensor::grad_factor(header));
        Lanes<WIDTH, Param> p[IN_FLIGHT];
        storage::Gradients<WIDTH, IN_FLIGHT, Param> g;
        Lanes<WIDTH, State> m[IN_FLIGHT], v[IN_FLIGHT], w[IN_FLIGHT];
        Lanes<WIDTH, Master> b[IN_FLIGHT];
        for (int i = 0; i < IN_FLIGHT; i++) {
            const u32 at = first + i * stride;
            if constexpr (Format::READS_PARAM) {
                p[i] = multi_tensor::load_lanes<WIDTH>(param + at);
            }
            m[i] = multi_tensor::load_lanes<WIDTH>(moment1 + at);
            v[i] = multi_tensor::load_lanes<WIDTH>(moment2 + at);
            if constexpr (SECOND == SecondMoment::largest) {
                w[i] = multi_tensor::load_lanes<WIDTH>(max_moment2 + at);
            } else {
                w[i] = v[i];
            }
            if constexpr (Format::MASTER_LISTS > 0) {
                b[i] = multi_tensor::load_lanes<WIDTH>(master + at);
            }
        }
        g.load(grad, first, stride, header.flags);
        for (int i = 0; i < IN_FLIGHT; i++) {
            for (int lane = 0; lane < WIDTH; lane++) {
                Element<Compute> element = {Format::value(p[i].lane[lane], b[i].lane[lane]), storage::widen(m[i].lane[lane]), storage::widen(v[i].lane[lane]),
                                            storage::widen(w[i].lane[lane])};
                update<Compute, SECOND>(element, g.value[i][lane] * grad_factor, scalars, step_scalars, header.flags);
                u32 word0 = 0, word1 = 0;
                if constexpr (AT_RANDOM) {
                    word0 = draws.word(first + i * stride + lane, 0);
                    word1 = draws.word(first + i * stride + lane, 1);
                }
                Format::template keep<AT_RANDOM>(p[i].lane[lane], b[i].lane[lane], element.param, word0);
                storage::narrow<AT_RANDOM>(m[i].lane[lane], element.moment1, word0 >> 16);
                storage::narrow<AT_RANDOM>(v[i].lane[lane], element.moment2, word1);
                storage::narrow<AT_RANDOM>(w[i].lane[lane], element.max_moment2, word1 >> 16);
            }
        }
        for (int i = 0; i < IN_FLIGHT; i++) {
            const u32 at = first + i * stride;
            multi_tensor::store_lanes(param + at, p[i]);
            multi_tensor::store_lanes(moment1 + at, m[i]);
            multi_tensor::store_lanes(moment2 + at, v[i]);
            if constexpr (SECOND == SecondMoment::largest) {
                multi_tensor::store_lanes(max_moment2 + at, w[i]);
            }
            if constexpr (Format::MASTER_LISTS > 0) {
                multi_tensor::store_lanes(master + at, b[i]);
            }
        }
    }
};

template <class Format, SecondMoment SECOND, bool AT_RANDOM>
__device__ __forceinline__ void update_chunk(const unsigned char* arguments) {
    typedef typename Format::Param Param;
    typedef typename Format::State State;
    typedef typename Format::Compute Compute;
    constexpr int STATE_LISTS = SECOND == SecondMoment::largest ? 3 : 2;
    constexpr int LISTS = 2 + STATE_LISTS + Format::MASTER_LISTS;
    constexpr int WORDS = LISTS + storage::Origin<AT_RANDOM>::WORDS;
    typedef storage::KeyedStepScalars<StepScalars<Compute>, AT_RANDOM> Keyed;
    typedef multi_tensor::Table<Scalars<Compute>, Keyed, WORDS> Table;
    const Table table = Table::of(arguments);
    if (multi_tensor::is_skipped(table.header())) {
        return;
    }
    const multi_tensor::Record<WORDS> record = table.record(table.record_of_chunk(blockIdx.x));
    const Keyed step_scalars = table.step_scalars(record.group);
    const multi_tensor::Chunk chunk = multi_tensor::chunk_of_block(table.header(), record);
    Body<Format, SECOND, AT_RANDOM> body = {
        multi_tensor::chunk_start<Param>(record, 0, chunk),
        record.address[1] + chunk.first_element * storage::grad_bytes<Param>(table.header().flags),
        multi_tensor::chunk_start<State>(record, 2, chunk),
        multi_tensor::chunk_start<State>(record, 3, chunk),
        nullptr,
        nullptr,
        table.scalars(),
        step_scalars.own,
        table.header(),
        storage::draws_of<LISTS>(record, step_scalars, chunk),
    };
    if constexpr (SECOND == SecondMoment::largest) {
        body.max_moment2 = multi_tensor::chunk_start<State>(record, 4, chunk);
    }
    if constexpr (Format::MASTER_LISTS > 0) {
        body.master = multi_tensor::chunk_start<typename Format::Master>(record, LISTS - 1, chunk);
    }
    const bool packs = multi_tensor::takes_packs(body.param) && body.grad % 16 == 0 &&
                       multi_tensor::takes_packs(body.moment1) && multi_tensor::takes_packs(body.moment2) &&
                       multi_tensor::takes_packs(body.max_moment2) && multi_tensor::takes_packs(body.master);
    // One access per list is four or five packs in flight per thread already. A second would cost
    // more registers than the 64 that let four blocks of 256 threads share a multiprocessor, and so
    // would bring no further bytes in flight. Where all lists are of 16 bits, packs of eight take
    // up to 73 registers, and three such blocks have 48 KB in flight where four with halves of
    // packs have 32; a fifth list, of AMSGrad or a remainder, takes too many. States alone rounded
    // at random would spill with the words of four elements.
    constexpr int FITTING = storage::Width<Format>::FITTING;
    constexpr bool HAS_FIFTH = SECOND == SecondMoment::largest || Format::MASTER_LISTS > 0;
    constexpr int MOST = HAS_FIFTH ? 4 : 8;
    constexpr int WIDTH = AT_RANDOM && sizeof(Param) > 2 ? 2 : FITTING > MOST ? MOST : FITTING;
    const u32 done = packs ? multi_tensor::sweep<WIDTH, 1>(body, 0, chunk.numel) : 0;
    // Random rounding has registers for one element at a time.
    multi_tensor::sweep<1, AT_RANDOM ? 1 : 2>(body, done, chunk.numel);
}

template <class Format, bool AT_RANDOM>
__device__ __forceinline__ void run_rounded(const unsigned char* arguments) {
    if (multi_tensor::header_of(arguments).flags & FLAG_AMSGRAD) {
        update_chunk<Format, SecondMoment::largest, AT_RANDOM>(arguments);
    } else {
        update_chunk<Format, SecondMoment::running, AT_RANDOM>(arguments);
    }
}

template <class Format>
__device__ __forceinline__ void run_coded(const unsigned char* arguments) {
    if (multi_tensor::header_of(arguments).flags & FLAG_AMSGRAD) {
        coded::update_chunk<Format, 3, CodedUpdate<SecondMoment::largest>>(arguments);
    } else {
        coded::update_chunk<Format, 2, CodedUpdate<SecondMoment::running>>(arguments);
    }
}

template <class Format>
__device__ __forceinline__ void run(const unsigned char* arguments) {
    if constexpr (storage::IsCoded<Format>::VALUE) {
        run_coded<Format>(arguments);
        return;
    } else {
        if constexpr (storage::MayDraw<Format>::VALUE) {
            if (multi_tensor::header_of(arguments).flags & storage::FLAG_STOCHASTIC) {
                run_rounded<Format, true>(arguments);
                return;
            }
        }
        run_rounded<Format, false>(arguments);
    }
}

// Derives `step_scalars` of crates/fused-adam/src/rule.rs. Hyper-parameters: lr, beta1, beta2,
// lambda, 1 if decay is decoupled, eps.
template <class T>
struct Deriver {
    typedef fused_adam::Scalars<T> Scalars;
    typedef fused_adam::StepScalars<T> StepScalars;

    __device__ __forceinline__ static StepScalars derive(const resident::Hyper& hyper, const resident::Group& own) {
        const double lr = hyper.value[0] * own.lr_scale;
        const double lambda = resident::decay_of(own, hyper.value[3]);
        const bool decoupled = hyper.value[4] != 0.0;
        const double bias2_sqrt = dialect::square_root(1.0 - resident::integer_power(hyper.value[2], own.step));
        const double step_size = lr * bias2_sqrt / (1.0 - resident::integer_power(hyper.value[1], own.step));
        return {T(step_size), T(hyper.value[5] * bias2_sqrt), T(decoupled ? 1.0 - lr * lambda : 1.0), T(decoupled ? 0.0 : lambda)};
    }
};

}  // namespace fused_adam

EACH_FORMAT(UPDATE_ENTRIES, fused_adam)
EACH_CODED_FORMAT(CODED_ENTRIES, fused_adam)
STEP_SCALARS_ENTRIES(fused_adam)
