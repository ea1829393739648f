// How far an update moves parameters: sum of (new - old)^2 in f64, of every chunk.
//
//     update_sums_keep_VALUE    before the update: what parameters are, into memory of its own
//     update_sums_VALUE         behind it: the sums over what has changed
//
// VALUE says how a parameter is kept: f32, f64, f16, bf16, or bf16_r16 and bf16_r8 with a remainder
// beside it.
// One with a master is its master, an f32. Kept is the value in its compute type.
//
// The tree is that of all sums; crates/elementwise/src/norm.rs states it. A chunk is of 65,536
// elements and leaves the sums of its eight units; see update_sums.cuh. If the control block skips
// the step, nothing is kept and nothing left; a tensor that the update has skipped leaves zeros.
#include "entries.cuh"
#include "update_sums.cuh"

namespace formats {

// Whatever state is kept in.
typedef bf16_r8_s8 bf16_r8;

}  // namespace formats

namespace update_sums {

using multi_tensor::Lanes;
using multi_tensor::u32;
using multi_tensor::u64;

// crates/launch/src/pack.rs: pack_update_sums. There are no step scalars.
struct Scalars {
    // Address of the storage's sums, eight of each chunk.
    u64 sums;
};

// Words of a record: the lists that make up a value, where it is kept, the chunk of the storage
// that is the record's first, and the address of an f64 that is not 0 if the update has skipped the
// tensor, or 0.
template <class Format>
struct Words {
    enum : int { KEPT = 1 + Format::MASTER_LISTS, FIRST_SUM, SKIPPED, COUNT };
};

template <class Format>
struct Chunk {
    typedef typename Format::Param Param;
    typedef typename Format::Master Master;
    typedef typename Format::Compute Compute;
    // A pack of 16 bytes of what is kept.
    enum : u32 { WIDTH = 16 / sizeof(Compute), GROUP = LANES / WIDTH, WARP = 32 };

    const Param* param;
    const Master* master;
    Compute* kept;

    template <int COUNT>
    __device__ __forceinline__ void load_values(u32 at, Compute (&values)[COUNT]) const {
        const Lanes<COUNT, Param> p = multi_tensor::load_lanes<COUNT>(param + at);
        Lanes<COUNT, Master> m;
        if constexpr (Format::MASTER_LISTS > 0) {
            m = multi_tensor::load_lanes<COUNT>(master + at);
        }
        for (int i = 0; i < COUNT; i++) {
            values[i] = Format::value(p.lane[i], m.lane[i]);
        }
    }

    template <int COUNT, int IN_FLIGHT>
    __device__ __forceinline__ void visit(u32 first, u32 stride) const {
        Lanes<COUNT, Compute> values[IN_FLIGHT];
        for (int i = 0; i < IN_FLIGHT; i++) {
            load_values<COUNT>(first + i * stride, values[i].lane);
        }
        for (int i = 0; i < IN_FLIGHT; i++) {
            multi_tensor::store_lanes(kept + first + i * stride, values[i]);
        }
    }

    template <int COUNT>
    __device__ __forceinline__ void add_changes(u32 at, double* sums) const {
        Compute values[COUNT];
        load_values<COUNT>(at, values);
        const Lanes<COUNT, Compute> old = multi_tensor::load_lanes<COUNT>(static_cast<const Compute*>(kept) + at);
        for (int i = 0; i < COUNT; i++) {
            const double change = double(values[i]) - double(old.lane[i]);
            sums[i] = sums[i] + change * change;
        }
    }

    // The sum over one leaf, by a group of threads of one warp, of which this is `member`; each has
    // WIDTH neighbouring lanes. All threads of the warp arrive here. The result is that of member
    // 0.
    __device__ __forceinline__ double leaf_sum(u32 first, u32 numel, bool packs, u32 member) const {
        double sums[WIDTH] = {};
        const u32 at = first + member * WIDTH;
        if (packs && first + LEAF <= numel) {
            ROLLED for (u32 row = 0; row < ROWS; row++) {
                add_changes<WIDTH>(at + row * LANES, sums);
            }
        } else {
            ROLLED for (u32 row = at; row < numel && row < first + LEAF; row += LANES) {
                for (u32 i = 0; i < WIDTH; i++) {
                    if (row + i < numel) {
                        add_changes<1>(row + i, sums + i);
                    }
                }
            }
        }
        for (u32 half = GROUP / 2; half > 0; half /= 2) {
            for (u32 i = 0; i < WIDTH; i++) {
                sums[i] = sums[i] + dialect::shuffle_xor(sums[i], int(half));
            }
        }
        for (u32 half = WIDTH / 2; half > 0; half /= 2) {
            for (u32 i = 0; i < half; i++) {
                sums[i] = sums[i] + sums[i + half];
            }
        }
        return sums[0];
    }

    // The sums of the block's units, to `out`.
    __device__ __forceinline__ void sum_units(u32 numel, bool packs, double* out) const {
        SHARED(double, leaves, LEAVES);
        // Leaves with elements, as many as whole warps take.
        constexpr u32 OF_WARP = WARP / GROUP;
        const u32 filled = (numel + LEAF * OF_WARP - 1) / (LEAF * OF_WARP) * OF_WARP;
        for (u32 leaf = filled + threadIdx.x; leaf < LEAVES; leaf += blockDim.x) {
            leaves[leaf] = 0.0;
        }
        ROLLED for (u32 leaf = threadIdx.x / GROUP; leaf < filled; leaf += blockDim.x / GROUP) {
            const double sum = leaf_sum(leaf * LEAF, numel, packs, threadIdx.x % GROUP);
            if (threadIdx.x % GROUP == 0) {
                leaves[leaf] = sum;
            }
        }
        dialect::block_sync();
        if (threadIdx.x < UNITS) {
            dialect::store(out + threadIdx.x, fold_8<UNITS>(leaves + threadIdx.x));
        }
    }
};

enum class Part { keep, sum };

template <class Format, Part PART>
__device__ __forceinline__ void run(const unsigned char* arguments) {
    typedef Words<Format> W;
    typedef update_sums::Chunk<Format> Own;
    typedef multi_tensor::Table<Scalars, Scalars, W::COUNT> Table;
    const Table table = Table::of(arguments);
    if (multi_tensor::is_skipped(table.header())) {
        return;
    }
    const multi_tensor::Record<W::COUNT> record = table.record(table.record_of_chunk(blockIdx.x));
    const multi_tensor::Chunk chunk = multi_tensor::chunk_of_block(table.header(), record);
    Own own = {
        multi_tensor::chunk_start<const typename Own::Param>(record, 0, chunk),
        nullptr,
        multi_tensor::chunk_start<typename Own::Compute>(record, W::KEPT, chunk),
    };
    if constexpr (Format::MASTER_LISTS > 0) {
        own.master = multi_tensor::chunk_start<const typename Own::Master>(record, 1, chunk);
    }
    const bool packs = multi_tensor::takes_packs(own.param) && multi_tensor::takes_packs(own.master) &&
                       multi_tensor::takes_packs(own.kept);
    if constexpr (PART == Part::keep) {
        const u32 done = packs ? multi_tensor::sweep<Own::WIDTH, 2>(own, 0, chunk.numel) : 0;
        multi_tensor::sweep<1, 1>(own, done, chunk.numel);
        return;
    }
    const u64 sum = record.address[W::FIRST_SUM] + chunk.first_element / CHUNK;
    double* const out = reinterpret_cast<double*>(table.scalars().sums) + sum * UNITS;
    const double* const skipped = reinterpret_cast<const double*>(record.address[W::SKIPPED]);
    if (skipped == nullptr || dialect::load(skipped) == 0.0) {
        own.sum_units(chunk.numel, packs, out);
    } else if (threadIdx.x < UNITS) {
        dialect::store(out + threadIdx.x, 0.0);
    }
}

}  // namespace update_sums

#define SUM_ENTRIES(VALUE)                                                                         \
    TABLE_ENTRY(update_sums_keep_##VALUE, update_sums::run<formats::VALUE, update_sums::Part::keep>) \
    TABLE_ENTRY(update_sums_##VALUE, update_sums::run<formats::VALUE, update_sums::Part::sum>)

#define ALONE_update_sums_bf16_r8 ALONE
SUM_ENTRIES(f32)
SUM_ENTRIES(f64)
SUM_ENTRIES(f16)
SUM_ENTRIES(bf16)
SUM_ENTRIES(bf16_r16)
SUM_ENTRIES(bf16_r8)
