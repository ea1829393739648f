// The loop of element-wise kernels over one chunk: parameter, gradient and `STATES` state tensors, each element on its own.
//
// A kernel brings the update of one element as a struct
//
//     template <class T> struct Update {
//         typedef ... Scalars;  typedef ... Set;
//         Scalars scalars;  Set set;  u32 flags;
//         __device__ __forceinline__ void element(T& p, T g, T* state) const;      // state[0 .. STATES)
//     };
//
// as crates/elementwise has it on the host. Parameters and gradients are `Storage`; the state and all arithmetic are `Compute`.
#pragma once

#include "multi_tensor.cuh"

namespace elementwise {

using multi_tensor::Lanes;
using multi_tensor::u32;

template <class Storage, class Compute, int STATES, class Update>
struct Body {
    // C++ has no arrays of length 0.
    enum : int { PLACES = STATES > 0 ? STATES : 1 };

    Storage* param;
    const Storage* grad;
    Compute* state[PLACES];
    Update update;
    const multi_tensor::Header& header;

    template <int WIDTH, int IN_FLIGHT>
    __device__ __forceinline__ void visit(u32 first, u32 stride) const {
        // Read anew each time: kept over the loop, it costs registers.
        const Compute grad_factor = Compute(multi_tensor::grad_factor(header));
        Lanes<WIDTH, Storage> p[IN_FLIGHT], g[IN_FLIGHT];
        Lanes<WIDTH, Compute> s[IN_FLIGHT][PLACES];
        for (int i = 0; i < IN_FLIGHT; i++) {
            const u32 at = first + i * stride;
            p[i] = multi_tensor::load_lanes<WIDTH>(param + at);
            g[i] = multi_tensor::load_lanes<WIDTH>(grad + at);
            for (int list = 0; list < STATES; list++) {
                s[i][list] = multi_tensor::load_lanes<WIDTH>(state[list] + at);
            }
        }
        for (int i = 0; i < IN_FLIGHT; i++) {
            for (int lane = 0; lane < WIDTH; lane++) {
                Compute value = Compute(p[i].lane[lane]);
                Compute own[PLACES];
                for (int list = 0; list < STATES; list++) {
                    own[list] = s[i][list].lane[lane];
                }
                update.element(value, Compute(g[i].lane[lane]) * grad_factor, own);
                p[i].lane[lane] = Storage(value);
                for (int list = 0; list < STATES; list++) {
                    s[i][list].lane[lane] = own[list];
                }
            }
        }
        for (int i = 0; i < IN_FLIGHT; i++) {
            const u32 at = first + i * stride;
            multi_tensor::store_lanes(param + at, p[i]);
            for (int list = 0; list < STATES; list++) {
                multi_tensor::store_lanes(state[list] + at, s[i][list]);
            }
        }
    }
};

// What one block does: finds its chunk and updates it, in packs of 16 bytes where all lists allow it.
template <class Storage, class Compute, int STATES, class Update>
__device__ __forceinline__ void update_chunk(const unsigned char* arguments) {
    constexpr int LISTS = STATES + 2;
    const multi_tensor::Table<typename Update::Scalars, typename Update::Set, LISTS> table = {arguments};
    if (multi_tensor::is_skipped(table.header())) {
        return;
    }
    const multi_tensor::Record<LISTS>& record = table.record(table.record_of_chunk(blockIdx.x));
    const multi_tensor::Chunk chunk = multi_tensor::chunk_of_block(table.header(), record);
    Body<Storage, Compute, STATES, Update> body = {
        multi_tensor::chunk_start<Storage>(record, 0, chunk),
        multi_tensor::chunk_start<const Storage>(record, 1, chunk),
        {},
        {table.scalars(), table.set(record.set), table.header().flags},
        table.header(),
    };
    bool packs = multi_tensor::takes_packs(body.param) && multi_tensor::takes_packs(body.grad);
    for (int list = 0; list < STATES; list++) {
        body.state[list] = multi_tensor::chunk_start<Compute>(record, list + 2, chunk);
        packs = packs && multi_tensor::takes_packs(body.state[list]);
    }
    // Two packs of each of two or three lists are 64 or 96 bytes in flight per thread, within the 64 registers that let two
    // blocks of 512 threads share a multiprocessor.
    constexpr int PACK_WIDTH = 16 / sizeof(Storage);
    const u32 done = packs ? multi_tensor::sweep<PACK_WIDTH, 2>(body, 0, chunk.numel) : 0;
    multi_tensor::sweep<1, 2>(body, done, chunk.numel);
}

}  // namespace elementwise
