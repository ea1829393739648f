// Updates that need sums over the whole of a tensor first, many tensors in one launch.
//
// Sums of squares follow the fixed tree of docs/numerics.md: a leaf is 1,024 elements, lane j of 64 sums elements j, j + 64, ... in
// order and the lanes fold by halves; a chunk is 64 leaves, folded alike; a tensor is its chunks in order. All in f64.
//
// A unit, one turn of a block, is leaves s, s + 8, ..., s + 56 of a chunk: the fold by 32, 16 and 8 leaves stays within it, so that
// eight blocks share a chunk. Its sums go to the chunk's slot, and whoever updates a tensor folds and adds the slots of its chunks.
// Every chunk has a slot of its own for the whole step: no slot is written twice, so one wait of the grid per wave is enough.
//
// A rule gives `Storage`, `Compute`, `Scalars`, `Set`, `Finished`, LISTS (parameter, gradient, state), READ (lists that the sums
// need), SCALED_TERMS (whether the sums see gradients times the control block's factor, as the update does) and the functions
// `terms`, `finish` and `update`.
#pragma once

#include "multi_tensor.cuh"

namespace normed {

using multi_tensor::Lanes;
using multi_tensor::Record;
using multi_tensor::u32;
using multi_tensor::u64;

enum Shape : u32 {
    BLOCK_THREADS = 512,
    LEAF = 1024,
    LEAF_LANES = 64,
    CHUNK = 65536,
    UNITS = 8,
    UNIT_ELEMENTS = CHUNK / UNITS,
    SUMS = 2,
    // Sums of each unit, then how often the tensor was skipped.
    SLOT_VALUES = UNITS * SUMS + 1,
};

static_assert(BLOCK_THREADS == UNITS * LEAF_LANES, "a unit's leaves fill the block, a thread to a lane");

// First part of the scalars, written by the backend; crates/launch/src/normed.rs: Workspace.
struct Workspace {
    u64 slots;
    u32 wave_chunks;
    u32 first_slot;
    u32 head_chunks;
    u32 tail_chunks;
};

static_assert(sizeof(Workspace) == 24, "crates/launch: WORKSPACE_BYTES");

// The chunks of one record, and the slots of the whole tensor that it belongs to.
struct Tensor {
    u32 record;
    u32 chunks;
    u64 first_slot;
    u64 slots;
    bool starts_here;
};

template <class Rule>
struct Engine {
    typedef typename Rule::Storage Storage;
    typedef typename Rule::Compute Compute;
    typedef multi_tensor::Table<typename Rule::Scalars, typename Rule::Set, Rule::LISTS> Arguments;

    Arguments table;

    __device__ __forceinline__ const Workspace& workspace() const {
        return table.scalars().workspace;
    }

    __device__ __forceinline__ u32 chunks_of(const Record<Rule::LISTS>& record) const {
        return u32((record.numel + CHUNK - 1) / CHUNK);
    }

    __device__ __forceinline__ u32 chunk_count() const {
        const Record<Rule::LISTS>& last = table.record(table.header().record_count - 1);
        return last.first_chunk + chunks_of(last);
    }

    __device__ __forceinline__ double* slot(u64 index) const {
        return reinterpret_cast<double*>(workspace().slots) + index * SLOT_VALUES;
    }

    __device__ __forceinline__ Tensor tensor(u32 index) const {
        const Record<Rule::LISTS>& record = table.record(index);
        const u32 head = index == 0 ? workspace().head_chunks : 0;
        const u32 tail = index + 1 == table.header().record_count ? workspace().tail_chunks : 0;
        const u32 chunks = chunks_of(record);
        return {index, chunks, u64(workspace().first_slot) + record.first_chunk - head, u64(head) + chunks + tail, head == 0};
    }

    // Elements of the record before `chunk` of the launch.
    __device__ __forceinline__ u64 first_element(const Record<Rule::LISTS>& record, u64 chunk) const {
        return (chunk - record.first_chunk) * CHUNK;
    }

    template <int READ>
    struct Row {
        Storage list[READ];
    };

    template <int READ>
    __device__ __forceinline__ Row<READ> load_row(const Record<Rule::LISTS>& record, u64 element) const {
        Row<READ> row;
        for (int list = 0; list < READ; list++) {
            row.list[list] = dialect::load(reinterpret_cast<const Storage*>(record.address[list]) + element);
        }
        return row;
    }

    template <int READ>
    __device__ __forceinline__ void add_row(const Row<READ>& row, const typename Rule::Set& set, double (&sums)[SUMS]) const {
        Compute element[READ];
        for (int list = 0; list < READ; list++) {
            element[list] = Compute(row.list[list]);
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

    // A lane's share of a leaf that starts at `element`: 16 elements in order, up to four in flight.
    __device__ __forceinline__ void lane_sums(const Record<Rule::LISTS>& record, u64 element, double (&sums)[SUMS]) const {
        constexpr int READ = Rule::READ;
        // Four rows of four f64 lists would spill.
        constexpr int IN_FLIGHT = READ * sizeof(Storage) > 16 ? 1 : 4;
        constexpr int ROWS = LEAF / LEAF_LANES;
        const typename Rule::Set& set = table.set(record.set);
        if (element + (ROWS - 1) * LEAF_LANES < record.numel) {
            for (int first = 0; first < ROWS; first += IN_FLIGHT) {
                Row<READ> rows[IN_FLIGHT];
                for (int i = 0; i < IN_FLIGHT; i++) {
                    rows[i] = load_row<READ>(record, element + (first + i) * LEAF_LANES);
                }
                for (int i = 0; i < IN_FLIGHT; i++) {
                    add_row<READ>(rows[i], set, sums);
                }
            }
        } else {
            for (int row = 0; row < ROWS; row++, element += LEAF_LANES) {
                if (element < record.numel) {
                    add_row<READ>(load_row<READ>(record, element), set, sums);
                }
            }
        }
    }

    // The sums of one unit, into its chunk's slot.
    __device__ __forceinline__ void sum_unit(u64 chunk, u32 unit) const {
        SHARED(double, lanes, BLOCK_THREADS * SUMS);
        SHARED(double, leaves, UNITS * SUMS);
        const Record<Rule::LISTS>& record = table.record(table.record_of_chunk(u32(chunk)));
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
                double total = lanes[threadIdx.x * SUMS + sum] + lanes[(threadIdx.x + LEAF_LANES / 2) * SUMS + sum];
                for (int half = 16; half > 0; half /= 2) {
                    total = total + dialect::shuffle_xor(total, half);
                }
                if (lane == 0) {
                    leaves[leaf * SUMS + sum] = total;
                }
            }
        }
        dialect::block_sync();
        if (threadIdx.x < SUMS) {
            double* const out = slot(workspace().first_slot + chunk) + unit * SUMS;
            dialect::store(out + threadIdx.x, fold_8<SUMS>(leaves + threadIdx.x));
        }
        // `lanes` and `leaves` are written again by the next unit.
        dialect::block_sync();
    }

    // Eight values, `STRIDE` apart, by halves.
    template <int STRIDE>
    __device__ __forceinline__ static double fold_8(const double* values) {
        double half[4], quarter[2];
        for (int i = 0; i < 4; i++) {
            half[i] = values[i * STRIDE] + values[(i + 4) * STRIDE];
        }
        for (int i = 0; i < 2; i++) {
            quarter[i] = half[i] + half[i + 2];
        }
        return quarter[0] + quarter[1];
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
        // A thread folds one sum of one chunk: as many chunks at a time as the block has threads for.
        constexpr u32 AT_ONCE = BLOCK_THREADS / SUMS;
        SHARED(double, of_chunks, BLOCK_THREADS);
        SHARED(double, total, SUMS);
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
                of_chunks[threadIdx.x] = fold_8<1>(values);
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
    template <int WIDTH>
    __device__ __forceinline__ void update_lanes(const Record<Rule::LISTS>& record, u64 at, const typename Rule::Finished& finished) const {
        const Compute grad_factor = Compute(multi_tensor::grad_factor(table.header()));
        Lanes<WIDTH, Storage> values[Rule::LISTS];
        for (int list = 0; list < Rule::LISTS; list++) {
            values[list] = multi_tensor::load_lanes<WIDTH>(reinterpret_cast<const Storage*>(record.address[list]) + at);
        }
        for (int lane = 0; lane < WIDTH; lane++) {
            Compute element[Rule::LISTS];
            for (int list = 0; list < Rule::LISTS; list++) {
                element[list] = Compute(values[list].lane[lane]);
            }
            element[1] = element[1] * grad_factor;
            Rule::update(element, table.scalars(), finished);
            for (int list = 0; list < Rule::LISTS; list++) {
                values[list].lane[lane] = Storage(element[list]);
            }
        }
        for (int list = 0; list < Rule::LISTS; list++) {
            // The gradient, list 1, is only read.
            if (list != 1) {
                multi_tensor::store_lanes(reinterpret_cast<Storage*>(record.address[list]) + at, values[list]);
            }
        }
    }

    __device__ __forceinline__ void update_unit(const Record<Rule::LISTS>& record, u64 chunk, u32 unit,
                                                const typename Rule::Finished& finished) const {
        constexpr u32 WIDTH = 16 / sizeof(Storage);
        bool packs = true;
        for (int list = 0; list < Rule::LISTS; list++) {
            packs = packs && multi_tensor::takes_packs(reinterpret_cast<const Storage*>(record.address[list]));
        }
        for (u32 i = threadIdx.x * WIDTH; i < UNIT_ELEMENTS; i += BLOCK_THREADS * WIDTH) {
            const u64 at = first_element(record, chunk) + (unit + i / LEAF * UNITS) * LEAF + i % LEAF;
            if (packs && at + WIDTH <= record.numel) {
                update_lanes<WIDTH>(record, at, finished);
            } else {
                for (u64 element = at; element < at + WIDTH && element < record.numel; element++) {
                    update_lanes<1>(record, element, finished);
                }
            }
        }
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
            const Record<Rule::LISTS>& record = table.record(index);
            // The same for all threads of the block, so all of them take part in the sums or none.
            if (index != known) {
                const Tensor whole = tensor(index);
                double sums[SUMS];
                tensor_sums(whole, sums);
                finite = Rule::finish(sums, table.scalars(), table.set(record.set), multi_tensor::grad_factor(table.header()), finished);
                known = index;
            }
            if (finite) {
                update_unit(record, chunk, u32(at % UNITS), finished);
            } else if (threadIdx.x == 0 && at == u64(record.first_chunk) * UNITS && tensor(index).starts_here) {
                double* const skipped = slot(tensor(index).first_slot) + UNITS * SUMS;
                dialect::store(skipped, dialect::load(skipped) + 1.0);
            }
        }
    }

#ifdef GRID_SYNC
    // Waves of whole tensors: sums, one wait of the grid, update from cache.
    __device__ __forceinline__ void waves() const {
        // The same for all blocks, so all of them wait for the grid or none.
        if (multi_tensor::is_skipped(table.header())) {
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
#endif
};

template <class Rule>
__device__ __forceinline__ Engine<Rule> engine(const unsigned char* arguments) {
    return {{arguments}};
}

}  // namespace normed
