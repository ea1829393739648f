// Threads of a launch of PTX, and the memory that they share.
#pragma once

#include "ptx_program.hpp"

namespace emulator {
namespace ptx {

template <class Body>
inline void each_lane(std::uint32_t lanes, Body body) {
    if (lanes == ALL_LANES) {
        for (unsigned lane = 0; lane < LANES; ++lane) body(lane);
        return;
    }
    for (; lanes != 0; lanes &= lanes - 1) body(unsigned(__builtin_ctz(lanes)));
}

// Who last touched two bytes: launch, which of the two, barriers passed, block and thread.
struct Mark {
    std::uint64_t bits = 0;
};

struct Cell {
    Mark write, read;
    // Of loads of one byte, for each of the two.
    Mark read_alone[2];
};

struct Block {
    Index3 at{};
    std::uint32_t index = 0;
    std::uint32_t epoch = 1;  // barriers passed, and one
    std::vector<Warp> warps;
    std::size_t next_warp = 0;  // whose turn it is, without a seed
    std::vector<unsigned char> shared;
    std::vector<unsigned char> shared_written;
    std::vector<Cell> shared_cells;
};

struct Warp {
    Block* block = nullptr;
    unsigned first_thread = 0;  // rank of lane 0 within the block
    std::uint32_t exists = 0, ready = 0, at_barrier = 0, at_shuffle = 0, exited = 0;
    std::array<std::uint32_t, LANES> pc{};
    std::vector<std::uint64_t> registers;

    std::uint64_t* row(std::uint32_t number) { return registers.data() + std::size_t(number) * LANES; }
};

// The launch that runs now, and its block that does: blocks run one after the other.
struct Launch {
    Entry* entry = nullptr;
    LaunchShape shape{};
    const unsigned char* arguments = nullptr;
    std::uint32_t number = 0;
    Block block;
    // For messages: whose access it is that faults.
    const Warp* warp = nullptr;
    unsigned lane = 0;
    const Instruction* instruction = nullptr;
};
extern Launch launch;

// What the environment asks of every launch.
struct Schedule {
    std::uint64_t seed;  // FUSESTEP_PTX_SEED; 0: warps in step and in order
    bool watches_races;  // FUSESTEP_PTX_RACES, 1
};
const Schedule& schedule();

// Races: every access of a thread to `len_bytes` at `address` of its block's or of global memory.
void watch(Cell* cell, std::uint64_t address, unsigned len_bytes, const Warp& warp, unsigned lane, Access access);
Cell* global_cell(std::uint64_t address);
void begin_watching();

std::string place_of(const Warp& warp, unsigned lane);

}  // namespace ptx
}  // namespace emulator
