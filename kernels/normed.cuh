// Updates that need sums over the whole of a tensor first, many tensors in one launch.
//
// Sums of squares follow the fixed tree of docs/numerics.md: a leaf is 1,024 elements, lane j of 64
// sums elements j, j + 64, ... in order and the lanes fold by halves; a chunk is 64 leaves, folded
// alike; a tensor is its chunks in order. All in f64.
//
// A unit, one turn of a block, is leaves s, s + 8, ..., s + 56 of a chunk: the fold by 32, 16 and 8
// leaves stays within it, so that eight blocks share a chunk. Its sums go to the chunk's slot, and
// whoever updates a tensor folds and adds the slots of its chunks. Every chunk has a slot of its
// own for the whole step: no slot is written twice, so one wait of the grid per wave is enough.
//
// A rule gives `Format` (of storage.cuh), `Scalars`, `Set`, `Finished`, STATES, VALUES (parameter,
// gradient, state), READ (values that the sums need, the first ones), SCALED_TERMS (whether the
// sums see gradients times the control block's factor, as the update does) and the functions
// `terms`, `finish` and `update`. A parameter with a master is its master, in sums as in updates.
#pragma once

#include "normed_memory.cuh"
#include "entries.cuh"
#include "update_sums.cuh"

namespace normed {

using multi_tensor::Lanes;

template <class Rule, bool AT_RANDOM, class Source>
struct Engine {
    typedef typename Rule::Format Format;
    typedef typename Format::Param Param;
    typedef typename Format::Master Master;
    typedef typename Format::State State;
    typedef typename Format::Compute Compute;
    typedef storage::SetOf<typename Rule::Set, AT_RANDOM> KeyedSet;
    enum : int {
        STATES = Rule::STATES,
        LISTS = 2 + STATES + Format::MASTER_LISTS,
        WORDS = LISTS + storage::Origin<AT_RANDOM>::WORDS,
        // State lists that the sums read; C++ has no arrays of length 0.
        SUMMED = Rule::READ - 2,
        PLACES = SUMMED > 0 ? SUMMED : 1,
        IS_MEASURED = multi_tensor::Place<Source>::IS_MEASURED,
        ROW_BYTES = sizeof(Param) * (1 + Format::READS_PARAM) + sizeof(State) * SUMMED + sizeof(Master) * Format::MASTER_LISTS,
    };
    typedef multi_tensor::Record<WORDS> Row;
    typedef multi_tensor::Table<typename Rule::Scalars, KeyedSet, WORDS, Source> Arguments;

    Arguments table;

    __device__ __forceinline__ const Workspace& workspace() const {
        return table.scalars().workspace;
    }

    __device__ __forceinline__ u32 chunks_of(const Row& record) const {
        return u32((record.numel + CHUNK - 1) / CHUNK);
    }

    __device__ __forceinline__ u32 chunk_count() const {
        const Row& last = table.record(table.header().record_count - 1);
        return last.first_chunk + chunks_of(last);
    }

    __device__ __forceinline__ double* slot(u64 index) const {
        return reinterpret_cast<double*>(workspace().slots) + index * SLOT_VALUES;
    }

    __device__ __forceinline__ Tensor tensor(u32 index) const {
        const Row& record = table.record(index);
        const u32 head = index == 0 ? workspace().head_chunks : 0;
        const u32 tail = index + 1 == table.header().record_count ? workspace().tail_chunks : 0;
        const u32 chunks = chunks_of(record);
        return {index, chunks, u64(workspace().first_slot) + record.first_chunk - head, u64(head) + chunks + tail, head == 0};
    }

    // Elements of the record before `chunk` of the launch.
    __device__ __forceinline__ u64 first_element(const Row& record, u64 chunk) const {
        return (chunk - record.first_chunk) * CHUNK;
    }

    // An element as it is kept, of those lists that the sums read.
    struct Kept {
        Param param;
        Param grad;
        State state[PLACES];
        Master master;
    };

    template <class T>
    __device__ __forceinline__ static T* list_of(const Row& record, int list) {
        return reinterpret_cast<T*>(record.address[list]);
    }

    __device__ __forceinline__ Kept load_kept(const Row& record, u64 element) const {
        Kept kept;
        if constexpr (Format::READS_PARAM) {
            kept.param = dialect::load(list_of<const Param>(record, 0) + element);
        }
        kept.grad = dialect::load(list_of<const Param>(record, 1) + element);
        for (int list = 0; list < SUMMED; list++) {
            kept.state[list] = dialect::load(list_of<const State>(record, 2 + list) + element);
        }
        if constexpr (Format::MASTER_LISTS > 0) {
            kept.master = dialect::load(list_of<const Master>(record, LISTS - 1) + element);
        }
        return kept;
    }

    __device__ __forceinline__ void add_kept(const Kept& kept, const typename Rule::Set& set, double (&sums)[SUMS]) const {
        Compute element[Rule::READ];
        element[0] = Format::value(kept.param, kept.master);
        element[1] = storage::widen(kept.grad);
        for (int list = 0; list < SUMMED; list++) {
            element[2 + list] = storage::widen(kept.state[list]);
        }
        if (Rule::SCALED_TERMS) {
            element[1] = element[1] * Compute(multi_tensor::grad_factor(table.header()));
        }
        Compute terms[SUMS];
        Rule::terms(element, table.scalars(), set, terms);
        for (int sum = 0; sum < int(SUMS); sum++) {
            const double term = terms[sum];
            sums[sum] = sums[sum] + term * term;
        }
    }

    // A lane's share of a leaf that starts at `element`: 16 elements in order, up to four in
    // flight.
    __device__ __forceinline__ void lane_sums(const Row& record, u64 element, double (&sums)[SUMS]) const {
        // Four rows of four f64 lists would spill.
        constexpr int IN_FLIGHT = ROW_BYTES > 16 ? 1 : 4;
        constexpr int ROWS = LEAF / LEAF_LANES;
        const typename Rule::Set& set = table.set(record.set).own;
        if (element + (ROWS - 1) * LEAF_LANES < record.numel) {
            for (int first = 0; first < ROWS; first += IN_FLIGHT) {
                Kept rows[IN_FLIGHT];
                for (int i = 0; i < IN_FLIGHT; i++) {
                    rows[i] = load_kept(record, element + (first + i) * LEAF_LANES);
                }
                for (int i = 0; i < IN_FLIGHT; i++) {
                    add_kept(rows[i], set, sums);
                }
            }
        } else {
            for (int row = 0; row < ROWS; row++, element += LEAF_LANES) {
                if (element < record.numel) {
                    add_kept(load_kept(record, element), set, sums);
                }
            }
        }
    }

    // The sums of one unit, into its chunk's slot.
    __device__ __forceinline__ void sum_unit(u64 chunk, u32 unit) const {
        double* const lanes = shared_lanes();
        double* const leaves = shared_leaves();
        const Row& record = table.record(table.record_of_chunk(u32(chunk)));
        const u32 leaf = threadIdx.x / LEAF_LANES;
        const u32 lane = threadIdx.x % LEAF_LANES;
        const u64 element = first_element(record, chunk) + (unit + leaf * UNITS) * LEAF + lane;
        double sums[SUMS] = {0.0, 0.0};
        lane_sums(record, element, sums);
        for (int sum = 0; sum < int(SUMS); sum++) {
            lanes[threadIdx.x * SUMS + sum] = sums[sum];
        }
        dialect::block_sync();
        // The lower half of a leaf's lanes is a whole warp.
        if (lane < LEAF_LANES / 2) {
            for (int sum = 0; sum < int(SUMS); sum++) {
                const double total = fold_warp(lanes[threadIdx.x * SUMS + sum] + lanes[(threadIdx.x + LEAF_LANES / 2) * SUMS + sum]);
                if (lane == 0) {
                    leaves[leaf * SUMS + sum] = total;
                }
            }
        }
        dialect::block_sync();
        if (threadIdx.x < SUMS) {
            double* const out = slot(workspace().first_slot + chunk) + unit * SUMS;
            dialect::store(out + threadIdx.x, update_sums::fold_8<SUMS>(leaves + threadIdx.x));
        }
        // `lanes` and `leaves` are written again by the next unit.
        dialect::block_sync();
    }

    __device__ __forceinline__ void sum_chunks(u64 first, u64 end) const {
        if (multi_tensor::is_skipped(table.header())) {
            return;
        }
        for (u64 at = first * UNITS + blockIdx.x; at < end * UNITS; at += gridDim.x) {
            sum_unit(at / UNITS, u32(at % UNITS));
        }
    }

    // The sums over a whole tensor, the same in every thread of the block.
    __device__ __forceinline__ void tensor_sums(const Tensor& tensor, double (&sums)[SUMS]) const {
        // A thread folds one sum of one chunk: as many chunks at a time as the block has threads
        // for.
        constexpr u32 AT_ONCE = BLOCK_THREADS / SUMS;
        double* const of_chunks = shared_chunks();
        double* const total = shared_total();
        double running = 0.0;
        for (u64 first = 0; first < tensor.slots; first += AT_ONCE) {
            const u64 left = tensor.slots - first;
            const u32 count = left < AT_ONCE ? u32(left) : AT_ONCE;
            if (threadIdx.x < count * SUMS) {
                const double* const own = slot(tensor.first_slot + first + threadIdx.x / SUMS) + threadIdx.x % SUMS;
                double values[UNITS];
                for (int unit = 0; unit < int(UNITS); unit++) {
                    values[unit] = dialect::load(own + unit * SUMS);
                }
                of_chunks[threadIdx.x] = update_sums::fold_8<1>(values);
            }
            dialect::block_sync();
            if (threadIdx.x < SUMS) {
                for (u32 chunk = 0; chunk < count; chunk++) {
                    running = running + of_chunks[chunk * SUMS + threadIdx.x];
                }
                total[threadIdx.x] = running;
            }
            dialect::block_sync();
        }
        for (int sum = 0; sum < int(SUMS); sum++) {
            sums[sum] = total[sum];
        }
        // `total` is written again for the next tensor.
        dialect::block_sync();
    }

    // One visit of `WIDTH` neighbouring elements in all lists.
    template <int WIDTH, class Changes>
    __device__ __forceinline__ void update_lanes(const Row& record, u64 at, const typename Rule::Finished& finished,
                                                 const storage::Draws& draws, Changes& changes) const {
        const Compute grad_factor = Compute(multi_tensor::grad_factor(table.header()));
        Lanes<WIDTH, Param> p, g;
        Lanes<WIDTH, State> s[STATES];
        Lanes<WIDTH, Master> b;
        if constexpr (Format::READS_PARAM) {
            p = multi_tensor::load_lanes<WIDTH>(list_of<const Param>(record, 0) + at);
        }
        g = multi_tensor::load_lanes<WIDTH>(list_of<const Param>(record, 1) + at);
        for (int list = 0; list < STATES; list++) {
            s[list] = multi_tensor::load_lanes<WIDTH>(list_of<const State>(record, 2 + list) + at);
        }
        if constexpr (Format::MASTER_LISTS > 0) {
            b = multi_tensor::load_lanes<WIDTH>(list_of<const Master>(record, LISTS - 1) + at);
        }
        for (int lane = 0; lane < WIDTH; lane++) {
            const Compute before = Format::value(p.lane[lane], b.lane[lane]);
            Compute element[Rule::VALUES];
            element[0] = before;
            element[1] = storage::widen(g.lane[lane]) * grad_factor;
            for (int list = 0; list < STATES; list++) {
                element[2 + list] = storage::widen(s[list].lane[lane]);
            }
            Rule::update(element, table.scalars(), finished);
            // Two lists share a word of random bits.
            constexpr int DRAWN = (STATES + 2) / 2;
            u32 words[DRAWN] = {};
            if constexpr (AT_RANDOM) {
                const storage::Draws here = {draws.key, draws.element + at};
                for (int word = 0; word < DRAWN; word++) {
                    words[word] = here.word(lane, word);
                }
            }
            Format::template keep<AT_RANDOM>(p.lane[lane], b.lane[lane], element[0], words[0]);
            changes.add(lane, before, Format::value(p.lane[lane], b.lane[lane]));
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

    __device__ __forceinline__ void update_unit(const Row& record, u64 chunk, u32 unit, const typename Rule::Finished& finished) const {
        constexpr u32 WIDTH = AT_RANDOM ? 2 : storage::Width<Format>::VALUE;
        const storage::Draws draws = storage::draws_of<LISTS>(record, table.set(record.set), multi_tensor::Chunk{0, 0});
        update_sums::Ignored ignored;
        bool packs = true;
        for (int list = 0; list < LISTS; list++) {
            packs = packs && multi_tensor::takes_packs(list_of<const unsigned char>(record, list));
        }
        for (u32 i = threadIdx.x * WIDTH; i < UNIT_ELEMENTS; i += BLOCK_THREADS * WIDTH) {
            const u64 at = first_element(record, chunk) + (unit + i / LEAF * UNITS) * LEAF + i % LEAF;
            if (packs && at + WIDTH <= record.numel) {
                update_lanes<WIDTH>(record, at, finished, draws, ignored);
            } else {
                for (u64 element = at; element < at + WIDTH && element < record.numel; element++) {
                    update_lanes<1>(record, element, finished, draws, ignored);
                }
            }
        }
    }

    // As above, with a thread to a lane of a leaf; the sum over what the unit changes goes to
    // `out`.
    __device__ __forceinline__ void update_unit_summed(const Row& record, u64 chunk, u32 unit, const typename Rule::Finished& finished,
                                                       double* out) const {
        double* const lanes = shared_lanes();
        double* const leaves = shared_leaves();
        const storage::Draws draws = storage::draws_of<LISTS>(record, table.set(record.set), multi_tensor::Chunk{0, 0});
        const u32 leaf = threadIdx.x / LEAF_LANES;
        const u32 lane = threadIdx.x % LEAF_LANES;
        const u64 first = first_element(record, chunk) + (unit + leaf * UNITS) * LEAF + lane;
        update_sums::Squares<1> squares = {};
        ROLLED for (u32 row = 0; row < LEAF / LEAF_LANES; row++) {
            const u64 element = first + row * LEAF_LANES;
            if (element < record.numel) {
                update_lanes<1>(record, element, finished, draws, squares);
            }
        }
        lanes[threadIdx.x] = squares.sums[0];
        dialect::block_sync();
        if (lane < LEAF_LANES / 2) {
            const double total = fold_warp(lanes[threadIdx.x] + lanes[threadIdx.x + LEAF_LANES / 2]);
            if (lane == 0) {
                leaves[leaf] = total;
            }
        }
        dialect::block_sync();
        if (threadIdx.x == 0) {
            dialect::store(out, update_sums::fold_8<1>(leaves));
        }
        // `lanes` and `leaves` are written again by the next unit.
        dialect::block_sync();
    }

    // The values of a warp, by halves.
    __device__ __forceinline__ static double fold_warp(double value) {
        for (int half = 16; half > 0; half /= 2) {
            value = value + dialect::shuffle_xor(value, half);
        }
        return value;
    }

    // Where the sum over what a unit changes goes.
    __device__ __forceinline__ double* update_sum(u32 index, u64 chunk, u32 unit) const {
        return table.update_sums(index) + (chunk - table.record(index).first_chunk) * UNITS + unit;
    }

    __device__ __forceinline__ void update_chunks(u64 first, u64 end) const {
        if (multi_tensor::is_skipped(table.header())) {
            return;
        }
        u32 known = u32(-1);
        bool finite = false;
        typename Rule::Finished finished;
        for (u64 at = first * UNITS + blockIdx.x; at < end * UNITS; at += gridDim.x) {
            const u64 chunk = at / UNITS;
            const u32 index = table.record_of_chunk(u32(chunk));
            const Row& record = table.record(index);
            // Equal in all threads of the block, so all of them take part in the sums or none.
            if (index != known) {
                const Tensor whole = tensor(index);
                double sums[SUMS];
                tensor_sums(whole, sums);
                finite = Rule::finish(sums, table.scalars(), table.set(record.set).own, multi_tensor::grad_factor(table.header()), finished);
                known = index;
            }
            if (finite) {
                if constexpr (IS_MEASURED) {
                    update_unit_summed(record, chunk, u32(at % UNITS), finished, update_sum(index, chunk, u32(at % UNITS)));
                } else {
                    update_unit(record, chunk, u32(at % UNITS), finished);
                }
            } else if (threadIdx.x == 0 && at == u64(record.first_chunk) * UNITS && tensor(index).starts_here) {
                double* const skipped = slot(tensor(index).first_slot) + UNITS * SUMS;
                dialect::store(skipped, dialect::load(skipped) + 1.0);
            }
            if constexpr (IS_MEASURED) {
                if (!finite && threadIdx.x == 0) {
                    dialect::store(update_sum(index, chunk, u32(at % UNITS)), 0.0);
                }
            }
        }
    }

#ifdef GRID_SYNC
    // Waves of whole tensors: sums, one wait of the grid, update from cache.
    __device__ __forceinline__ void waves() const {
        // Equal in all blocks, so all of them wait for the grid or none.
        if (multi_tensor::is_skipped(table.header())) {
            return;
        }
        if constexpr (multi_tensor::Place<Source>::IS_RESIDENT) {
            planned_waves();
            return;
        }
        const u32 records = table.header().record_count;
        for (u32 first = 0, end = 0; first < records; first = end) {
            const u32 first_chunk = table.record(first).first_chunk;
            u32 end_chunk = first_chunk;
            do {
                end_chunk = table.record(end).first_chunk + chunks_of(table.record(end));
                end++;
            } while (end < records && end_chunk - first_chunk + chunks_of(table.record(end)) <= workspace().wave_chunks);
            sum_chunks(first_chunk, end_chunk);
            dialect::grid_sync();
            update_chunks(first_chunk, end_chunk);
        }
    }

    // The waves of a resident table: behind the map of all chunks, how many, and the chunk at which
    // each ends.
    __device__ __forceinline__ void planned_waves() const {
        const u64 waves_at = chunk_count();
        const u32 waves = table.behind_records(waves_at);
        u32 first_chunk = 0;
        for (u32 wave = 0; wave < waves; wave++) {
            const u32 end_chunk = table.behind_records(waves_at + 1 + wave);
            sum_chunks(first_chunk, end_chunk);
            dialect::grid_sync();
            update_chunks(first_chunk, end_chunk);
            first_chunk = end_chunk;
        }
    }
#endif
};

template <class Rule, bool AT_RANDOM, class Source>
__device__ __forceinline__ Engine<Rule, AT_RANDOM, Source> engine(Source arguments) {
    Engine<Rule, AT_RANDOM, Source> engine;
    engine.table = {arguments};
    return engine;
}

// Whether values are rounded at random: the format may be, and the flag says so.
template <class Rule, class Source>
__device__ __forceinline__ bool is_drawn(Source arguments) {
    return storage::MayDraw<typename Rule::Format>::VALUE &&
           (multi_tensor::flags_of(arguments) & storage::FLAG_STOCHASTIC) != 0;
}

template <class Rule, bool AT_RANDOM, class Source>
__device__ __forceinline__ void sums_of(Source arguments) {
    const Engine<Rule, AT_RANDOM, Source> own = engine<Rule, AT_RANDOM>(arguments);
    own.sum_chunks(0, own.chunk_count());
}

template <class Rule, bool AT_RANDOM, class Source>
__device__ __forceinline__ void update_of(Source arguments) {
    const Engine<Rule, AT_RANDOM, Source> own = engine<Rule, AT_RANDOM>(arguments);
    own.update_chunks(0, own.chunk_count());
}

// The entries of a rule.
template <class Rule, class Source>
__device__ __forceinline__ void sums(Source arguments) {
    if (is_drawn<Rule>(arguments)) {
        sums_of<Rule, storage::MayDraw<typename Rule::Format>::VALUE != 0>(arguments);
    } else {
        sums_of<Rule, false>(arguments);
    }
}

template <class Rule, class Source>
__device__ __forceinline__ void update(Source arguments) {
    if (is_drawn<Rule>(arguments)) {
        update_of<Rule, storage::MayDraw<typename Rule::Format>::VALUE != 0>(arguments);
    } else {
        update_of<Rule, false>(arguments);
    }
}

#ifdef GRID_SYNC
template <class Rule, class Source>
__device__ __forceinline__ void waves(Source arguments) {
    if (is_drawn<Rule>(arguments)) {
        engine<Rule, storage::MayDraw<typename Rule::Format>::VALUE != 0>(arguments).waves();
    } else {
        engine<Rule, false>(arguments).waves();
    }
}
#endif

}  // namespace normed
