// Updates of tensors whose state is in codes: groups of 32 elements on neighbouring threads of a
// warp, and the loop of element-wise kernels over one chunk. The update of one element is that of
// elementwise.cuh, with its `CODINGS` beside it.
//
// A thread takes four elements, 16 bytes of a list of f32, and so a warp four groups: eight would
// need more registers than three blocks of 256 threads leave. What is left, a short group too, and
// tensors at other addresses go with an element for each thread, a group for a warp.
#pragma once

#include "codes.cuh"
#include "entries.cuh"

namespace coded {

using multi_tensor::Lanes;
using multi_tensor::u32;
using multi_tensor::u64;

// Where the lists of a tensor begin, or a part of it that begins with a group.
template <class Format, int STATES>
struct Tensor {
    u64 param;
    // May be wider than the parameter.
    u64 grad;
    codes::Lists<STATES> state;
    u64 master;
    u32 flags;
};

// One visit of `WIDTH` neighbouring elements of a group in all lists, by all threads of a warp;
// those that are not live have no elements. `update(p, g, state)` is that of one element.
template <int WIDTH, u32 CODINGS, class Format, int STATES, class Index, class Update>
__device__ __forceinline__ void visit(const Tensor<Format, STATES>& tensor, Index at, bool is_live, float grad_factor, u32 step, const Update& update) {
    typedef typename Format::Param Param;
    typedef typename Format::Master Master;
    Lanes<WIDTH, Param> p = {};
    Lanes<WIDTH, Master> b = {};
    storage::Gradients<WIDTH, 1, Param> g = {};
    codes::Share<WIDTH, STATES, CODINGS> s = {};
    Param* const param = reinterpret_cast<Param*>(tensor.param) + at;
    Master* const master = reinterpret_cast<Master*>(tensor.master) + at;
    if (is_live) {
        if constexpr (Format::READS_PARAM) {
            p = multi_tensor::load_lanes<WIDTH>(static_cast<const Param*>(param));
        }
        s.load(tensor.state, at);
        if constexpr (Format::MASTER_LISTS > 0) {
            b = multi_tensor::load_lanes<WIDTH>(static_cast<const Master*>(master));
        }
        g.load(tensor.grad, at, 0, tensor.flags);
    }
    s.share_units();
    for (int lane = 0; lane < WIDTH; lane++) {
        float value = Format::value(p.lane[lane], b.lane[lane]);
        float own[STATES];
        s.widen(lane, own);
        update(value, g.value[0][lane] * grad_factor, own);
        Format::template keep<false>(p.lane[lane], b.lane[lane], value, 0);
        s.hold(lane, own);
    }
    s.narrow(is_live, step);
    if (is_live) {
        multi_tensor::store_lanes(param, p);
        s.store(tensor.state, at);
        if constexpr (Format::MASTER_LISTS > 0) {
            multi_tensor::store_lanes(master, b);
        }
    }
}

template <class Format, int STATES, class Update>
struct Body {
    Tensor<Format, STATES> tensor;
    Update update;
    const multi_tensor::Header& header;
    // The number of the dither.
    u32 step;

    template <int WIDTH, int IN_FLIGHT>
    __device__ __forceinline__ void visit(u32 first, u32) const {
        visit_share<WIDTH>(first, true);
    }

    template <int WIDTH>
    __device__ __forceinline__ void visit_share(u32 at, bool is_live) const {
        const float grad_factor = float(multi_tensor::grad_factor(header));
        const auto element = [&](float& p, float g, float* state) { update.element(p, g, state); };
        coded::visit<WIDTH, Update::CODINGS>(tensor, at, is_live, grad_factor, step, element);
    }
};

// What one block does: finds its chunk and updates it.
template <class Format, int STATES, class Update>
__device__ __forceinline__ void update_chunk(const unsigned char* arguments) {
    typedef typename Format::Param Param;
    typedef typename Format::Master Master;
    constexpr int LISTS = 2 + 2 * STATES + Format::MASTER_LISTS;
    typedef storage::KeyedStepScalars<typename Update::StepScalars, true> Keyed;
    typedef multi_tensor::Table<typename Update::Scalars, Keyed, LISTS> Table;
    const Table table = Table::of(arguments);
    if (multi_tensor::is_skipped(table.header())) {
        return;
    }
    const multi_tensor::Record<LISTS> record = table.record(table.record_of_chunk(blockIdx.x));
    const multi_tensor::Chunk chunk = multi_tensor::chunk_of_block(table.header(), record);
    const Keyed step_scalars = table.step_scalars(record.group);
    const u64 first = chunk.first_element;
    const u32 flags = table.header().flags;
    Body<Format, STATES, Update> body = {
        {record.address[0] + first * sizeof(Param), record.address[1] + first * storage::grad_bytes<Param>(flags), {}, 0, flags},
        {table.scalars(), step_scalars.own, flags},
        table.header(),
        u32(step_scalars.key),
    };
    constexpr u32 WIDTH = storage::Width<Format>::VALUE;
    constexpr u32 OF_WARP = codes::WARP * WIDTH;
    bool packs = body.tensor.param % (WIDTH * sizeof(Param)) == 0 && body.tensor.grad % 16 == 0;
    for (int list = 0; list < STATES; list++) {
        body.tensor.state.codes[list] = record.address[2 + list] + first;
        body.tensor.state.units[list] = record.address[2 + STATES + list] + first / codes::GROUP * sizeof(float);
        packs = packs && body.tensor.state.codes[list] % WIDTH == 0;
    }
    if constexpr (Format::MASTER_LISTS > 0) {
        body.tensor.master = record.address[LISTS - 1] + first * sizeof(Master);
        packs = packs && body.tensor.master % (WIDTH * sizeof(Master)) == 0;
    }
    const u32 done = packs ? chunk.numel / OF_WARP * OF_WARP : 0;
    multi_tensor::sweep<WIDTH, 1>(body, 0, done);
    ROLLED for (u32 first = done; first < chunk.numel; first += blockDim.x) {
        const u32 at = first + threadIdx.x;
        body.template visit_share<1>(at, at < chunk.numel);
    }
}

}  // namespace coded

// The entries of a rule with state in codes, in blocks of 256 threads, three of which share a
// multiprocessor: `STEM::run<Format>`.
#define CODED_ENTRIES(STEM, FORMAT) ENTRY(STEM##_##FORMAT, (256, 3), multi_tensor::Arguments, STEM::run<formats::FORMAT>(arguments.bytes))
