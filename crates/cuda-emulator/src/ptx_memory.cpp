// Loads, stores and atomics: where they go, whether they may, and what they move.

#include <algorithm>
#include <cstring>

#include "ptx_machine.hpp"

namespace emulator {
namespace ptx {
namespace {

std::string hex(std::uint64_t value) {
    char text[20];
    std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
    return text;
}

[[noreturn]] void refuse(CUresult code, const Instruction& instruction, unsigned bytes, std::uint64_t address, const std::string& why) {
    throw Fault{code, std::string(SPACE_NAMES[int(instruction.space)]) + " access of " + std::to_string(bytes) + " bytes at " + hex(address) + ": " + why};
}

// The bytes of an access to memory that is `size` bytes from `base` on.
std::uint64_t within(std::uint64_t address, std::uint64_t base, std::uint64_t size, unsigned bytes, const Instruction& instruction) {
    if (address < base || address - base > size || size - (address - base) < bytes)
        refuse(CUDA_ERROR_ILLEGAL_ADDRESS, instruction, bytes, address,
               "out of bounds of the " + std::to_string(size) + " bytes from " + hex(base) + " on");
    return address - base;
}

unsigned char* reach_shared(Warp& warp, unsigned lane, const Instruction& instruction, std::uint64_t address, unsigned bytes, Access access) {
    Block& block = *warp.block;
    const std::uint64_t at = within(address, SHARED_BASE, block.shared.size(), bytes, instruction);
    if (access == Access::Store) {
        std::memset(&block.shared_written[at], 1, bytes);
    } else if (std::memchr(&block.shared_written[at], 0, bytes) != nullptr) {
        throw Fault{CUDA_ERROR_LAUNCH_FAILED, "load of " + std::to_string(bytes) + " bytes at byte " + std::to_string(at) +
                                                  " of shared memory, which no thread has written"};
    }
    if (schedule().watches_races && instruction.order == Order::Weak) watch(&block.shared_cells[at / 2], at, bytes, warp, lane, access);
    return &block.shared[at];
}

unsigned char* reach_global(Warp& warp, unsigned lane, const Instruction& instruction, std::uint64_t address, unsigned bytes, Access access) {
    const std::uint64_t workspace = reinterpret_cast<std::uint64_t>(launch.workspace.data());
    if (address - workspace < sizeof launch.workspace) {
        within(address, workspace, sizeof launch.workspace, bytes, instruction);
        return reinterpret_cast<unsigned char*>(address);
    }
    check_access(reinterpret_cast<const void*>(address), bytes, bytes, access);
    if (schedule().watches_races && instruction.order == Order::Weak) watch(global_cell(address), address, bytes, warp, lane, access);
    return reinterpret_cast<unsigned char*>(address);
}

// Where the access of a lane lies on the host; throws if it may not be made.
unsigned char* reach(Warp& warp, unsigned lane, const Instruction& instruction, Access access) {
    std::uint64_t address = warp.row(instruction.address)[lane] + std::uint64_t(instruction.offset);
    const unsigned bytes = unsigned(instruction.count) * instruction.element_bytes;
    launch.lane = lane;
    Space space = instruction.space;
    if (space == Space::Generic) {
        const std::uint64_t window = address & (SHARED_WINDOW | PARAMETER_WINDOW);
        space = window == SHARED_WINDOW ? Space::Shared : window == PARAMETER_WINDOW ? Space::Parameter : Space::Global;
        address -= window;
    }
    if (address % bytes != 0) refuse(CUDA_ERROR_MISALIGNED_ADDRESS, instruction, bytes, address, "misaligned");
    switch (space) {
        case Space::Shared: return reach_shared(warp, lane, instruction, address, bytes, access);
        case Space::Parameter:
            if (access == Access::Store) refuse(CUDA_ERROR_ILLEGAL_ADDRESS, instruction, bytes, address, "parameters are read only");
            return const_cast<unsigned char*>(launch.arguments) +
                   within(address, PARAMETER_BASE, launch.entry->kernel.argument_bytes, bytes, instruction);
        default: return reach_global(warp, lane, instruction, address, bytes, access);
    }
}

std::uint64_t read(const unsigned char* from, const Instruction& instruction) {
    std::uint64_t value = 0;
    std::memcpy(&value, from, instruction.element_bytes);
    if (instruction.extend == Extend::Zero) return value;
    const unsigned unused = 64 - 8 * instruction.element_bytes;
    return std::uint64_t(std::int64_t(value << unused) >> unused);
}

// Sectors that the lanes touch together; those of neighbours follow each other.
std::uint64_t sectors(Warp& warp, const Instruction& instruction, std::uint32_t lanes) {
    std::array<std::uint64_t, LANES> touched;
    unsigned count = 0;
    each_lane(lanes, [&](unsigned lane) {
        const std::uint64_t sector = (warp.row(instruction.address)[lane] + std::uint64_t(instruction.offset)) / 32;
        if (count == 0 || touched[count - 1] != sector) touched[count++] = sector;
    });
    std::sort(touched.begin(), touched.begin() + count);
    return std::uint64_t(std::unique(touched.begin(), touched.begin() + count) - touched.begin());
}

void count(Warp& warp, const Instruction& instruction, std::uint32_t lanes, Access access) {
    Counts& counts = launch.entry->counts;
    const unsigned width = unsigned(__builtin_ctz(unsigned(instruction.count) * instruction.element_bytes));
    auto& by_width = (access == Access::Load ? counts.loads : counts.stores)[int(instruction.space)];
    by_width[width] += unsigned(__builtin_popcount(lanes));
    if (instruction.space == Space::Parameter || instruction.space == Space::Shared) return;
    (access == Access::Load ? counts.load_sectors : counts.store_sectors) += sectors(warp, instruction, lanes);
}

void load(Warp& warp, const Instruction& instruction, std::uint32_t lanes) {
    count(warp, instruction, lanes, Access::Load);
    each_lane(lanes, [&](unsigned lane) {
        const unsigned char* from = reach(warp, lane, instruction, Access::Load);
        for (unsigned i = 0; i < instruction.count; ++i)
            warp.row(instruction.at[i])[lane] = read(from + i * instruction.element_bytes, instruction);
        if (instruction.order == Order::Acquire) learn(reinterpret_cast<std::uint64_t>(from), warp, lane);
    });
}

void store(Warp& warp, const Instruction& instruction, std::uint32_t lanes) {
    count(warp, instruction, lanes, Access::Store);
    each_lane(lanes, [&](unsigned lane) {
        unsigned char* to = reach(warp, lane, instruction, Access::Store);
        if (instruction.order == Order::Release) tell(reinterpret_cast<std::uint64_t>(to), warp, lane);
        for (unsigned i = 0; i < instruction.count; ++i)
            std::memcpy(to + i * instruction.element_bytes, &warp.row(instruction.at[i])[lane], instruction.element_bytes);
    });
}

// What an atomic leaves behind, from what it found and its operands.
using Update = std::uint64_t (*)(std::uint64_t found, std::uint64_t first, std::uint64_t second);

template <Update UPDATE>
void atomic(Warp& warp, const Instruction& instruction, std::uint32_t lanes) {
    const Order order = instruction.order;
    launch.entry->counts.atomics += unsigned(__builtin_popcount(lanes));
    each_lane(lanes, [&](unsigned lane) {
        unsigned char* at = reach(warp, lane, instruction, Access::Store);
        const std::uint64_t place = reinterpret_cast<std::uint64_t>(at);
        if (order == Order::Acquire || order == Order::AcquireRelease) learn(place, warp, lane);
        if (order == Order::Release || order == Order::AcquireRelease) tell(place, warp, lane);
        const std::uint64_t found = read(at, instruction);
        const std::uint64_t second = instruction.at[2] == NO_ROW ? 0 : warp.row(instruction.at[2])[lane];
        const std::uint64_t left = UPDATE(found, warp.row(instruction.at[1])[lane], second);
        std::memcpy(at, &left, instruction.element_bytes);
        warp.row(instruction.at[0])[lane] = found;
    });
}

std::uint64_t sum(std::uint64_t found, std::uint64_t first, std::uint64_t) { return found + first; }
std::uint64_t exchange(std::uint64_t, std::uint64_t first, std::uint64_t) { return first; }
std::uint64_t both(std::uint64_t found, std::uint64_t first, std::uint64_t) { return found & first; }
std::uint64_t either(std::uint64_t found, std::uint64_t first, std::uint64_t) { return found | first; }
std::uint64_t one_of(std::uint64_t found, std::uint64_t first, std::uint64_t) { return found ^ first; }
// The slots of the operands may hold more than the element's bytes; comparisons look at the low 32
// or, where the type has them, at all 64.
template <class T> std::uint64_t smaller(std::uint64_t found, std::uint64_t first, std::uint64_t) { return T(first) < T(found) ? first : found; }
template <class T> std::uint64_t larger(std::uint64_t found, std::uint64_t first, std::uint64_t) { return T(first) > T(found) ? first : found; }
template <class T> std::uint64_t swap_if(std::uint64_t found, std::uint64_t first, std::uint64_t second) { return T(found) == T(first) ? second : found; }

struct AtomicForm {
    const char *operation, *type;
    Handler run;
};

constexpr AtomicForm ATOMICS[] = {
    {"add", "u32", atomic<sum>}, {"add", "s32", atomic<sum>}, {"add", "u64", atomic<sum>},
    {"exch", "b32", atomic<exchange>}, {"exch", "b64", atomic<exchange>},
    {"and", "b32", atomic<both>}, {"or", "b32", atomic<either>}, {"xor", "b32", atomic<one_of>},
    {"and", "b64", atomic<both>}, {"or", "b64", atomic<either>}, {"xor", "b64", atomic<one_of>},
    {"min", "u32", atomic<smaller<std::uint32_t>>}, {"max", "u32", atomic<larger<std::uint32_t>>},
    {"min", "s32", atomic<smaller<std::int32_t>>}, {"max", "s32", atomic<larger<std::int32_t>>},
    {"min", "u64", atomic<smaller<std::uint64_t>>}, {"max", "u64", atomic<larger<std::uint64_t>>},
    {"min", "s64", atomic<smaller<std::int64_t>>}, {"max", "s64", atomic<larger<std::int64_t>>},
    {"cas", "b32", atomic<swap_if<std::uint32_t>>}, {"cas", "b64", atomic<swap_if<std::uint64_t>>},
};

bool is_scope(const std::string& part) { return part == "cta" || part == "gpu" || part == "sys" || part == "cluster"; }

// What changes neither the value nor its order: hints to caches, and the read-only path.
bool is_hint(const std::string& part) {
    for (const char* hint : {"nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt"})
        if (part == hint) return true;
    return part.compare(0, 4, "L1::") == 0 || part.compare(0, 4, "L2::") == 0;
}

bool read_order(const std::string& part, Order* order) {
    constexpr std::pair<const char*, Order> ORDERS[] = {
        {"weak", Order::Weak}, {"relaxed", Order::Relaxed}, {"volatile", Order::Relaxed},
        {"acquire", Order::Acquire}, {"release", Order::Release}, {"acq_rel", Order::AcquireRelease},
    };
    for (const auto& known : ORDERS)
        if (part == known.first) return *order = known.second, true;
    return false;
}

bool read_space(const std::string& part, Space* space) {
    for (const auto& known : {std::pair<const char*, Space>{"global", Space::Global}, {"shared", Space::Shared}, {"param", Space::Parameter}})
        if (part == known.first) return *space = known.second, true;
    return false;
}

bool read_type(const std::string& part, Instruction* to) {
    if (part.size() < 2 || std::strchr("busf", part[0]) == nullptr) return false;
    const std::string bits = part.substr(1);
    for (const auto& known : {std::pair<const char*, unsigned>{"8", 1u}, {"16", 2u}, {"32", 4u}, {"64", 8u}})
        if (bits == known.first) {
            to->element_bytes = std::uint8_t(known.second);
            to->extend = part[0] == 's' ? Extend::Sign : Extend::Zero;
            return true;
        }
    return false;
}

bool decode_shuffle(const std::vector<std::string>& parts, Instruction* to) {
    if (parts.size() != 4 || parts[1] != "sync" || parts[3] != "b32") return false;
    for (const auto& mode : {std::pair<const char*, Shuffle>{"up", Shuffle::Up}, {"down", Shuffle::Down}, {"bfly", Shuffle::Butterfly}, {"idx", Shuffle::Index}})
        if (parts[2] == mode.first) {
            to->kind = Kind::Shuffle;
            to->shuffle = mode.second;
            return true;
        }
    return false;
}

bool decode_atomic(const std::vector<std::string>& parts, Instruction* to) {
    std::string operation;
    to->order = Order::Relaxed;
    for (std::size_t i = 1; i + 1 < parts.size(); ++i) {
        if (read_space(parts[i], &to->space) || read_order(parts[i], &to->order) || is_scope(parts[i])) continue;
        if (!operation.empty()) return false;
        operation = parts[i];
    }
    for (const AtomicForm& form : ATOMICS)
        if (operation == form.operation && parts.back() == form.type && read_type(parts.back(), to)) {
            to->kind = Kind::Yield;
            to->run = form.run;
            return true;
        }
    return false;
}

}  // namespace

bool decode_access(const std::vector<std::string>& parts, Instruction* to) {
    if (parts[0] == "shfl") return decode_shuffle(parts, to);
    if (parts[0] == "atom" || parts[0] == "red") return decode_atomic(parts, to);
    if (parts[0] != "ld" && parts[0] != "st") return false;
    to->run = parts[0] == "ld" ? load : store;
    for (std::size_t i = 1; i + 1 < parts.size(); ++i) {
        if (parts[i] == "v2") to->count = 2;
        else if (parts[i] == "v4") to->count = 4;
        else if (!read_space(parts[i], &to->space) && !read_order(parts[i], &to->order) && !is_scope(parts[i]) && !is_hint(parts[i])) return false;
    }
    if (!read_type(parts.back(), to) || to->count * to->element_bytes > 16) return false;
    if (to->order != Order::Weak) to->kind = Kind::Yield;
    return true;
}

}  // namespace ptx
}  // namespace emulator
