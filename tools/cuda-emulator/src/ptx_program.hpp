// A PTX entry, read and decoded: what `ptx_run.cpp` executes.
//
// Every operand is the number of a row: 32 slots of 64 bits, one for each lane of a warp. Registers
// have rows, and so has each constant, each special register and each symbol of an entry, filled in
// before its threads start. An instruction therefore never asks what kind of operand it has.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <map>
#include <string>
#include <vector>

#include "machine.hpp"

namespace emulator {
namespace ptx {

constexpr unsigned LANES = WARP_THREADS;
constexpr std::uint32_t ALL_LANES = 0xffffffffu;
constexpr std::uint32_t NO_ROW = 0xffffffffu;

// Addresses in the state spaces that have their own. Neither begins at 0: a null pointer is a fault
// in every space.
constexpr std::uint64_t SHARED_BASE = 0x400;
constexpr std::uint64_t PARAMETER_BASE = 0x210;
// Where those spaces lie among generic addresses; the host has no memory there.
constexpr std::uint64_t SHARED_WINDOW = std::uint64_t(1) << 60;
constexpr std::uint64_t PARAMETER_WINDOW = std::uint64_t(2) << 60;

enum class Space : std::uint8_t { Generic, Global, Shared, Parameter };
constexpr const char* SPACE_NAMES[] = {"generic", "global", "shared", "parameter"};

enum class Kind : std::uint8_t { Compute, Branch, Return, Barrier, Shuffle };

// What instructions cost beside their number: arithmetic in f64, of which many devices have little,
// and divisions and roots, which the assembler makes dozens of instructions of.
enum class Unit : std::uint8_t { Plain, Double, Division };
constexpr std::size_t UNITS = 3;

enum class Extend : std::uint8_t { Zero, Sign };
enum class Shuffle : std::uint8_t { Up, Down, Butterfly, Index };

struct Warp;
struct Instruction;
using Handler = void (*)(Warp&, const Instruction&, std::uint32_t lanes);

struct Instruction {
    Handler run = nullptr;
    Kind kind = Kind::Compute;
    Unit unit = Unit::Plain;
    // A predicate's row; lanes take part where it differs from `guard_skips`.
    std::uint32_t guard = NO_ROW;
    std::uint64_t guard_skips = 0;
    // Results first, then sources; of an access, what it loads into or stores.
    std::array<std::uint32_t, 6> at{NO_ROW, NO_ROW, NO_ROW, NO_ROW, NO_ROW, NO_ROW};
    std::uint32_t target = 0;  // of a branch

    // Accesses: `count` elements of `element_bytes` at row `address` + `offset`.
    std::uint32_t address = NO_ROW;
    std::int64_t offset = 0;
    Space space = Space::Generic;
    Extend extend = Extend::Zero;
    std::uint8_t count = 1;
    std::uint8_t element_bytes = 0;

    Shuffle shuffle = Shuffle::Butterfly;
    std::uint32_t line = 0;  // of the module's text
    std::string text;
};

enum class Special : std::uint8_t {
    ThreadX, ThreadY, ThreadZ, BlockX, BlockY, BlockZ, BlockSizeX, BlockSizeY, BlockSizeZ,
    GridX, GridY, GridZ, Lane, WarpNumber, LaneMaskBelow,
};

struct Constant {
    std::uint32_t row;
    std::uint64_t value;
};

struct SpecialRow {
    std::uint32_t row;
    Special special;
};

// What the threads of an entry have done, over all launches.
struct Counts {
    std::uint64_t launches = 0, instructions = 0;
    std::array<std::uint64_t, UNITS> by_unit{};
    // Of global memory, by the logarithm of the bytes of one access.
    std::array<std::uint64_t, 6> loads{}, stores{};
    // 32-byte sectors of it that the accesses of a warp touch together.
    std::uint64_t load_sectors = 0, store_sectors = 0;
};

struct Module;

struct Entry {
    Kernel kernel{};
    const Module* module = nullptr;
    std::string name;
    // The text from the entry's name to its closing brace, and where it begins.
    std::string text;
    std::uint32_t first_line = 0;
    bool decoded = false;
    std::vector<Instruction> code;
    std::uint32_t rows = 0;
    std::vector<Constant> constants;
    std::vector<SpecialRow> specials;
    std::size_t shared_bytes = 0;
    Counts counts;
};

struct SharedSymbol {
    std::size_t alignment, len_bytes;
};

struct Module {
    std::vector<Entry*> entries;
    // Shared memory that the module declares outside of its entries.
    std::map<std::string, SharedSymbol> shared;
};

// Why a text is not a program that can be run.
struct Refusal {
    std::uint32_t line;
    std::string text;
};

// How an opcode computes, without its guard and operands; `sources` follow one result.
struct Form {
    Handler run;
    unsigned sources;
    // Of the result and of each source; 0 is a predicate.
    std::array<std::uint8_t, 6> operand_bytes;
};
// Null for an opcode that computes nothing here.
const Form* find_form(const std::string& opcode);

// Accesses and shuffles: opcodes that are read by their parts. False if it is none of them.
bool decode_access(const std::vector<std::string>& parts, Instruction* instruction);

// The entries of a text, not yet decoded; throws Refusal.
Module read_module(const std::string& text);
// Reads the body of an entry; throws Refusal with the instruction that it does not know.
void decode(Entry* entry);

// Appends a line for each entry that has run to the file that the environment names.
void write_counts(const std::list<Entry>& entries);

// Runs every thread; returns the fault that ended the launch, or success.
CUresult run_entry(Entry& entry, const LaunchShape& shape, const void* arguments);

}  // namespace ptx
}  // namespace emulator
