// The emulated device: memory, kernels and how a launch runs. One mutex guards all of it;
// driver*.cpp takes it in every call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "device_language.hpp"
#include "driver_api.hpp"

namespace emulator {

// Ends a launch; thrown in a CUDA thread and caught at the bottom of its stack.
struct Fault {
    CUresult code;
    std::string text;
};

// What the device is like.
constexpr int MULTIPROCESSORS = 4;
constexpr unsigned WARP_THREADS = 32;
constexpr unsigned BLOCK_THREADS_MAX = 1024;
constexpr unsigned GRID_X_MAX = 2147483647u;
constexpr unsigned GRID_YZ_MAX = 65535u;
constexpr std::size_t SHARED_BYTES_MAX = 48 * 1024;
constexpr std::size_t ARGUMENT_BYTES_CLASSIC = 4096;
constexpr std::size_t ARGUMENT_BYTES_LARGE = 32764;

// What a module's entries run as: the kernels compiled in under the same names, or the
// instructions of its text.
enum class Code { Sources, Ptx };

// What the environment says; read once.
struct Settings {
    int driver_version;         // FUSESTEP_EMULATOR_DRIVER, 12040
    int devices;                // FUSESTEP_EMULATOR_DEVICES, 1; they share memory
    int compute_capability;     // FUSESTEP_EMULATOR_CAPABILITY, 90: ten times major and minor
    std::size_t memory_bytes;   // FUSESTEP_EMULATOR_MEMORY_MIB, 4096 MiB
    Code code;                  // FUSESTEP_EMULATOR_CODE, sources
};
const Settings& settings();
// Drivers from 12.1 on take large arguments.
std::size_t argument_bytes_max();

// Memory: one table of live allocations, kept in address order.
CUresult allocate(std::size_t len_bytes, void** address);
CUresult release(void* address);
void release_all();
std::size_t allocated_bytes();
// Whether all the bytes lie in one live allocation.
bool is_allocated(const void* address, std::size_t len_bytes);

// Reads the entries that a PTX text declares; finds the kernels compiled from the same sources, or
// makes kernels of the text itself.
CUresult find_kernels(const char* ptx, std::vector<const Kernel*>* found);
// As find_kernels, of a file of machine code, whose entries run as the kernels compiled in.
bool is_machine_code(const void* image);
CUresult find_kernels_of_machine_code(const void* image, std::vector<const Kernel*>* found);
// The kernel compiled in under this name, or null.
const Kernel* compiled_kernel(const std::string& name);
// What has to be done once before a kernel is launched.
CUresult make_ready(const Kernel& kernel);

struct LaunchShape {
    Index3 grid, block;
    std::size_t dynamic_shared_bytes;
};
// Runs every thread; returns the fault that ended the launch, or success.
CUresult run_kernel(const Kernel& kernel, const LaunchShape& shape, const void* arguments);

// One line on standard error.
void complain(const std::string& text);
std::string text_of(const Index3& index);

}  // namespace emulator
