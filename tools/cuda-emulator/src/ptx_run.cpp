// How a launch of PTX runs: lanes of a warp that stand at one instruction take it together, for a
// while; which lanes of which warp go next is drawn from a seed.

#include <algorithm>
#include <cstdlib>

#include "ptx_machine.hpp"

namespace emulator {
namespace ptx {

Launch launch;

namespace {

constexpr std::uint32_t ANY_LENGTH = 0xffffffffu;
// Registers are not zeroed: as f32 and f64 these are large negative numbers.
constexpr std::uint64_t FRESH_REGISTER = 0xCBCBCBCBCBCBCBCBu;

std::uint64_t random_state = 0;
std::uint32_t unfinished_warps = 0;
// Instructions that a turn takes at most, one more than a drawn number below it.
std::uint32_t turn_length = ANY_LENGTH;

// SplitMix64.
std::uint64_t random() {
    std::uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

bool once_in(std::uint64_t n) { return schedule().seed != 0 && random() % n == 0; }

std::uint64_t special_value(Special special, const Warp& warp, unsigned lane) {
    const Index3 &size = launch.shape.block, &grid = launch.shape.grid, &block = warp.block->at;
    const unsigned rank = warp.first_thread + lane;
    switch (special) {
        case Special::ThreadX: return rank % size.x;
        case Special::ThreadY: return rank / size.x % size.y;
        case Special::ThreadZ: return rank / size.x / size.y;
        case Special::BlockX: return block.x;
        case Special::BlockY: return block.y;
        case Special::BlockZ: return block.z;
        case Special::BlockSizeX: return size.x;
        case Special::BlockSizeY: return size.y;
        case Special::BlockSizeZ: return size.z;
        case Special::GridX: return grid.x;
        case Special::GridY: return grid.y;
        case Special::GridZ: return grid.z;
        case Special::Lane: return lane;
        case Special::WarpNumber: return warp.first_thread / LANES;
        case Special::LaneMaskBelow: return (std::uint64_t(1) << lane) - 1;
    }
    return 0;
}

void prepare_warp(Block& block, Warp& warp, unsigned first, unsigned threads) {
    const Entry& entry = *launch.entry;
    warp.block = &block;
    warp.first_thread = first;
    const unsigned count = std::min(threads - first, LANES);
    warp.exists = count == LANES ? ALL_LANES : (1u << count) - 1;
    warp.ready = warp.exists;
    warp.at_barrier = warp.at_shuffle = warp.exited = 0;
    warp.pc.fill(0);
    warp.registers.assign(std::size_t(entry.rows) * LANES, FRESH_REGISTER);
    for (const Constant& constant : entry.constants) std::fill_n(warp.row(constant.row), LANES, constant.value);
    for (const SpecialRow& special : entry.specials)
        for (unsigned lane = 0; lane < LANES; ++lane) warp.row(special.row)[lane] = special_value(special.special, warp, lane);
}

void prepare_block(Block& block, std::uint64_t index) {
    const Index3 &grid = launch.shape.grid, &size = launch.shape.block;
    const unsigned threads = size.x * size.y * size.z;
    block.at = {unsigned(index % grid.x), unsigned(index / grid.x % grid.y), unsigned(index / grid.x / grid.y)};
    block.index = std::uint32_t(index);
    block.epoch = 1;
    block.next_warp = 0;
    const std::size_t shared = launch.entry->shared_bytes + launch.shape.dynamic_shared_bytes;
    block.shared.assign(shared, 0xCB);
    block.shared_written.assign(shared, 0);
    block.shared_cells.assign(shared / 2 + 1, Cell{});
    block.warps.resize((threads + LANES - 1) / LANES);
    for (std::size_t i = 0; i < block.warps.size(); ++i) prepare_warp(block, block.warps[i], unsigned(i) * LANES, threads);
    unfinished_warps += std::uint32_t(block.warps.size());
}

void stand(Warp& warp, std::uint32_t lanes, std::uint32_t pc) {
    each_lane(lanes, [&](unsigned lane) { warp.pc[lane] = pc; });
}

// All threads of the block have arrived: they see what the others did before.
void release_barrier_if_all(Block& block) {
    for (const Warp& warp : block.warps)
        if (warp.at_barrier != warp.exists) return;
    for (Warp& warp : block.warps) {
        const std::uint32_t pc = warp.pc[unsigned(__builtin_ctz(warp.exists))];
        const Instruction& instruction = launch.entry->code[pc];
        each_lane(warp.exists, [&](unsigned lane) {
            if (warp.pc[lane] == pc) return;
            launch.warp = &warp, launch.lane = lane, launch.instruction = &instruction;
            throw Fault{CUDA_ERROR_LAUNCH_FAILED, "an aligned barrier, and this thread of the warp waits at line " +
                                                      std::to_string(launch.entry->code[warp.pc[lane]].line)};
        });
        each_lane(warp.exists, [&](unsigned lane) { ++warp.pc[lane]; });
        warp.ready = warp.exists;
        warp.at_barrier = 0;
    }
    ++block.epoch;
}

// The lane whose value a lane takes, by the definition of the instruction.
unsigned source_lane(const Instruction& instruction, unsigned lane, std::uint32_t by, std::uint32_t clamp_and_mask, bool* within) {
    const unsigned segment = clamp_and_mask >> 8 & 31, clamp = clamp_and_mask & 31;
    by &= 31;
    const unsigned most = (lane & segment) | (clamp & ~segment), least = lane & segment;
    int from = int(lane);
    switch (instruction.shuffle) {
        case Shuffle::Up: from = int(lane) - int(by), *within = from >= int(most); break;
        case Shuffle::Down: from = int(lane + by), *within = from <= int(most); break;
        case Shuffle::Butterfly: from = int(lane ^ by), *within = from <= int(most); break;
        case Shuffle::Index: from = int(least | (by & ~segment)), *within = from <= int(most); break;
    }
    return *within ? unsigned(from) : lane;
}

// Gives every lane its value once all members of the mask have arrived.
void exchange(Warp& warp, const Instruction& instruction, std::uint32_t lanes) {
    std::array<std::uint64_t, LANES> results, found;
    each_lane(lanes, [&](unsigned lane) {
        bool within = false;
        const unsigned from = source_lane(instruction, lane, std::uint32_t(warp.row(instruction.at[3])[lane]),
                                          std::uint32_t(warp.row(instruction.at[4])[lane]), &within);
        if ((lanes >> from & 1) == 0) {
            launch.lane = lane;
            throw Fault{CUDA_ERROR_LAUNCH_FAILED, "lane " + std::to_string(lane) + " asks lane " + std::to_string(from) + ", which takes no part"};
        }
        results[lane] = warp.row(instruction.at[2])[from] & 0xffffffffu;
        found[lane] = within;
    });
    each_lane(lanes, [&](unsigned lane) {
        warp.row(instruction.at[1])[lane] = found[lane];
        warp.row(instruction.at[0])[lane] = results[lane];
    });
}

// Lanes arrive at a shuffle. Whether all that belong to it are there and have gone on.
bool meet_in_warp(Warp& warp, const Instruction& instruction, std::uint32_t arriving, std::uint32_t pc) {
    std::uint32_t& waiting = warp.at_shuffle;
    std::uint32_t here = arriving;
    each_lane(waiting, [&](unsigned lane) { here |= warp.pc[lane] == pc ? 1u << lane : 0u; });
    const std::uint32_t members = std::uint32_t(warp.row(instruction.at[5])[unsigned(__builtin_ctz(arriving))]);
    each_lane(arriving, [&](unsigned lane) {
        const std::uint32_t own = std::uint32_t(warp.row(instruction.at[5])[lane]);
        if (own == members && (own >> lane & 1) != 0) return;
        launch.lane = lane;
        throw Fault{CUDA_ERROR_LAUNCH_FAILED, "the mask of this lane differs from another's, or leaves it out"};
    });
    if (here == members) {
        exchange(warp, instruction, here);
        waiting &= ~here;
        warp.ready |= here;
        stand(warp, here, pc + 1);
        return here == arriving;
    }
    waiting |= arriving;
    warp.ready &= ~arriving;
    return false;
}

void leave(Warp& warp, std::uint32_t lanes) {
    warp.ready &= ~lanes;
    warp.exited |= lanes;
    if (warp.exited == warp.exists) --unfinished_warps;
}

// An instruction that ends a turn. Lanes that its guard leaves out go on behind it. Whether the
// active ones have passed it together and may keep their turn.
bool take_control(Warp& warp, const Instruction& instruction, std::uint32_t lanes, std::uint32_t active, std::uint32_t pc) {
    stand(warp, active, pc);
    stand(warp, lanes & ~active, pc + 1);
    if (active == 0) return true;
    switch (instruction.kind) {
        case Kind::Return: leave(warp, active); return false;
        case Kind::Barrier:
            warp.ready &= ~active;
            warp.at_barrier |= active;
            release_barrier_if_all(*warp.block);
            return false;
        default: return meet_in_warp(warp, instruction, active, pc) && active == lanes;
    }
}

// Runs lanes that stand at one instruction until they part, wait, or have had their turn.
void run_together(Warp& warp, std::uint32_t lanes, std::uint32_t turn) {
    const Instruction* const code = launch.entry->code.data();
    Counts& counts = launch.entry->counts;
    const unsigned width = unsigned(__builtin_popcount(lanes));
    std::uint32_t pc = warp.pc[unsigned(__builtin_ctz(lanes))];
    launch.warp = &warp;
    for (; turn != 0; --turn) {
        const Instruction& instruction = code[pc];
        launch.instruction = &instruction;
        std::uint32_t active = lanes;
        if (instruction.guard != NO_ROW) {
            const std::uint64_t* const guard = warp.row(instruction.guard);
            each_lane(lanes, [&](unsigned lane) {
                if (guard[lane] == instruction.guard_skips) active &= ~(1u << lane);
            });
        }
        counts.instructions += width;
        counts.by_unit[std::size_t(instruction.unit)] += width;
        if (instruction.kind == Kind::Compute) {
            if (active != 0) instruction.run(warp, instruction, active);
            ++pc;
        } else if (instruction.kind == Kind::Branch) {
            if (active != lanes && active != 0) {
                stand(warp, active, instruction.target);
                return stand(warp, lanes & ~active, pc + 1);
            }
            pc = active != 0 ? instruction.target : pc + 1;
        } else {
            if (!take_control(warp, instruction, lanes, active, pc)) return;
            ++pc;
        }
    }
    stand(warp, lanes, pc);
}

// Lanes that go together: those at the lowest instruction, so that lanes which have parted meet
// again; now and then others, or fewer.
std::uint32_t draw_lanes(const Warp& warp) {
    std::uint32_t pc = 0xffffffffu;
    each_lane(warp.ready, [&](unsigned lane) { pc = std::min(pc, warp.pc[lane]); });
    if (once_in(8)) {
        unsigned lane = unsigned(random() % LANES);
        while ((warp.ready >> lane & 1) == 0) lane = (lane + 1) % LANES;
        pc = warp.pc[lane];
    }
    std::uint32_t lanes = 0;
    each_lane(warp.ready, [&](unsigned lane) { lanes |= warp.pc[lane] == pc ? 1u << lane : 0u; });
    if (once_in(16)) {
        const std::uint32_t fewer = lanes & std::uint32_t(random());
        if (fewer != 0) lanes = fewer;
    }
    return lanes;
}

// The next warp with lanes that can go, from a drawn one on, or without a seed from the one behind
// the last; null if all wait.
Warp* draw_warp() {
    Block& block = launch.block;
    const std::size_t warps = block.warps.size();
    const std::size_t first = schedule().seed == 0 ? block.next_warp : random() % warps;
    for (std::size_t i = 0; i < warps; ++i) {
        Warp& warp = block.warps[(first + i) % warps];
        if (warp.ready == 0) continue;
        block.next_warp = (first + i + 1) % warps;
        return &warp;
    }
    return nullptr;
}

// Why nobody can go on.
[[noreturn]] void report_wait() {
    unsigned barrier = 0, shuffle = 0, exited = 0;
    const Warp* waits = nullptr;
    for (const Warp& warp : launch.block.warps) {
        barrier += unsigned(__builtin_popcount(warp.at_barrier));
        shuffle += unsigned(__builtin_popcount(warp.at_shuffle));
        exited += unsigned(__builtin_popcount(warp.exited));
        if (waits == nullptr && warp.exited != warp.exists) waits = &warp;
    }
    launch.warp = waits;
    launch.lane = unsigned(__builtin_ctz(waits->exists & ~waits->exited));
    launch.instruction = &launch.entry->code[waits->pc[launch.lane]];
    throw Fault{CUDA_ERROR_LAUNCH_FAILED, "this thread waits for others that never come: " + std::to_string(barrier) + " threads are at a barrier, " +
                                              std::to_string(shuffle) + " at a shuffle, " + std::to_string(exited) + " have ended"};
}

void run_block() {
    while (unfinished_warps != 0) {
        Warp* const warp = draw_warp();
        if (warp == nullptr) report_wait();
        const std::uint32_t turn = turn_length == ANY_LENGTH ? ANY_LENGTH : 1 + std::uint32_t(random() % turn_length);
        run_together(*warp, draw_lanes(*warp), turn);
    }
}

// Blocks in an order of the seed's: every `step`-th, from a drawn one on.
struct BlockOrder {
    std::uint64_t count, start = 0, step = 1;
    explicit BlockOrder(std::uint64_t blocks) : count(blocks) {
        if (schedule().seed == 0 || count < 3) return;
        start = random() % count;
        do step = 1 + random() % (count - 1);
        while (std::__gcd(step, count) != 1);
    }
    std::uint64_t at(std::uint64_t i) const { return (start + i * step) % count; }
};

void run_launch(std::uint64_t blocks) {
    const BlockOrder order(blocks);
    // Most launches in long turns, which are fast; some in short ones, which part all threads.
    turn_length = schedule().seed == 0 ? ANY_LENGTH : once_in(8) ? 32 : 100000;
    unfinished_warps = 0;
    for (std::uint64_t i = 0; i < blocks; ++i) {
        prepare_block(launch.block, order.at(i));
        run_block();
    }
}

void complain_about(const Fault& fault) {
    std::string where;
    if (launch.warp != nullptr && launch.instruction != nullptr)
        where = " " + place_of(*launch.warp, launch.lane) + " line " + std::to_string(launch.instruction->line) + " `" + launch.instruction->text + "`";
    complain(launch.entry->name + where + ": " + fault.text);
}

}  // namespace

std::string place_of(const Warp& warp, unsigned lane) {
    const Index3& size = launch.shape.block;
    const unsigned rank = warp.first_thread + lane;
    return "block " + text_of(warp.block->at) + " thread " + text_of({rank % size.x, rank / size.x % size.y, rank / size.x / size.y});
}

const Schedule& schedule() {
    static const Schedule read = [] {
        const char *seed = std::getenv("FUSESTEP_PTX_SEED"), *races = std::getenv("FUSESTEP_PTX_RACES");
        return Schedule{seed == nullptr ? 1 : std::strtoull(seed, nullptr, 10), races == nullptr || std::atoi(races) != 0};
    }();
    return read;
}

CUresult run_entry(Entry& entry, const LaunchShape& shape, const void* arguments) {
    const std::uint64_t blocks = 1ull * shape.grid.x * shape.grid.y * shape.grid.z;
    launch.entry = &entry;
    launch.shape = shape;
    launch.arguments = static_cast<const unsigned char*>(arguments);
    launch.warp = nullptr;
    launch.instruction = nullptr;
    begin_watching();
    // By entry and by how often it has run, so that other launches change nothing.
    random_state = schedule().seed;
    for (char c : entry.name) random_state = random_state * 31 + std::uint64_t(c);
    random_state += entry.counts.launches * 0x5851f42d4c957f2du;
    entry.counts.launches += 1;
    try {
        if (entry.shared_bytes + shape.dynamic_shared_bytes > SHARED_BYTES_MAX)
            throw Fault{CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "a block has " + std::to_string(SHARED_BYTES_MAX) + " bytes of shared memory"};
        run_launch(blocks);
        return CUDA_SUCCESS;
    } catch (const Fault& fault) {
        complain_about(fault);
        return fault.code;
    }
}

}  // namespace ptx
}  // namespace emulator
