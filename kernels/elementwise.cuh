// The loop of element-wise kernels over one chunk: parameter, gradient and `STATES` state tensors,
// each element on its own.
//
// A kernel brings the update of one element as a struct
//
//     template <class T> struct Update {
//         typedef ... Scalars;  typedef ... StepScalars;
//         Scalars scalars;  StepScalars step_scalars;  u32 flags;
//         __device__ __forceinline__ void element(T& p, T g, T* state) const; // state[0 .. STATES)
//         enum : u32 { CODINGS = codes::Codings<...>::VALUE };   // if it may be in codes
//     };
//
// as crates/elementwise has it on the host. How tensors are kept is a format of storage.cuh;
// arithmetic is in its compute type.
#pragma once

#include "coded.cuh"

namespace elementwise {

using multi_tensor::Lanes;
using multi_tensor::u32;

// Turns the gradient's sign; crates/elementwise/src/equation.rs.
enum Flag : u32 { FLAG_MAXIMIZE = 1 };

// What an update of one element reads; a kernel's `Update` derives from it.
template <class ScalarsOfRule, class StepScalarsOfRule>
struct Inputs {
    typedef ScalarsOfRule Scalars;
    typedef StepScalarsOfRule StepScalars;

    Scalars scalars;
    StepScalars step_scalars;
    u32 flags;
};

// What a kernel's `Deriver` derives from.
template <class ScalarsOfRule, class StepScalarsOfRule>
struct Derived {
    typedef ScalarsOfRule Scalars;
    typedef StepScalarsOfRule StepScalars;
};

template <class Format, int STATES, class Update, bool AT_RANDOM>
struct Body {
    typedef typename Format::Param Param;
    typedef typename Format::Master Master;
    typedef typename Format::State State;
    typedef typename Format::Compute Compute;
    // C++ has no arrays of length 0. Two lists share a word of random bits.
    enum : int { PLACES = STATES > 0 ? STATES : 1, WORDS = (STATES + 2) / 2 };

    Param* param;
    // The chunk's start in the list of gradients, which may be wider than the parameter.
    multi_tensor::u64 grad;
    State* state[PLACES];
    Master* master;
    Update update;
    const multi_tensor::Header& header;
    storage::Draws draws;

    template <int WIDTH, int IN_FLIGHT>
    __device__ __forceinline__ void visit(u32 first, u32 stride) const {
        Lanes<WIDTH, Param> p[IN_FLIGHT];
        storage::Gradients<WIDTH, IN_FLIGHT, Param> g;
        Lanes<WIDTH, State> s[IN_FLIGHT][PLACES];
        Lanes<WIDTH, Master> b[IN_FLIGHT];
        for (int i = 0; i < IN_FLIGHT; i++) {
            const u32 at = first + i * stride;
            if constexpr (Format::READS_PARAM) {
                p[i] = multi_tensor::load_lanes<WIDTH>(param + at);
            }
            for (int list = 0; list < STATES; list++) {
                s[i][list] = multi_tensor::load_lanes<WIDTH>(state[list] + at);
            }
            if constexpr (Format::MASTER_LISTS > 0) {
                b[i] = multi_tensor::load_lanes<WIDTH>(master + at);
            }
        }
        // Read anew each time: kept over the loop, it costs registers.
        const Compute grad_factor = Compute(multi_tensor::grad_factor(header));
        g.load(grad, first, stride, header.flags);
        for (int i = 0; i < IN_FLIGHT; i++) {
            for (int lane = 0; lane < WIDTH; lane++) {
                Compute value = Format::value(p[i].lane[lane], b[i].lane[lane]);
                Compute own[PLACES];
                for (int list = 0; list < STATES; list++) {
                    own[list] = storage::widen(s[i][list].lane[lane]);
                }
                update.element(value, g.value[i][lane] * grad_factor, own);
                u32 words[WORDS] = {};
                if constexpr (AT_RANDOM) {
                    for (int word = 0; word < WORDS; word++) {
                        words[word] = draws.word(first + i * stride + lane, word);
                    }
                }
                Format::template keep<AT_RANDOM>(p[i].lane[lane], b[i].lane[lane], value, words[0]);
                for (int list = 0; list < STATES; list++) {
                    const u32 draw = words[(list + 1) / 2] >> (16 * ((list + 1) % 2));
                    storage::narrow<AT_RANDOM>(s[i][list].lane[lane], own[list], draw);
                }
            }
        }
        for (int i = 0; i < IN_FLIGHT; i++) {
            const u32 at = first + i * stride;
            multi_tensor::store_lanes(param + at, p[i]);
            for (int list = 0; list < STATES; list++) {
                multi_tensor::store_lanes(state[list] + at, s[i][list]);
            }
            if constexpr (Format::MASTER_LISTS > 0) {
                multi_tensor::store_lanes(master + at, b[i]);
            }
        }
    }
};

// What one block does: finds its chunk and updates it, in packs of 16 bytes where all lists allow
// it.
template <class Format, int STATES, class Update, bool AT_RANDOM>
__device__ __forceinline__ void update_chunk(const unsigned char* arguments) {
    typedef typename Format::Param Param;
    typedef typename Format::Master Master;
    typedef typename Format::State State;
    constexpr int LISTS = 2 + STATES + Format::MASTER_LISTS;
    constexpr int WORDS = LISTS + storage::Origin<AT_RANDOM>::WORDS;
    typedef storage::KeyedStepScalars<typename Update::StepScalars, AT_RANDOM> Keyed;
    typedef multi_tensor::Table<typename Update::Scalars, Keyed, WORDS> Table;
    const Table table = Table::of(arguments);
    if (multi_tensor::is_skipped(table.header())) {
        return;
    }
    const multi_tensor::Record<WORDS> record = table.record(table.record_of_chunk(blockIdx.x));
    const multi_tensor::Chunk chunk = multi_tensor::chunk_of_block(table.header(), record);
    const Keyed step_scalars = table.step_scalars(record.group);
    Body<Format, STATES, Update, AT_RANDOM> body = {
        multi_tensor::chunk_start<Param>(record, 0, chunk),
        record.address[1] + chunk.first_element * storage::grad_bytes<Param>(table.header().flags),
        {},
        nullptr,
        {table.scalars(), step_scalars.own, table.header().flags},
        table.header(),
        storage::draws_of<LISTS>(record, step_scalars, chunk),
    };
    bool packs = multi_tensor::takes_packs(body.param) && body.grad % 16 == 0;
    for (int list = 0; list < STATES; list++) {
        body.state[list] = multi_tensor::chunk_start<State>(record, list + 2, chunk);
        packs = packs && multi_tensor::takes_packs(body.state[list]);
    }
    if constexpr (Format::MASTER_LISTS > 0) {
        body.master = multi_tensor::chunk_start<Master>(record, LISTS - 1, chunk);
        packs = packs && multi_tensor::takes_packs(body.master);
    }
    // Two packs of each of two or three lists are 64 or 96 bytes in flight per thread, within the
    // 64 registers that let two blocks of 512 threads share a multiprocessor. Where all lists are
    // of 16 bits one pack is eight elements, as many as two packs of 32 bits. Words of random bits
    // and a second list of state take the registers of the second pack, both those of half a pack,
    // and step scalars of more than four values with them those of a quarter.
    constexpr int FITTING = storage::Width<Format>::FITTING;
    // Eight elements with a remainder are two halves of packs, which take fewer registers at once.
    constexpr bool HAS_HALVES = FITTING > 4 && Format::MASTER_LISTS > 0 && STATES < 2;
    constexpr int IN_FLIGHT = AT_RANDOM || STATES > 1 || (FITTING > 4 && !HAS_HALVES) ? 1 : 2;
    constexpr bool IS_LARGE = STATES > 1 && sizeof(typename Update::StepScalars) > 4 * sizeof(typename Format::Compute);
    constexpr int MOST_AT_RANDOM = IS_LARGE ? 2 : STATES > 1 ? 4 : 8;
    constexpr int WIDTH = AT_RANDOM && FITTING > MOST_AT_RANDOM ? MOST_AT_RANDOM : HAS_HALVES ? 4 : FITTING;
    const u32 done = packs ? multi_tensor::sweep<WIDTH, IN_FLIGHT>(body, 0, chunk.numel) : 0;
    multi_tensor::sweep<1, (AT_RANDOM || STATES > 1 ? 1 : 2)>(body, done, chunk.numel);
}

// An entry: `Format` may be rounded at random, and the flag says whether it is.
template <class Format, int STATES, class Update>
__device__ __forceinline__ void run(const unsigned char* arguments) {
    if constexpr (storage::IsCoded<Format>::VALUE) {
        coded::update_chunk<Format, STATES, Update>(arguments);
        return;
    } else {
        if constexpr (storage::MayDraw<Format>::VALUE) {
            if (multi_tensor::header_of(arguments).flags & storage::FLAG_STOCHASTIC) {
                update_chunk<Format, STATES, Update, true>(arguments);
                return;
            }
        }
        update_chunk<Format, STATES, Update, false>(arguments);
    }
}

}  // namespace elementwise

// The entries of a rule whose `Update<T>` has always as many tensors of state.
#define ELEMENT_RULE(STEM, STATES)                                                        \
    namespace STEM {                                                                      \
    template <class Format>                                                               \
    __device__ __forceinline__ void run(const unsigned char* arguments) {                 \
        elementwise::run<Format, STATES, Update<typename Format::Compute>>(arguments);    \
    }                                                                                     \
    }                                                                                     \
    EACH_FORMAT(UPDATE_ENTRIES, STEM)                                                     \
    EACH_CODED_FORMAT(CODED_ENTRIES, STEM)                                                \
    STEP_SCALARS_ENTRIES(STEM)
