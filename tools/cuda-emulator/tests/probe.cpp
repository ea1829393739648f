// Calls the emulated driver as a program would. `probe CHECK` prints what went wrong and returns 1,
// or returns 0.

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "driver_api.hpp"

namespace {

bool failed = false;

void expect(long long found, long long expected, const char* what) {
    if (found == expected) return;
    std::printf("%s: expected %lld, found %lld\n", what, expected, found);
    failed = true;
}
#define EXPECT(call, expected) expect((call), (expected), #call)

struct Task {
    unsigned long long in, out, count, option;
};

union Block {
    Task task;
    unsigned char bytes[32760];
};

const char* const ENTRIES[][2] = {{"twice_small", "64"}, {"twice_large", "32760"}, {"packs", "64"},      {"beside_the_dialect", "64"},
                                  {"block_sums", "64"},  {"half_leave", "64"}, {"two_barriers", "64"},
                                  {"two_masks", "64"},   {"hungry", "64"},         {"last_faults", "64"}};

std::string header(const char* version = "8.4", const char* target = "sm_70") {
    return std::string("// made up\n.version ") + version + "\n.target " + target + "\n.address_size 64\n";
}

std::string entry(const char* name, const char* bytes) {
    return std::string("\n.visible .entry ") + name + "(\n\t.param .align 8 .b8 " + name + "_param_0[" + bytes + "]\n)\n.maxntid 512, 1, 1\n{\n}\n";
}

std::string whole() {
    std::string ptx = header();
    for (auto& e : ENTRIES) ptx += entry(e[0], e[1]);
    return ptx;
}

struct Device {
    CUcontext context = nullptr;
    CUmodule module = nullptr;
    CUdeviceptr in = 0, out = 0;
    Device() {
        EXPECT(cuInit(0), 0);
        EXPECT(cuDevicePrimaryCtxRetain(&context, 0), 0);
        EXPECT(cuCtxSetCurrent(context), 0);
        EXPECT(cuModuleLoadData(&module, whole().c_str()), 0);
        EXPECT(cuMemAlloc_v2(&in, 4096), 0);
        EXPECT(cuMemAlloc_v2(&out, 4096), 0);
    }
    CUfunction function(const char* name) {
        CUfunction function = nullptr;
        EXPECT(cuModuleGetFunction(&function, module, name), 0);
        return function;
    }
    CUresult run(const char* name, unsigned grid, unsigned block, Task task) {
        Block arguments{};
        arguments.task = task;
        void* params[] = {&arguments};
        return cuLaunchKernel(function(name), grid, 1, 1, block, 1, 1, 0, nullptr, params, nullptr);
    }
};

void threads_that_never_wait() {
    Device device;
    std::vector<float> values(1024), found(1024);
    for (int i = 0; i < 1024; ++i) values[i] = float(i);
    EXPECT(cuMemcpyHtoD_v2(device.in, values.data(), 4096), 0);
    for (const char* name : {"twice_small", "twice_large"})
        for (unsigned grid : {1u, 3u, 64u}) {
            EXPECT(cuMemsetD8_v2(device.out, 0, 4096), 0);
            EXPECT(device.run(name, grid, 96, {device.in, device.out, 1024, 0}), 0);
            EXPECT(cuMemcpyDtoH_v2(found.data(), device.out, 4096), 0);
            for (int i = 0; i < 1024; ++i) EXPECT((long long)found[i], 2 * i);
        }
    EXPECT(device.run("packs", 1, 256, {device.in, device.out, 0, 0}), 0);
    EXPECT(cuMemcpyDtoH_v2(found.data(), device.out, 4096), 0);
    EXPECT(found[1023] == 31.9843712f && found[2] == 1.41421354f, 1);
    EXPECT(cuCtxSynchronize(), 0);
}

void threads_that_wait() {
    Device device;
    std::vector<unsigned> values(1000);
    for (unsigned i = 0; i < 1000; ++i) values[i] = i * i;
    const unsigned long long all = 999ull * 1000 * 1999 / 6;
    EXPECT(cuMemcpyHtoD_v2(device.in, values.data(), 4000), 0);
    for (unsigned block : {32u, 128u, 1024u})
        for (unsigned grid : {1u, 5u, 8u}) {
            std::vector<unsigned long long> sums(grid);
            EXPECT(device.run("block_sums", grid, block, {device.in, device.out, 1000, 0}), 0);
            EXPECT(cuMemcpyDtoH_v2(sums.data(), device.out, 8 * grid), 0);
            unsigned long long sum = 0;
            for (auto value : sums) sum += value;
            expect((long long)sum, (long long)all, "block_sums");
        }
    EXPECT(cuCtxSynchronize(), 0);
}

// A kernel fails, the launch does not, and every later call does.
void fault(const char* kernel, unsigned block, Task offsets, CUresult code) {
    Device device;
    offsets.in += device.in;
    offsets.out += device.out;
    EXPECT(device.run(kernel, 2, block, offsets), 0);
    expect(cuCtxSynchronize(), code, kernel);
    CUdeviceptr more = 0;
    expect(cuMemAlloc_v2(&more, 16), code, "a later call");
    expect(cuMemFree_v2(device.in), code, "a later call");
}

void freed_memory() {
    Device device;
    EXPECT(cuMemFree_v2(device.in), 0);
    EXPECT(cuMemFree_v2(device.in), CUDA_ERROR_INVALID_VALUE);
    EXPECT(device.run("twice_small", 1, 32, {device.in, device.out, 32, 0}), 0);
    EXPECT(cuStreamSynchronize(nullptr), CUDA_ERROR_ILLEGAL_ADDRESS);
}

void memory_table() {
    Device device;
    char host[64];
    size_t free_bytes = 0, total_bytes = 0;
    CUdeviceptr more = 0;
    EXPECT(device.in % 256, 0);
    EXPECT(cuMemcpyDtoH_v2(host, device.in + 4090, 6), 0);
    EXPECT(cuMemcpyDtoH_v2(host, device.in + 4090, 7), CUDA_ERROR_INVALID_VALUE);
    EXPECT(cuMemcpyHtoD_v2(device.in + 4097, host, 1), CUDA_ERROR_INVALID_VALUE);
    EXPECT(cuMemsetD32_v2(device.in, 1, 1025), CUDA_ERROR_INVALID_VALUE);
    EXPECT(cuMemFree_v2(device.in + 16), CUDA_ERROR_INVALID_VALUE);
    EXPECT(cuMemAlloc_v2(&more, 0), CUDA_ERROR_INVALID_VALUE);
    EXPECT(cuMemGetInfo_v2(&free_bytes, &total_bytes), 0);
    EXPECT(total_bytes - free_bytes, 8192);
    EXPECT(cuMemAlloc_v2(&more, free_bytes + 1), CUDA_ERROR_OUT_OF_MEMORY);
}

void launch_arguments() {
    Device device;
    const Task task{device.in, device.out, 0, 0};
    EXPECT(device.run("twice_small", 0, 32, task), CUDA_ERROR_INVALID_VALUE);
    EXPECT(device.run("twice_small", 1u << 31, 32, task), CUDA_ERROR_INVALID_VALUE);
    EXPECT(device.run("twice_small", 1, 0, task), CUDA_ERROR_INVALID_VALUE);
    EXPECT(device.run("twice_small", 1, 513, task), CUDA_ERROR_INVALID_VALUE);
    EXPECT(device.run("half_leave", 1, 1025, task), CUDA_ERROR_INVALID_VALUE);
    CUfunction small = device.function("twice_small"), none = nullptr;
    EXPECT(cuModuleGetFunction(&none, device.module, "thrice"), CUDA_ERROR_NOT_FOUND);
    EXPECT(cuLaunchKernel(small, 1, 1, 1, 32, 1, 1, 0, nullptr, nullptr, nullptr), CUDA_ERROR_INVALID_VALUE);
    EXPECT(cuLaunchKernel(small, 1, 70000, 1, 32, 1, 1, 0, nullptr, nullptr, nullptr), CUDA_ERROR_INVALID_VALUE);
    Block arguments{};
    arguments.task = task;
    size_t len_bytes = 64;
    void* extra[] = {(void*)1, &arguments, (void*)2, &len_bytes, nullptr};
    EXPECT(cuLaunchKernel(small, 1, 1, 1, 32, 1, 1, 0, nullptr, nullptr, extra), 0);
    len_bytes = 72;
    EXPECT(cuLaunchKernel(small, 1, 1, 1, 32, 1, 1, 0, nullptr, nullptr, extra), CUDA_ERROR_INVALID_VALUE);
    void* params[] = {&arguments};
    EXPECT(cuLaunchKernel((CUfunction)params, 1, 1, 1, 32, 1, 1, 0, nullptr, params, nullptr), CUDA_ERROR_INVALID_HANDLE);
    EXPECT(cuLaunchKernel(small, 1, 1, 1, 32, 1, 1, 0, (CUstream)params, params, nullptr), CUDA_ERROR_INVALID_HANDLE);
    EXPECT(cuCtxSynchronize(), 0);
}

void ptx_headers() {
    Device device;
    CUmodule module = nullptr;
    auto load = [&](const std::string& ptx) { return cuModuleLoadDataEx(&module, ptx.c_str(), 0, nullptr, nullptr); };
    EXPECT(load(header() + entry("packs", "64")), 0);
    EXPECT(load(header("8.5") + entry("packs", "64")), CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
    EXPECT(load(header("8.4", "sm_100") + entry("packs", "64")), CUDA_ERROR_NO_BINARY_FOR_GPU);
    EXPECT(load(header() + entry("packs", "72")), CUDA_ERROR_INVALID_PTX);
    EXPECT(load(header() + entry("unknown", "64")), CUDA_ERROR_INVALID_PTX);
    EXPECT(load(header()), CUDA_ERROR_INVALID_PTX);
    EXPECT(load("\x7f" "ELF"), CUDA_ERROR_INVALID_IMAGE);
}

// With FUSESTEP_EMULATOR_DRIVER=12000.
void old_driver() {
    EXPECT(cuInit(0), 0);
    CUcontext context = nullptr;
    CUmodule module = nullptr;
    CUfunction large = nullptr;
    EXPECT(cuDevicePrimaryCtxRetain(&context, 0), 0);
    EXPECT(cuCtxSetCurrent(context), 0);
    EXPECT(cuModuleLoadData(&module, whole().c_str()), CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
    EXPECT(cuModuleLoadData(&module, (header("8.0") + entry("twice_large", "32760")).c_str()), 0);
    EXPECT(cuModuleGetFunction(&large, module, "twice_large"), 0);
    Block arguments{};
    void* params[] = {&arguments};
    EXPECT(cuLaunchKernel(large, 1, 1, 1, 32, 1, 1, 0, nullptr, params, nullptr), CUDA_ERROR_INVALID_VALUE);
}

// With FUSESTEP_EMULATOR_DEVICES=0.
void no_device() {
    int count = 1;
    EXPECT(cuInit(0), CUDA_ERROR_NO_DEVICE);
    EXPECT(cuDeviceGetCount(&count), CUDA_ERROR_NOT_INITIALIZED);
    const char* name = nullptr;
    EXPECT(cuGetErrorName(CUDA_ERROR_NO_DEVICE, &name), 0);
    EXPECT(std::strcmp(name, "CUDA_ERROR_NO_DEVICE"), 0);
    EXPECT(cuGetErrorName(12345, &name), CUDA_ERROR_INVALID_VALUE);
}

void no_context() {
    CUdeviceptr address = 0;
    EXPECT(cuMemAlloc_v2(&address, 16), CUDA_ERROR_NOT_INITIALIZED);
    EXPECT(cuInit(0), 0);
    EXPECT(cuMemAlloc_v2(&address, 16), CUDA_ERROR_INVALID_CONTEXT);
    {
        Device device;
        EXPECT(cuMemAlloc_v2(&address, 16), 0);
        EXPECT(cuDevicePrimaryCtxRelease_v2(0), 0);
    }
    EXPECT(cuMemAlloc_v2(&address, 16), CUDA_ERROR_INVALID_CONTEXT);
}

unsigned long long waits() {
    unsigned long long counts[6];
    emulatorCounts(counts);
    return counts[5];
}

// What somebody has put into a stream keeps calls that wait for all work of its device, and no
// others.
void occupied_streams() {
    Device device;
    CUcontext second = nullptr;
    CUstream stream = nullptr;
    CUevent event = nullptr;
    EXPECT(cuDevicePrimaryCtxRetain(&second, 1), 0);
    EXPECT(cuStreamCreate(&stream, 1), 0);
    EXPECT(cuEventCreate(&event, 0), 0);
    CUdeviceptr memory = 0;
    CUmodule module = nullptr;
    CUfunction function = nullptr;
    void* host = nullptr;
    const std::pair<const char*, std::function<CUresult()>> calls[] = {
        {"cuMemAlloc", [&] { return cuMemAlloc_v2(&memory, 16); }},
        {"cuMemFree", [&] { return cuMemFree_v2(memory); }},
        {"cuMemAllocHost", [&] { return cuMemAllocHost_v2(&host, 16); }},
        {"cuMemFreeHost", [&] { return cuMemFreeHost(host); }},
        {"cuModuleLoadData", [&] { return cuModuleLoadData(&module, whole().c_str()); }},
        {"cuModuleGetFunction", [&] { return cuModuleGetFunction(&function, module, "packs"); }},
        {"cuModuleUnload", [&] { return cuModuleUnload(module); }},
        {"cuCtxSynchronize", [] { return cuCtxSynchronize(); }},
        {"cuStreamSynchronize", [&] { return cuStreamSynchronize(stream); }},
        {"cuEventSynchronize", [&] { return cuEventSynchronize(event); }},
        {"cuMemsetD8Async", [&] { return cuMemsetD8Async(device.in, 0, 16, stream); }},
    };
    unsigned long long started = 0;
    for (const auto& [name, call] : calls) {
        EXPECT(emulatorOccupy(stream), 0);
        EXPECT(cuEventRecord(event, stream), 0);
        EXPECT(cuEventQuery(event), CUDA_ERROR_NOT_READY);
        EXPECT(cuStreamQuery(stream), CUDA_ERROR_NOT_READY);
        std::atomic<bool> returned{false};
        std::thread thread([&, &call = call, name = name] {
            cuCtxSetCurrent(device.context);
            expect(call(), 0, name);
            returned = true;
        });
        // A busy machine may start the thread late: the first eight are counted once they wait.
        started = started < 8 ? started + 1 : started;
        for (int tries = 0; tries < 1000 && waits() < started; ++tries) std::this_thread::sleep_for(std::chrono::milliseconds(10));
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        expect(returned, false, name);
        EXPECT(emulatorVacate(stream), 0);
        thread.join();
        EXPECT(cuEventQuery(event), 0);
        EXPECT(cuStreamQuery(stream), 0);
    }
    EXPECT(waits(), 8);
    EXPECT(emulatorVacate(stream), CUDA_ERROR_INVALID_HANDLE);
    EXPECT(emulatorOccupy(nullptr), CUDA_ERROR_INVALID_HANDLE);
    // Neither another stream nor another device waits.
    function = device.function("packs");
    Block arguments{};
    arguments.task = {device.in, device.out, 0, 0};
    void* params[] = {&arguments};
    EXPECT(emulatorOccupy(stream), 0);
    EXPECT(cuLaunchKernel(function, 1, 1, 1, 256, 1, 1, 0, nullptr, params, nullptr), 0);
    EXPECT(cuMemsetD8_v2(device.in, 0, 16), 0);
    EXPECT(cuCtxSetCurrent(second), 0);
    int index = 0;
    EXPECT(cuCtxGetDevice(&index), 0);
    EXPECT(index, 1);
    EXPECT(cuMemAlloc_v2(&memory, 16), 0);
    EXPECT(cuMemFree_v2(memory), 0);
    EXPECT(cuCtxSynchronize(), 0);
    EXPECT(waits(), 8);
}

struct Check {
    const char* name;
    void (*run)();
};

const Check CHECKS[] = {
    {"threads_that_never_wait", threads_that_never_wait},
    {"threads_that_wait", threads_that_wait},
    {"freed_memory", freed_memory},
    {"memory_table", memory_table},
    {"launch_arguments", launch_arguments},
    {"ptx_headers", ptx_headers},
    {"old_driver", old_driver},
    {"no_device", no_device},
    {"no_context", no_context},
    {"occupied_streams", occupied_streams},
    {"load_past_the_end", [] { fault("twice_small", 64, {4096 - 4 * 100, 0, 101, 0}, CUDA_ERROR_ILLEGAL_ADDRESS); }},
    {"store_past_the_end", [] { fault("twice_small", 64, {0, 4096 - 4 * 100, 200, 0}, CUDA_ERROR_ILLEGAL_ADDRESS); }},
    {"before_the_start", [] { fault("twice_small", 64, {0, 0, 10, (unsigned long long)-4}, CUDA_ERROR_ILLEGAL_ADDRESS); }},
    {"misaligned", [] { fault("twice_small", 64, {0, 0, 10, 2}, CUDA_ERROR_MISALIGNED_ADDRESS); }},
    {"misaligned_pack", [] { fault("packs", 8, {0, 0, 0, 4}, CUDA_ERROR_MISALIGNED_ADDRESS); }},
    {"half_leave", [] { fault("half_leave", 64, {}, CUDA_ERROR_LAUNCH_FAILED); }},
    {"two_barriers", [] { fault("two_barriers", 64, {}, CUDA_ERROR_LAUNCH_FAILED); }},
    {"two_masks", [] { fault("two_masks", 64, {}, CUDA_ERROR_LAUNCH_FAILED); }},
    {"missing_lane", [] { fault("two_masks", 31, {}, CUDA_ERROR_LAUNCH_FAILED); }},
    {"hungry", [] { fault("hungry", 64, {}, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES); }},
    {"last_faults", [] { fault("last_faults", 64, {0, 0, 1024, 0}, CUDA_ERROR_ILLEGAL_ADDRESS); }},
    {"beside_the_dialect", [] { fault("beside_the_dialect", 32, {0, 0, 0, 8200}, CUDA_SUCCESS); }},
};

}  // namespace

int main(int count, char** arguments) {
    for (const Check& check : CHECKS)
        if (count == 2 && std::strcmp(arguments[1], check.name) == 0) {
            check.run();
            return failed ? 1 : 0;
        }
    std::printf("no such check\n");
    return 2;
}
