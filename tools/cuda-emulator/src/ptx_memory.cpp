// Loads and stores: where they go, whether they may, and what they move.

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
    if (schedule().watches_races) watch(&block.shared_cells[at / 2], at, bytes, warp, lane, access);
    return &block.shared[at];
}

unsigned char* reach_global(Warp& warp, unsigned lane, std::uint64_t address, unsigned bytes, Access access) {
    check_access(reinterpret_cast<const void*>(address), bytes, bytes, access);
    if (schedule().watches_races) watch(global_cell(address), address, bytes, warp, lane, access);
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
        default: return reach_global(warp, lane, address, bytes, access);
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
    if (instruction.space == Space::Parameter || instruction.space == Space::Shared) return;
    Counts& counts = launch.entry->counts;
    const unsigned width = unsigned(__builtin_ctz(unsigned(instruction.count) * instruction.element_bytes));
    (access == Access::Load ? counts.loads : counts.stores)[width] += unsigned(__builtin_popcount(lanes));
    (access == Access::Load ? counts.load_sectors : counts.store_sectors) += sectors(warp, instruction, lanes);
}

void load(Warp& warp, const Instruction& instruction, std::uint32_t lanes) {
    count(warp, instruction, lanes, Access::Load);
    each_lane(lanes, [&](unsigned lane) {
        const unsigned char* from = reach(warp, lane, instruction, Access::Load);
        for (unsigned i = 0; i < instruction.count; ++i)
            warp.row(instruction.at[i])[lane] = read(from + i * instruction.element_bytes, instruction);
    });
}

void store(Warp& warp, const Instruction& instruction, std::uint32_t lanes) {
    count(warp, instruction, lanes, Access::Store);
    each_lane(lanes, [&](unsigned lane) {
        unsigned char* to = reach(warp, lane, instruction, Access::Store);
        for (unsigned i = 0; i < instruction.count; ++i)
            std::memcpy(to + i * instruction.element_bytes, &warp.row(instruction.at[i])[lane], instruction.element_bytes);
    });
}

// What does not change the value: hints to caches, and the read-only path.
bool is_hint(const std::string& part) {
    for (const char* hint : {"nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt"})
        if (part == hint) return true;
    return part.compare(0, 4, "L1::") == 0 || part.compare(0, 4, "L2::") == 0;
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

}  // namespace

bool decode_access(const std::vector<std::string>& parts, Instruction* to) {
    if (parts[0] == "shfl") return decode_shuffle(parts, to);
    if (parts[0] != "ld" && parts[0] != "st") return false;
    to->run = parts[0] == "ld" ? load : store;
    for (std::size_t i = 1; i + 1 < parts.size(); ++i) {
        if (parts[i] == "v2") to->count = 2;
        else if (parts[i] == "v4") to->count = 4;
        else if (!read_space(parts[i], &to->space) && !is_hint(parts[i])) return false;
    }
    return read_type(parts.back(), to) && to->count * to->element_bytes <= 16;
}

}  // namespace ptx
}  // namespace emulator
