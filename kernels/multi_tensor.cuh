// The argument table of multi-tensor kernels: many tensors in one launch, without a table of
// blocks.
//
//     header (24) | scalars | step scalars of group 0, group 1, ... | record 0, record 1, ...
//
// Written by `pack` of crates/launch, little-endian; a record is one tensor's address in every list
// and its place in the launch. One block works on one chunk. A block finds its record by binary
// search in the records' `first_chunk`, the prefix sum of chunk counts, so that the table holds
// bytes per tensor only, however long the tensors are.
//
// A resident table is the same bytes in global memory, built once, with a map from chunks to
// records behind the records: u32 for each chunk, for one load in place of the search. A launch
// from it has header and scalars in its arguments as any other; FLAG_RESIDENT is set, and the
// table's address stands where the step scalars would begin. `resident.cuh` derives them.
#pragma once

#include "dialect.cuh"

namespace multi_tensor {

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8, "the table is made of 16-, 32- and 64-bit integers");

// Constants are enumerators throughout: a constant with an address would become a global variable
// of the module.
enum ArgumentBytes : int {
    // What devices of compute capability 7.0 take from driver 530 on; older drivers do not read
    // this PTX at all.
    LIMIT = 32764,
    // All parts of the table are multiples of 8, and 32764 is not.
    BYTES = LIMIT / 8 * 8,
};

// The only parameter of an entry: a table, or where one lies.
struct alignas(8) Arguments {
    unsigned char bytes[BYTES];
};

static_assert(sizeof(Arguments) == 32760, "crates/kernels: TABLE_BYTES");

// The only parameter of an entry that derives the step scalars of a resident table;
// crates/launch/src/resident.rs.
struct Resident {
    // Address of the table.
    u64 table;
    // Address of what its step scalars are derived from.
    u64 steps;
};

static_assert(sizeof(Resident) == 16, "crates/kernels: SETS_BYTES");

// crates/launch/src/resident.rs: FLAG_RESIDENT.
enum Flag : u32 { FLAG_RESIDENT = 1u << 30 };

struct Header {
    u32 record_count;
    u32 group_count;
    u32 chunk_elements;
    u32 flags;
    // Address of the step's control block; 0 for none.
    u64 control;
};

static_assert(sizeof(Header) == 24, "crates/launch: HEADER_BYTES");

// What a step has decided before its updates; crates/launch/src/control.rs: ControlBlock.
struct Control {
    double grad_factor;
    double grad_norm;
    double loss_scale;
    u64 non_finite;
    u32 found;
    u32 good_steps;
    u32 bad_steps;
    u32 reserved;
    u64 applied;
    u64 skipped;
};

static_assert(sizeof(Control) == 64, "crates/launch: CONTROL_BYTES");

__device__ __forceinline__ const Control* control(const Header& header) {
    return reinterpret_cast<const Control*>(header.control);
}

// Whether the step is skipped: an update then writes nothing.
__device__ __forceinline__ bool is_skipped(const Header& header) {
    return header.control != 0 && dialect::load(&control(header)->found) != 0;
}

// The factor on every gradient, to be rounded once to the type of the update.
__device__ __forceinline__ double grad_factor(const Header& header) {
    return header.control != 0 ? dialect::load(&control(header)->grad_factor) : 1.0;
}

template <int LISTS>
struct Record {
    u64 address[LISTS];
    u64 numel;
    u32 first_chunk;
    u16 group;
    u16 reserved;
};

static_assert(sizeof(Record<1>) == 24 && sizeof(Record<4>) == 48 && sizeof(Record<5>) == 56, "crates/launch: record_bytes");

__device__ __forceinline__ const Header& header_of(const unsigned char* arguments) {
    return *reinterpret_cast<const Header*>(arguments);
}

// The table seen through the kernel's own scalars, shared and of the step.
template <class Scalars, class StepScalars, int LISTS>
struct Table {
    static_assert(sizeof(StepScalars) % 8 == 0 && alignof(Scalars) <= 8 && alignof(StepScalars) <= 8, "parts keep what follows aligned to 8 bytes");

    // Those of the launch.
    const unsigned char* arguments;
    // Where step scalars and records are: there, or in global memory.
    const unsigned char* bytes;

    enum : u32 { STEP_SCALARS_AT = sizeof(Header) + (sizeof(Scalars) + 7) / 8 * 8 };

    __device__ __forceinline__ static Table of(const unsigned char* arguments) {
        const u64 elsewhere = *reinterpret_cast<const u64*>(arguments + STEP_SCALARS_AT);
        const bool is_resident = (header_of(arguments).flags & FLAG_RESIDENT) != 0;
        return {arguments, is_resident ? reinterpret_cast<const unsigned char*>(elsewhere) : arguments};
    }

    __device__ __forceinline__ const Header& header() const {
        return header_of(arguments);
    }

    __device__ __forceinline__ bool is_resident() const {
        return (header().flags & FLAG_RESIDENT) != 0;
    }

    __device__ __forceinline__ const Scalars& scalars() const {
        return *reinterpret_cast<const Scalars*>(arguments + sizeof(Header));
    }

    // A copy, as are all parts that may lie in global memory: a store to a tensor could change
    // what lies there, for all that the compiler knows.
    template <class T>
    __device__ __forceinline__ T part(u64 at) const {
        return dialect::load_table(reinterpret_cast<const T*>(bytes + at), is_resident());
    }

    __device__ __forceinline__ StepScalars step_scalars(u32 index) const {
        return part<StepScalars>(STEP_SCALARS_AT + index * sizeof(StepScalars));
    }

    __device__ __forceinline__ u64 record_at(u32 index) const {
        return STEP_SCALARS_AT + header().group_count * sizeof(StepScalars) + index * u64(sizeof(Record<LISTS>));
    }

    __device__ __forceinline__ Record<LISTS> record(u32 index) const {
        return part<Record<LISTS>>(record_at(index));
    }

    __device__ __forceinline__ u32 first_chunk(u32 index) const {
        return part<u32>(record_at(index) + (LISTS + 1) * sizeof(u64));
    }

    // The last record that starts at or before `chunk`.
    __device__ __forceinline__ u32 record_of_chunk(u32 chunk) const {
        if (is_resident()) {
            return part<u32>(record_at(header().record_count) + chunk * u64(sizeof(u32)));
        }
        u32 low = 0;
        u32 high = header().record_count;
        while (high - low > 1) {
            const u32 middle = low + (high - low) / 2;
            if (first_chunk(middle) <= chunk) {
                low = middle;
            } else {
                high = middle;
            }
        }
        return low;
    }
};

// One block's work: `numel` consecutive elements of one tensor, from `first_element` on.
struct Chunk {
    u64 first_element;
    u32 numel;
};

// A block behind the last chunk gets no elements.
template <int LISTS>
__device__ __forceinline__ Chunk chunk_of_block(const Header& header, const Record<LISTS>& record) {
    const u64 first_element = u64(blockIdx.x - record.first_chunk) * header.chunk_elements;
    const u64 left = first_element < record.numel ? record.numel - first_element : 0;
    return {first_element, left < header.chunk_elements ? u32(left) : header.chunk_elements};
}

// The place in a list of `T` where `chunk` starts.
template <class T, int LISTS>
__device__ __forceinline__ T* chunk_start(const Record<LISTS>& record, int list, const Chunk& chunk) {
    return reinterpret_cast<T*>(record.address[list] + chunk.first_element * sizeof(T));
}

template <class T>
__device__ __forceinline__ bool takes_packs(const T* address) {
    return reinterpret_cast<u64>(address) % 16 == 0;
}

// How a thread keeps an element of `T`: as it lies in memory, unless `storage.cuh` knows better.
// Elements of 16 bits come and go in pairs, the first in the lower half of a word, those of 8 bits,
// which all have their own, four in a word.
template <class T>
struct Held {
    typedef T Type;

    __device__ __forceinline__ static T of(T element) { return element; }
    __device__ __forceinline__ static T element(T held) { return held; }
    __device__ __forceinline__ static T lower(u32 pair) { return T{u16(pair)}; }
    __device__ __forceinline__ static T upper(u32 pair) { return T{u16(pair >> 16)}; }
    __device__ __forceinline__ static u32 pair(T lower, T upper) { return u32(lower.bits) | u32(upper.bits) << 16; }
};

// `WIDTH` consecutive elements: one, or a whole number of packs.
template <int WIDTH, class T>
struct Lanes {
    typename Held<T>::Type lane[WIDTH];
};

template <int WIDTH, class T>
__device__ __forceinline__ Lanes<WIDTH, T> load_lanes(const T* address) {
    Lanes<WIDTH, T> lanes;
    if constexpr (WIDTH == 1) {
        lanes.lane[0] = Held<T>::of(dialect::load(address));
    } else if constexpr (sizeof(T) == 2) {
        // Elements of 16 bits travel in pairs: there is no access of eight of them.
        constexpr int WORDS = WIDTH / 2 < 4 ? WIDTH / 2 : 4;
        static_assert(WIDTH % (2 * WORDS) == 0, "lanes fill whole packs");
        for (int first = 0; first < WIDTH / 2; first += WORDS) {
            const dialect::Pack<u32, WORDS> pack = dialect::load_lanes<WORDS>(reinterpret_cast<const u32*>(address) + first);
            for (int i = 0; i < WORDS; i++) {
                lanes.lane[2 * (first + i)] = Held<T>::lower(pack.lane[i]);
                lanes.lane[2 * (first + i) + 1] = Held<T>::upper(pack.lane[i]);
            }
        }
    } else if constexpr (sizeof(T) == 1) {
        const dialect::Pack<u32, WIDTH / 4> pack = dialect::load_lanes<WIDTH / 4>(reinterpret_cast<const u32*>(address));
        for (int i = 0; i < WIDTH; i++) {
            lanes.lane[i] = Held<T>::of_byte(pack.lane[i / 4], i % 4);
        }
    } else {
        constexpr int PER_PACK = WIDTH * sizeof(T) < 16 ? WIDTH : 16 / sizeof(T);
        static_assert(WIDTH % PER_PACK == 0, "lanes fill whole packs");
        for (int first = 0; first < WIDTH; first += PER_PACK) {
            const dialect::Pack<T, PER_PACK> pack = dialect::load_lanes<PER_PACK>(address + first);
            for (int i = 0; i < PER_PACK; i++) {
                lanes.lane[first + i] = pack.lane[i];
            }
        }
    }
    return lanes;
}

template <int WIDTH, class T>
__device__ __forceinline__ void store_lanes(T* address, const Lanes<WIDTH, T>& lanes) {
    if constexpr (WIDTH == 1) {
        dialect::store(address, Held<T>::element(lanes.lane[0]));
    } else if constexpr (sizeof(T) == 2) {
        constexpr int WORDS = WIDTH / 2 < 4 ? WIDTH / 2 : 4;
        static_assert(WIDTH % (2 * WORDS) == 0, "lanes fill whole packs");
        for (int first = 0; first < WIDTH / 2; first += WORDS) {
            dialect::Pack<u32, WORDS> pack;
            for (int i = 0; i < WORDS; i++) {
                pack.lane[i] = Held<T>::pair(lanes.lane[2 * (first + i)], lanes.lane[2 * (first + i) + 1]);
            }
            dialect::store_lanes<WORDS>(reinterpret_cast<u32*>(address) + first, pack);
        }
    } else if constexpr (sizeof(T) == 1) {
        dialect::Pack<u32, WIDTH / 4> pack;
        for (int i = 0; i < WIDTH; i += 4) {
            pack.lane[i / 4] = Held<T>::word(lanes.lane + i);
        }
        dialect::store_lanes<WIDTH / 4>(reinterpret_cast<u32*>(address), pack);
    } else {
        constexpr int PER_PACK = WIDTH * sizeof(T) < 16 ? WIDTH : 16 / sizeof(T);
        static_assert(WIDTH % PER_PACK == 0, "lanes fill whole packs");
        for (int first = 0; first < WIDTH; first += PER_PACK) {
            dialect::Pack<T, PER_PACK> pack;
            for (int i = 0; i < PER_PACK; i++) {
                pack.lane[i] = lanes.lane[first + i];
            }
            dialect::store_lanes<PER_PACK>(address + first, pack);
        }
    }
}

// Walks elements `first..numel` of a chunk with all threads of the block, `WIDTH` elements each at
// a time, neighbours side by side. While the whole block has work for `IN_FLIGHT` such accesses, a
// thread starts all of them before it waits for the first. Returns the first element that is left
// over because fewer than `WIDTH` remain.
template <int WIDTH, int IN_FLIGHT, class Body>
__device__ __forceinline__ u32 sweep(const Body& body, u32 first, u32 numel) {
    const u32 stride = blockDim.x * WIDTH;
    u32 at = first;
    if constexpr (IN_FLIGHT > 1) {
        for (; numel - at >= stride * IN_FLIGHT; at += stride * IN_FLIGHT) {
            body.template visit<WIDTH, IN_FLIGHT>(at + threadIdx.x * WIDTH, stride);
        }
    }
    for (u32 i = at + threadIdx.x * WIDTH; i + WIDTH <= numel; i += stride) {
        body.template visit<WIDTH, 1>(i, stride);
    }
    return first + (numel - first) / WIDTH * WIDTH;
}

}  // namespace multi_tensor
