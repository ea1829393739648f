// Updates that need sums over the whole of a tensor first, many tensors in one launch.
//
// Sums of squares follow the fixed tree of docs/numerics.md: a leaf is 1,024 elements, lane j of 64
// sums elements j, j + 64, ... in order and the lanes fold by halves; a chunk is 64 leaves, folded
// alike; a tensor is its chunks, added up as tree.cuh says. All in f64.
//
// A unit, one turn of a block, is leaves s, s + 8, ..., s + 56 of a chunk: the fold by 32, 16 and 8
// leaves stays within it, so that eight blocks share a chunk. Its sums go to the chunk's row, and
// whoever updates a tensor folds and adds the rows of its chunks. Every chunk has a row of its
// own for the whole step, and one launch takes all sums before the next one updates. A single
// launch that waits for itself between waves of tensors would read a wave's second time from
// cache, but layers of the models in use are larger than a wave: docs/gpu.md counts both. Updates
// go from the last unit to the first: what the sums have read last is still in the cache.
//
// Where no tensor of a launch is longer than a leaf, blocks have the threads of one, and a block's
// turn is a chunk, of which nothing but the first leaf is there.
//
// A rule gives `Format` (of storage.cuh), `Scalars`, `StepScalars`, `Finished`, STATES, VALUES
// (parameter, gradient, state), READ (values that the sums need, the first ones), SCALED_TERMS
// (whether the sums see gradients times the control block's factor, as the update does), CODINGS
// (of the lists of state, where they are in codes) and the functions `terms`, `finish` and
// `update`. A parameter with a master is its master, in sums as in updates.
#pragma once

#include "normed_memory.cuh"
#include "coded.cuh"
#include "update_sums.cuh"

namespace normed {

using multi_tensor::Lanes;

template <class Rule, bool AT_RANDOM>
struct Engine {
    typedef typename Rule::Format Format;
    typedef typename Format::Param Param;
    typedef typename Format::Master Master;
    typedef typename Format::State State;
    typedef typename Format::Compute Compute;
    // State in codes has a list of units for each of its own, and the number of the dither behind
    // the step scalars.
    enum : int { IS_CODED = storage::IsCoded<Format>::VALUE };
    typedef storage::KeyedStepScalars<typename Rule::StepScalars, AT_RANDOM || IS_CODED> Keyed;
    enum : int {
        STATES = Rule::STATES,
        LISTS = 2 + STATES * (1 + IS_CODED) + Format::MASTER_LISTS,
        WORDS = LISTS + storage::Origin<AT_RANDOM>::WORDS,
        // State lists that the sums read; C++ has no arrays of length 0.
        SUMMED = Rule::READ - 2,
        PLACES = SUMMED > 0 ? SUMMED : 1,
        ROW_BYTES = sizeof(Param) * (1 + Format::READS_PARAM) + sizeof(State) * SUMMED + sizeof(Master) * Format::MASTER_LISTS,
    };
    typedef multi_tensor::Record<WORDS> Record;
    typedef multi_tensor::Table<typename Rule::Scalars, Keyed, WORDS> Arguments;

    Arguments table;

    __device__ __forceinline__ const Workspace& workspace() const {
        return table.scalars().workspace;
    }

    __device__ __forceinline__ u32 chunks_of(const Record& record) const {
        return u32((record.numel + CHUNK - 1) / CHUNK);
    }

    __device__ __forceinline__ u32 chunk_count() const {
        const Record last = table.record(table.header().record_count - 1);
        return last.first_chunk + chunks_of(last);
    }

    __device__ __forceinline__ double* row(u64 index) const {
        return reinterpret_cast<double*>(workspace().rows) + index * ROW_VALUES;
    }

    __device__ __forceinline__ Tensor tensor(u32 index) const {
        const Record record = table.record(index);
        const u32 head = index == 0 ? workspace().head_chunks : 0;
        const u32 tail = index + 1 == table.header().record_count ? workspace().tail_chunks : 0;
        const u32 chunks = chunks_of(record);
        return {index, chunks, u64(workspace().first_row) + record.first_chunk - head, u64(head) + chunks + tail, head == 0};
    }

    // Elements of the record before `chunk` of the launch.
    __device__ __forceinline__ u64 first_element(const Record& record, u64 chunk) const {
        return (chunk - record.first_chunk) * CHUNK;
    }

    // Whether any leaf of a unit does.
    __device__ __forceinline__ bool has_elements(const Record& record, u64 chunk, u32 unit) const {
        return first_element(record, chunk) + unit * LEAF < record.numel;
    }

    // An element as it is kept, of those lists that the sums read, but its gradient.
    struct Kept {
        Param param;
        State state[PLACES];
        float unit[PLACES];
        Master master;
    };

    template <class T>
    __device__ __forceinline__ static T* list_of(const Record& record, int list) {
        return reinterpret_cast<T*>(record.address[list]);
    }

    __device__ __forceinline__ Kept load_kept(const Record& record, u64 element) const {
        Kept kept;
        if constexpr (Format::READS_PARAM) {
            kept.param = dialect::load(list_of<const Param>(record, 0) + element);
        }
        for (int list = 0; list < SUMMED; list++) {
            kept.state[list] = dialect::load(list_of<const State>(record, 2 + list) + element);
            if constexpr (IS_CODED) {
                kept.unit[list] = dialect::load(list_of<const float>(record, 2 + STATES + list) + element / codes::GROUP);
            }
        }
        if constexpr (Format::MASTER_LISTS > 0) {
            kept.master = dialect::load(list_of<const Master>(record, LISTS - 1) + element);
        }
        return kept;
    }

    __device__ __forceinline__ void add_kept(const Kept& kept, Compute grad, const typename Rule::StepScalars& step_scalars, Compute grad_factor, double (&sums)[SUMS]) const {
        Compute element[Rule::READ];
        typedef multi_tensor::Held<Master> HeldMaster;
        element[0] = Format::value(kept.param, HeldMaster::of(kept.master));
        element[1] = grad;
        for (int list = 0; list < SUMMED; list++) {
            if constexpr (IS_CODED) {
                element[2 + list] = codes::decode(codes::coding_of(Rule::CODINGS, list), u32(kept.state[list]), 0, kept.unit[list]);
            } else {
                element[2 + list] = storage::widen(kept.state[list]);
            }
        }
        if (Rule::SCALED_TERMS) {
            element[1] = element[1] * grad_factor;
        }
        Compute terms[SUMS];
        Rule::terms(element, table.scalars(), step_scalars, terms);
        for (int sum = 0; sum < int(SUMS); sum++) {
            const double term = terms[sum];
            sums[sum] = sums[sum] + term * term;
        }
    }

    // A lane's share of a leaf that starts at `element`: 16 elements in order, up to four in
    // flight.
    __device__ __forceinline__ void lane_sums(const Record& record, u64 element, double (&sums)[SUMS]) const {
        // Four loads of four f64 lists would spill.
        constexpr int IN_FLIGHT = ROW_BYTES > 16 ? 1 : 4;
        constexpr int ROWS = LEAF / LEAF_LANES;
        const typename Rule::StepScalars step_scalars = table.step_scalars(record.group).own;
        const Compute grad_factor = Rule::SCALED_TERMS ? Compute(multi_tensor::grad_factor(table.header())) : Compute(1);
        const u64 end = element + LEAF;
        if (element + (ROWS - 1) * LEAF_LANES < record.numel) {
            ROLLED for (int first = 0; first < ROWS; first += IN_FLIGHT) {
                Kept loaded[IN_FLIGHT];
                for (int i = 0; i < IN_FLIGHT; i++) {
                    loaded[i] = load_kept(record, element + (first + i) * LEAF_LANES);
                }
                storage::Gradients<1, IN_FLIGHT, Param> grads;
                grads.load(record.address[1], element + first * LEAF_LANES, LEAF_LANES, table.header().flags);
                for (int i = 0; i < IN_FLIGHT; i++) {
                    add_kept(loaded[i], grads.value[i][0], step_scalars, grad_factor, sums);
                }
            }
        } else {
            ROLLED for (; element < record.numel && element < end; element += LEAF_LANES) {
                const Kept kept = load_kept(record, element);
                storage::Gradients<1, 1, Param> grads;
                grads.load(record.address[1], element, 0, table.header().flags);
                add_kept(kept, grads.value[0][0], step_scalars, grad_factor, sums);
            }
        }
    }

    // The sums of one unit, into its chunk's row.
    __device__ __forceinline__ void sum_unit(u64 chunk, u32 unit) const {
        double* const lanes = shared_lanes();
        double* const leaves = shared_leaves();
        const Record record = table.record(table.record_of_chunk(u32(chunk)));
        double* const out = row(workspace().first_row + chunk) + unit * SUMS;
        // Equal in all threads of the block.
        if (!has_elements(record, chunk, unit)) {
            if (threadIdx.x < SUMS) {
                dialect::store(out + threadIdx.x, 0.0);
            }
            return;
        }
        const u32 leaf = threadIdx.x / LEAF_LANES;
        const u32 lane = threadIdx.x % LEAF_LANES;
        const u64 element = first_element(record, chunk) + (unit + leaf * UNITS) * LEAF + lane;
        double sums[SUMS] = {0.0, 0.0};
        lane_sums(record, element, sums);
        for (int sum = 0; sum < int(SUMS); sum++) {
            lanes[threadIdx.x * SUMS + sum] = sums[sum];
        }
        if (is_small() && threadIdx.x < UNITS * SUMS) {
            leaves[threadIdx.x] = 0.0;
        }
        dialect::block_sync();
        // The lower half of a leaf's lanes is a whole warp.
        if (lane < LEAF_LANES / 2) {
            for (int sum = 0; sum < int(SUMS); sum++) {
                const double total = tree::fold(lanes[threadIdx.x * SUMS + sum] + lanes[(threadIdx.x + LEAF_LANES / 2) * SUMS + sum]);
                if (lane == 0) {
                    leaves[leaf * SUMS + sum] = total;
                }
            }
        }
        dialect::block_sync();
        if (threadIdx.x < SUMS) {
            dialect::store(out + threadIdx.x, update_sums::fold_8<SUMS>(leaves + threadIdx.x));
        } else if (is_small() && threadIdx.x < UNITS * SUMS) {
            dialect::store(out + threadIdx.x, 0.0);
        }
        // No barrier: the next unit writes lanes that were read before the one above, and leaves
        // behind one of its own.
    }

    // Whether blocks have a leaf each.
    __device__ __forceinline__ static bool is_small() {
        return blockDim.x == LEAF_LANES;
    }

    // Units from one turn to the next: small blocks see the first one of each chunk.
    __device__ __forceinline__ static u32 step() {
        return is_small() ? UNITS : 1;
    }

    __device__ __forceinline__ void sum_chunks() const {
        if (multi_tensor::is_skipped(table.header())) {
            return;
        }
        const u64 units = u64(chunk_count()) * UNITS;
        ROLLED for (u64 at = blockIdx.x * step(); at < units; at += gridDim.x * step()) {
            sum_unit(at / UNITS, u32(at % UNITS));
        }
    }

    // The sums over a whole tensor, the same in every thread of the block. A warp has one sum of 32
    // chunks, a thread of it that of one chunk.
    __device__ __forceinline__ void tensor_sums(const Tensor& tensor, double (&sums)[SUMS]) const {
        const u32 at_once = blockDim.x / SUMS;
        const u32 own_sum = threadIdx.x / at_once;
        const u32 own_chunk = threadIdx.x % at_once;
        const u32 warp = threadIdx.x / WARP;
        double* of_groups = shared_groups();
        double* const total = shared_total();
        // Of the first warps, each of which adds up one sum.
        tree::Groups groups = {shared_levels() + warp % SUMS * (tree::LEVELS * WARP), 0};
        ROLLED for (u64 first = 0; first < tensor.rows; first += at_once) {
            double chunk = 0.0;
            if (first + own_chunk < tensor.rows) {
                const double* const own = row(tensor.first_row + first + own_chunk) + own_sum;
                double values[UNITS];
                for (int unit = 0; unit < int(UNITS); unit++) {
                    values[unit] = dialect::load(own + unit * SUMS);
                }
                chunk = update_sums::fold_8<1>(values);
            }
            const double group = tree::fold(chunk);
            // By turns, so that the next ones are not written where these are still read.
            of_groups = shared_groups() + (of_groups == shared_groups() ? WARPS : 0);
            if (threadIdx.x % WARP == 0) {
                of_groups[warp] = group;
            }
            dialect::block_sync();
            if (warp < SUMS) {
                const u32 count = at_once / WARP;
                groups.add(count, of_groups[warp * count + threadIdx.x % count]);
            }
        }
        if (warp < SUMS) {
            const double sum = groups.total();
            if (threadIdx.x % WARP == 0) {
                total[warp] = sum;
            }
        }
        dialect::block_sync();
        for (int sum = 0; sum < int(SUMS); sum++) {
            sums[sum] = total[sum];
        }
        // No barrier: the next tensor's total is written behind one.
    }

    // What all elements of a tensor share: copies, because a store to a tensor could change what
    // lies in memory, for all that the compiler knows, and the next one would wait for a reload.
    struct Shared {
        typename Rule::Scalars scalars;
        typename Rule::Finished finished;
        storage::Draws draws;
        Compute grad_factor;
        // The number of the dither, with state in codes.
        u32 step;
    };

    __device__ __forceinline__ Shared shared(const Record& record, const typename Rule::Finished& finished) const {
        const Keyed step_scalars = table.step_scalars(record.group);
        Shared shared = {table.scalars(), finished, {0, 0}, Compute(multi_tensor::grad_factor(table.header())), 0};
        if constexpr (AT_RANDOM) {
            shared.draws = storage::draws_of<LISTS>(record, step_scalars, multi_tensor::Chunk{0, 0});
        } else if constexpr (IS_CODED) {
            shared.step = u32(step_scalars.key);
        }
        return shared;
    }

    // The groups of a warp, of which `first` is the first element: those of `WIDTH` elements a
    // thread, in packs if they are all there.
    template <u32 WIDTH>
    __device__ __forceinline__ void update_groups(const Record& record, u64 first, const Shared& shared, bool packs) const {
        coded::Tensor<Format, STATES> tensor = {record.address[0], record.address[1], {}, record.address[LISTS - 1], table.header().flags};
        for (int list = 0; list < STATES; list++) {
            tensor.state.codes[list] = record.address[2 + list];
            tensor.state.units[list] = record.address[2 + STATES + list];
        }
        const auto update = [&](float& p, float g, float* state) {
            Compute element[Rule::VALUES] = {p, g};
            for (int list = 0; list < STATES; list++) {
                element[2 + list] = state[list];
            }
            Rule::update(element, shared.scalars, shared.finished);
            p = element[0];
            for (int list = 0; list < STATES; list++) {
                state[list] = element[2 + list];
            }
        };
        const u32 lane = threadIdx.x % WARP;
        if (packs && first + WARP * WIDTH <= record.numel) {
            coded::visit<WIDTH, Rule::CODINGS>(tensor, first + lane * WIDTH, true, shared.grad_factor, shared.step, update);
            return;
        }
        const u64 end = record.numel < first + WARP * WIDTH ? record.numel : first + WARP * WIDTH;
        ROLLED for (u64 group = first; group < end; group += codes::GROUP) {
            coded::visit<1, Rule::CODINGS>(tensor, group + lane, group + lane < end, shared.grad_factor, shared.step, update);
        }
    }

    // One visit of `WIDTH` neighbouring elements in all lists.
    template <int WIDTH>
    __device__ __forceinline__ void update_lanes(const Record& record, u64 at, const Shared& shared) const {
        Lanes<WIDTH, Param> p;
        storage::Gradients<WIDTH, 1, Param> g;
        Lanes<WIDTH, State> s[STATES];
        Lanes<WIDTH, Master> b;
        if constexpr (Format::READS_PARAM) {
            p = multi_tensor::load_lanes<WIDTH>(list_of<const Param>(record, 0) + at);
        }
        for (int list = 0; list < STATES; list++) {
            s[list] = multi_tensor::load_lanes<WIDTH>(list_of<const State>(record, 2 + list) + at);
        }
        if constexpr (Format::MASTER_LISTS > 0) {
            b = multi_tensor::load_lanes<WIDTH>(list_of<const Master>(record, LISTS - 1) + at);
        }
        g.load(record.address[1], at, 0, table.header().flags);
        for (int lane = 0; lane < WIDTH; lane++) {
            Compute element[Rule::VALUES];
            element[0] = Format::value(p.lane[lane], b.lane[lane]);
            element[1] = g.value[0][lane] * shared.grad_factor;
            for (int list = 0; list < STATES; list++) {
                element[2 + list] = storage::widen(s[list].lane[lane]);
            }
            Rule::update(element, shared.scalars, shared.finished);
            // Two lists share a word of random bits.
            constexpr int DRAWN = (STATES + 2) / 2;
            u32 words[DRAWN] = {};
            if constexpr (AT_RANDOM) {
                const storage::Draws here = {shared.draws.key, shared.draws.element + at};
                for (int word = 0; word < DRAWN; word++) {
                    words[word] = here.word(lane, word);
                }
            }
            Format::template keep<AT_RANDOM>(p.lane[lane], b.lane[lane], element[0], words[0]);
            for (int list = 0; list < STATES; list++) {
                const u32 draw = words[(list + 1) / 2] >> (16 * ((list + 1) % 2));
                storage::narrow<AT_RANDOM>(s[list].lane[lane], element[2 + list], draw);
            }
        }
        multi_tensor::store_lanes(list_of<Param>(record, 0) + at, p);
        for (int list = 0; list < STATES; list++) {
            multi_tensor::store_lanes(list_of<State>(record, 2 + list) + at, s[list]);
        }
        if constexpr (Format::MASTER_LISTS > 0) {
            multi_tensor::store_lanes(list_of<Master>(record, LISTS - 1) + at, b);
        }
    }

    __device__ __forceinline__ void update_unit(const Record& record, u64 chunk, u32 unit, const typename Rule::Finished& finished) const {
        constexpr u32 WIDTH = AT_RANDOM ? 2 : storage::Width<Format>::VALUE;
        const Shared shared = this->shared(record, finished);
        bool packs = true;
        for (int list = 0; list < LISTS; list++) {
            const bool is_of_units = IS_CODED && list >= 2 + STATES && list < 2 + 2 * STATES;
            packs = packs && (is_of_units || multi_tensor::takes_packs(list_of<const unsigned char>(record, list)));
        }
        // As many elements for each thread as for a lane of a leaf.
        const u32 stride = is_small() ? LEAF_LANES * WIDTH : BLOCK_THREADS * WIDTH;
        ROLLED for (u32 i = threadIdx.x * WIDTH; i < stride * (LEAF / LEAF_LANES / WIDTH); i += stride) {
            const u64 at = first_element(record, chunk) + (unit + i / LEAF * UNITS) * LEAF + i % LEAF;
            if constexpr (IS_CODED) {
                update_groups<WIDTH>(record, at - threadIdx.x % WARP * WIDTH, shared, packs);
            } else if (packs && at + WIDTH <= record.numel) {
                update_lanes<WIDTH>(record, at, shared);
            } else {
                ROLLED for (u64 element = at; element < at + WIDTH && element < record.numel; element++) {
                    update_lanes<1>(record, element, shared);
                }
            }
        }
    }

    __device__ __forceinline__ void update_chunks() const {
        if (multi_tensor::is_skipped(table.header())) {
            return;
        }
        const u64 units = u64(chunk_count()) * UNITS;
        ROLLED for (u64 turn = (blockIdx.x + 1) * step(); turn <= units; turn += gridDim.x * step()) {
            const u64 at = units - turn;
            const u32 chunk = u32(at / UNITS);
            const u32 unit = u32(at % UNITS);
            const u32 index = table.record_of_chunk(chunk);
            const Record record = table.record(index);
            if (!has_elements(record, chunk, unit)) {
                continue;
            }
            typename Rule::Finished finished;
            const bool finite = finish(index, record, finished);
            if (finite) {
                update_unit(record, chunk, unit, finished);
            }
            if (threadIdx.x == 0 && at == u64(record.first_chunk) * UNITS && tensor(index).starts_here) {
                note_outcome(tensor(index), finite);
            }
        }
    }

    // What a tensor's sums come to, in every thread of the block; false if it is to be left as it
    // is.
    __device__ __forceinline__ bool finish(u32 index, const Record& record, typename Rule::Finished& finished) const {
        double sums[SUMS];
        tensor_sums(tensor(index), sums);
        return Rule::finish(sums, table.scalars(), table.step_scalars(record.group).own, multi_tensor::grad_factor(table.header()), finished);
    }

    // Whether the tensor was skipped in this step, and how often it has been so far.
    __device__ __forceinline__ void note_outcome(const Tensor& tensor, bool finite) const {
        double* const count = row(tensor.first_row) + UNITS * SUMS;
        if (!finite) {
            dialect::store(count, dialect::load(static_cast<const double*>(count)) + 1.0);
        }
        dialect::store(count + 1, finite ? 0.0 : 1.0);
    }
};

// Whether values are rounded at random: the format may be, and the flag says so.
template <class Rule>
__device__ __forceinline__ bool is_drawn(const unsigned char* arguments) {
    return storage::MayDraw<typename Rule::Format>::VALUE &&
           (multi_tensor::header_of(arguments).flags & storage::FLAG_STOCHASTIC) != 0;
}

template <class Rule, bool AT_RANDOM>
__device__ __forceinline__ void sums_of(const unsigned char* arguments) {
    const Engine<Rule, AT_RANDOM> own = {Engine<Rule, AT_RANDOM>::Arguments::of(arguments)};
    own.sum_chunks();
}

template <class Rule, bool AT_RANDOM>
__device__ __forceinline__ void update_of(const unsigned char* arguments) {
    const Engine<Rule, AT_RANDOM> own = {Engine<Rule, AT_RANDOM>::Arguments::of(arguments)};
    own.update_chunks();
}

// The entries of a rule.
template <class Rule>
__device__ __forceinline__ void sums(const unsigned char* arguments) {
    if (is_drawn<Rule>(arguments)) {
        sums_of<Rule, storage::MayDraw<typename Rule::Format>::VALUE != 0>(arguments);
    } else {
        sums_of<Rule, false>(arguments);
    }
}

template <class Rule>
__device__ __forceinline__ void update(const unsigned char* arguments) {
    if (is_drawn<Rule>(arguments)) {
        update_of<Rule, storage::MayDraw<typename Rule::Format>::VALUE != 0>(arguments);
    } else {
        update_of<Rule, false>(arguments);
    }
}

}  // namespace normed
