// Device memory as host memory in a table, and the check that every access of a kernel passes.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "machine.hpp"

namespace emulator {
namespace {

// Space after each allocation that belongs to none, so that running over an end never lands in a
// neighbour.
constexpr std::size_t GAP_BYTES = 4096;
constexpr std::size_t ALIGNMENT_BYTES = 256;
// Device memory is not zeroed: as f32 and as f64 these bytes are a large negative number that no
// test expects.
constexpr int FRESH_BYTE = 0xCB;
// Enough to name an allocation freed not long ago.
constexpr std::size_t REMEMBERED = 1024;

struct Range {
    std::uintptr_t begin = 0, end = 0;
    bool contains(std::uintptr_t from, std::size_t len_bytes) const {
        return from >= begin && from <= end && len_bytes <= end - from;
    }
};

std::vector<Range> live;
std::vector<Range> freed;
std::size_t live_bytes = 0;

// The ranges used last: kernels go round a few tensor lists.
constexpr unsigned RECENT = 8;
Range recent[RECENT];
unsigned recent_next = 0;

void forget_recent() { std::fill(recent, recent + RECENT, Range{}); }

// The last allocation that begins at or before the address.
std::vector<Range>::iterator at_or_before(std::uintptr_t address) {
    auto after = std::upper_bound(live.begin(), live.end(), address,
                                  [](std::uintptr_t value, const Range& range) { return value < range.begin; });
    return after == live.begin() ? live.end() : after - 1;
}

std::string describe(std::uintptr_t address) {
    char text[160];
    const auto range = at_or_before(address);
    const bool is_live = range != live.end() && range->contains(address, 1);
    const auto old = std::find_if(freed.rbegin(), freed.rend(), [&](const Range& range) { return range.contains(address, 1); });
    if (!is_live && old != freed.rend()) {
        std::snprintf(text, sizeof text, "it lies in a freed allocation, 0x%llx of %llu bytes", (unsigned long long)old->begin,
                      (unsigned long long)(old->end - old->begin));
        return text;
    }
    if (range == live.end()) return "no allocation lies before it";
    std::snprintf(text, sizeof text, "the allocation before it, 0x%llx, has %llu bytes and this is byte %llu", (unsigned long long)range->begin,
                  (unsigned long long)(range->end - range->begin), (unsigned long long)(address - range->begin));
    return text;
}

[[noreturn]] void refuse(CUresult code, const char* why, std::uintptr_t address, std::size_t len_bytes, Access access) {
    char text[160];
    std::snprintf(text, sizeof text, "%s of %llu bytes at 0x%llx is %s: ", access == Access::Load ? "load" : "store",
                  (unsigned long long)len_bytes, (unsigned long long)address, why);
    throw Fault{code, text + describe(address)};
}

}  // namespace

CUresult allocate(std::size_t len_bytes, void** address) {
    if (len_bytes == 0 || address == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const std::size_t capacity = settings().memory_bytes;
    if (len_bytes > capacity || live_bytes > capacity - len_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
    const std::size_t reserved = (len_bytes + GAP_BYTES + ALIGNMENT_BYTES - 1) / ALIGNMENT_BYTES * ALIGNMENT_BYTES;
    void* memory = std::aligned_alloc(ALIGNMENT_BYTES, reserved);
    if (memory == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    std::memset(memory, FRESH_BYTE, reserved);
    const auto begin = reinterpret_cast<std::uintptr_t>(memory);
    auto place = std::upper_bound(live.begin(), live.end(), begin,
                                  [](std::uintptr_t value, const Range& range) { return value < range.begin; });
    live.insert(place, Range{begin, begin + len_bytes});
    live_bytes += len_bytes;
    *address = memory;
    return CUDA_SUCCESS;
}

CUresult release(void* address) {
    const auto begin = reinterpret_cast<std::uintptr_t>(address);
    auto range = at_or_before(begin);
    if (range == live.end() || range->begin != begin) return CUDA_ERROR_INVALID_VALUE;
    live_bytes -= range->end - range->begin;
    if (freed.size() == REMEMBERED) freed.erase(freed.begin());
    freed.push_back(*range);
    live.erase(range);
    forget_recent();
    std::free(address);
    return CUDA_SUCCESS;
}

void release_all() {
    for (const Range& range : live) std::free(reinterpret_cast<void*>(range.begin));
    live.clear();
    freed.clear();
    live_bytes = 0;
    forget_recent();
}

std::size_t allocated_bytes() { return live_bytes; }

bool is_allocated(const void* address, std::size_t len_bytes) {
    const auto from = reinterpret_cast<std::uintptr_t>(address);
    auto range = at_or_before(from);
    return range != live.end() && range->contains(from, len_bytes);
}

void check_access(const void* address, std::size_t len_bytes, std::size_t alignment, Access access) {
    const auto from = reinterpret_cast<std::uintptr_t>(address);
    if (from % alignment != 0) refuse(CUDA_ERROR_MISALIGNED_ADDRESS, "misaligned", from, len_bytes, access);
    for (const Range& range : recent)
        if (range.contains(from, len_bytes)) return;
    auto range = at_or_before(from);
    if (range == live.end() || !range->contains(from, len_bytes))
        refuse(CUDA_ERROR_ILLEGAL_ADDRESS, "out of bounds", from, len_bytes, access);
    recent[recent_next++ % RECENT] = *range;
}

}  // namespace emulator
