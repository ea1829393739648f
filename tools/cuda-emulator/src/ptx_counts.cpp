// What the entries of a process have done, for tables: a line of JSON each, appended to
// FUSESTEP_PTX_COUNTS when the process ends.

#include <cstdio>
#include <cstdlib>

#include "ptx_machine.hpp"

namespace emulator {
namespace ptx {
namespace {

// Bytes of an access and how many of them there were: `"4":12,"16":7`.
std::string by_width(const std::array<std::uint64_t, 6>& counts) {
    std::string text;
    for (std::size_t width = 0; width < counts.size(); ++width)
        if (counts[width] != 0)
            text += (text.empty() ? "\"" : ",\"") + std::to_string(1u << width) + "\":" + std::to_string(counts[width]);
    return "{" + text + "}";
}

std::string line_of(const Entry& entry) {
    const Counts& counts = entry.counts;
    const auto number = [](const char* name, std::uint64_t value) { return ",\"" + std::string(name) + "\":" + std::to_string(value); };
    return "{\"entry\":\"" + entry.name + "\"" + number("launches", counts.launches) + number("instructions", counts.instructions) +
           number("doubles", counts.by_unit[int(Unit::Double)]) + number("divisions", counts.by_unit[int(Unit::Division)]) +
           number("load_sectors", counts.load_sectors) + number("store_sectors", counts.store_sectors) +
           ",\"loads\":" + by_width(counts.loads) + ",\"stores\":" + by_width(counts.stores) + "}\n";
}

}  // namespace

void write_counts(const std::list<Entry>& entries) {
    const char* path = std::getenv("FUSESTEP_PTX_COUNTS");
    if (path == nullptr || *path == 0) return;
    std::string text;
    for (const Entry& entry : entries)
        if (entry.counts.launches != 0) text += line_of(entry);
    // One write: processes that end together must not mix their lines.
    std::FILE* file = text.empty() ? nullptr : std::fopen(path, "a");
    if (file == nullptr) return;
    std::setvbuf(file, nullptr, _IOFBF, text.size() + 1);
    std::fwrite(text.data(), 1, text.size(), file);
    std::fclose(file);
}

}  // namespace ptx
}  // namespace emulator
