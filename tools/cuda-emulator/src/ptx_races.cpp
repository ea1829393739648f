// Races: two threads touch the same byte, one of them writes it, and nothing orders the two. The
// barrier of a block does for its threads; a shuffle orders nothing, and neither does anything
// between blocks of a launch.
//
// Two bytes share a cell, which keeps their last writer and their last reader, or that several
// threads of one block have read; of each byte by itself, too. A reader in another block replaces
// the one before, so a write after reads of several blocks is compared with the last of them only.

#include <algorithm>
#include <memory>
#include <unordered_map>

#include "ptx_machine.hpp"

namespace emulator {
namespace ptx {
namespace {

constexpr unsigned THREAD_BITS = 11, BLOCK_BITS = 21, EPOCH_BITS = 16, HALF_BITS = 2;
constexpr std::uint64_t SEVERAL = (1u << THREAD_BITS) - 1;
constexpr std::uint32_t EPOCH_LAST = (1u << EPOCH_BITS) - 1;
constexpr std::uint32_t LAUNCHES = (1u << (64 - THREAD_BITS - BLOCK_BITS - EPOCH_BITS - HALF_BITS)) - 1;

std::uint64_t field(const Mark& mark, unsigned from, unsigned bits) { return mark.bits >> from & ((std::uint64_t(1) << bits) - 1); }
std::uint64_t thread_of(const Mark& mark) { return field(mark, 0, THREAD_BITS); }
std::uint32_t block_of(const Mark& mark) { return std::uint32_t(field(mark, THREAD_BITS, BLOCK_BITS)); }
std::uint32_t epoch_of(const Mark& mark) { return std::uint32_t(field(mark, THREAD_BITS + BLOCK_BITS, EPOCH_BITS)); }
std::uint64_t half_of(const Mark& mark) { return field(mark, THREAD_BITS + BLOCK_BITS + EPOCH_BITS, HALF_BITS); }
std::uint64_t launch_of(const Mark& mark) { return mark.bits >> (THREAD_BITS + BLOCK_BITS + EPOCH_BITS + HALF_BITS); }

Mark mark_of(std::uint32_t block, std::uint64_t thread, std::uint32_t epoch, std::uint64_t half) {
    const std::uint64_t number = launch.number % LAUNCHES + 1;
    return {((((number << HALF_BITS | half) << EPOCH_BITS | std::min(epoch, EPOCH_LAST)) << BLOCK_BITS | (block & ((1u << BLOCK_BITS) - 1)))
             << THREAD_BITS) | thread};
}

// Global memory by pages of so many bytes; cells of two bytes.
constexpr std::uint64_t PAGE_BYTES = 4096;
constexpr std::size_t PAGES_KEPT = 32768;
using Page = std::array<Cell, PAGE_BYTES / 2>;
std::unordered_map<std::uint64_t, std::unique_ptr<Page>> pages;
// Pages met last.
struct Known {
    std::uint64_t number = ~std::uint64_t(0);
    Page* page = nullptr;
};
std::array<Known, 256> known_pages;

// Whether what the mark stands for happened before the lane's next access.
bool is_ordered(const Mark& mark, const Warp& warp, std::uint64_t thread) {
    const Block& block = *warp.block;
    const std::uint32_t epoch = epoch_of(mark);
    if (epoch == EPOCH_LAST) return true;  // more barriers than a mark counts
    const bool same_block = block_of(mark) == (block.index & ((1u << BLOCK_BITS) - 1));
    return same_block && (thread_of(mark) == thread || epoch < block.epoch);
}

[[noreturn]] void report(const Mark& mark, const char* before, const char* now, std::uint64_t address, unsigned bytes) {
    const std::uint64_t thread = thread_of(mark);
    char place[96];
    std::snprintf(place, sizeof place, "%u bytes at 0x%llx", bytes, static_cast<unsigned long long>(address));
    throw Fault{CUDA_ERROR_LAUNCH_FAILED,
                std::string("race: ") + now + " of " + place + " without order after a " + before + " by block " + std::to_string(block_of(mark)) +
                    (thread == SEVERAL ? " (several threads)" : " thread " + std::to_string(thread)) + " at barrier " +
                    std::to_string(epoch_of(mark) - 1)};
}

bool is_current(const Mark& mark) { return mark.bits != 0 && launch_of(mark) == launch.number % LAUNCHES + 1; }

}  // namespace

void begin_watching() {
    ++launch.number;
    if (launch.number % LAUNCHES == 0 || pages.size() > PAGES_KEPT) {
        pages.clear();
        known_pages.fill(Known{});
    }
}

Cell* global_cell(std::uint64_t address) {
    const std::uint64_t number = address / PAGE_BYTES;
    Known& known = known_pages[number % known_pages.size()];
    if (known.number != number) {
        std::unique_ptr<Page>& page = pages[number];
        if (page == nullptr) page.reset(new Page());
        known = {number, page.get()};
    }
    return &(*known.page)[address % PAGE_BYTES / 2];
}

void watch(Cell* cell, std::uint64_t address, unsigned len_bytes, const Warp& warp, unsigned lane, Access access) {
    const Block& block = *warp.block;
    const std::uint64_t thread = warp.first_thread + lane;
    const std::uint64_t half = len_bytes > 1 ? 3 : 1u << (address & 1);
    const Mark mine = mark_of(block.index, thread, block.epoch, half);
    for (unsigned done = 0; done < len_bytes; done += 2, ++cell) {
        const Mark write = cell->write;
        if (is_current(write) && (half_of(write) & half) != 0 && !is_ordered(write, warp, thread))
            report(write, "store", access == Access::Store ? "store" : "load", address, len_bytes);
        if (access == Access::Load) {
            Mark& read = len_bytes > 1 ? cell->read : cell->read_alone[address & 1];
            // Another reader since the last barrier: from now on they are several.
            const bool joins = is_current(read) && block_of(read) == block_of(mine) && epoch_of(read) == epoch_of(mine) && thread_of(read) != thread;
            read = joins ? mark_of(block.index, SEVERAL, block.epoch, half) : mine;
            continue;
        }
        for (const Mark& read : {cell->read, cell->read_alone[0], cell->read_alone[1]})
            if (is_current(read) && (half_of(read) & half) != 0 && !is_ordered(read, warp, thread)) report(read, "load", "store", address, len_bytes);
        cell->write = mine;
    }
}

}  // namespace ptx
}  // namespace emulator
