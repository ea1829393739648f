// Driver functions: modules and launches. Everything enqueued is done at once, in the order of the
// calls.

#include <cstring>
#include <memory>

#include "driver.hpp"

struct CUfunc_st {
    const emulator::Kernel* kernel;
};

struct CUmod_st {
    std::list<CUfunc_st> functions;
};

namespace emulator {
namespace {

std::list<CUmod_st> modules;

const Kernel* kernel_of(CUfunction function) {
    for (CUmod_st& module : modules)
        for (CUfunc_st& known : module.functions)
            if (&known == function) return known.kernel;
    return nullptr;
}

CUresult load(CUmodule* module, const void* image) {
    return with_idle_device([&]() -> CUresult {
        if (module == nullptr || image == nullptr) return CUDA_ERROR_INVALID_VALUE;
        std::vector<const Kernel*> found;
        const CUresult refused = is_machine_code(image) ? find_kernels_of_machine_code(image, &found)
                                                        : find_kernels(static_cast<const char*>(image), &found);
        if (refused != CUDA_SUCCESS) return refused;
        modules.emplace_back();
        for (const Kernel* kernel : found) modules.back().functions.push_back({kernel});
        *module = &modules.back();
        ++counts.modules_loaded;
        return CUDA_SUCCESS;
    });
}

CUresult check_shape(const Kernel& kernel, const LaunchShape& shape) {
    const Index3 &grid = shape.grid, &block = shape.block;
    const std::string name = kernel.name;
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > GRID_X_MAX || grid.y > GRID_YZ_MAX || grid.z > GRID_YZ_MAX) {
        complain(name + ": a grid of " + text_of(grid) + " blocks cannot be launched");
        return CUDA_ERROR_INVALID_VALUE;
    }
    const unsigned long long threads = 1ull * block.x * block.y * block.z;
    if (threads == 0 || threads > BLOCK_THREADS_MAX || block.z > 64) {
        complain(name + ": a block of " + text_of(block) + " threads cannot be launched");
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (threads > kernel.block_threads_max) {
        complain(name + ": compiled for " + std::to_string(kernel.block_threads_max) + " threads, launched with " + std::to_string(threads));
        return CUDA_ERROR_INVALID_VALUE;
    }
    return shape.dynamic_shared_bytes > SHARED_BYTES_MAX ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

// The argument block among the launch's parameters, or null if it was not passed as the kernel
// takes it.
const void* argument_block(const Kernel& kernel, void** params, void** extra) {
    // CU_LAUNCH_PARAM_END, CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE
    void *const END = nullptr, *const BUFFER = reinterpret_cast<void*>(1), *const LENGTH = reinterpret_cast<void*>(2);
    if ((params == nullptr) == (extra == nullptr)) return nullptr;
    if (params != nullptr) return params[0];
    const void* buffer = nullptr;
    std::size_t len_bytes = 0;
    for (; extra[0] != END; extra += 2) {
        if (extra[0] == BUFFER) buffer = extra[1];
        if (extra[0] == LENGTH) len_bytes = *static_cast<const std::size_t*>(extra[1]);
    }
    if (len_bytes == kernel.argument_bytes) return buffer;
    complain(std::string(kernel.name) + ": takes " + std::to_string(kernel.argument_bytes) + " argument bytes, passed " +
             std::to_string(len_bytes));
    return nullptr;
}

CUresult launch(CUfunction function, const LaunchShape& shape, CUstream stream, void** params, void** extra) {
    return with_idle_stream(stream, [&]() -> CUresult {
        const Kernel* kernel = kernel_of(function);
        if (kernel == nullptr || !is_stream(stream)) return CUDA_ERROR_INVALID_HANDLE;
        if (const CUresult refused = check_shape(*kernel, shape)) return refused;
        if (kernel->argument_bytes > argument_bytes_max()) {
            complain(std::string(kernel->name) + ": takes " + std::to_string(kernel->argument_bytes) + " argument bytes, this driver passes " +
                     std::to_string(argument_bytes_max()));
            return CUDA_ERROR_INVALID_VALUE;
        }
        const void* arguments = argument_block(*kernel, params, extra);
        if (arguments == nullptr) return CUDA_ERROR_INVALID_VALUE;
        // As on a device, the block is copied when the launch is enqueued, aligned, and every
        // thread reads this one copy.
        const std::shared_ptr<std::max_align_t[]> copy(new std::max_align_t[kernel->argument_bytes / sizeof(std::max_align_t) + 1]);
        std::memcpy(copy.get(), arguments, kernel->argument_bytes);
        if (is_capturing(stream)) return record(stream, {[kernel, shape, copy] { return run_kernel(*kernel, shape, copy.get()); }, nullptr});
        // A launch is asynchronous: its fault shows in the next call.
        sticky = run_kernel(*kernel, shape, copy.get());
        return CUDA_SUCCESS;
    });
}

}  // namespace

void destroy_handles() {
    release_all();
    release_graphs();
    modules.clear();
    destroy_streams();
}

}  // namespace emulator

using namespace emulator;

extern "C" {

CUresult cuModuleLoadData(CUmodule* module, const void* image) { return load(module, image); }

CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, int*, void**) { return load(module, image); }

CUresult cuModuleUnload(CUmodule module) {
    return with_idle_device([&] {
        auto found = find(modules, module);
        if (found == modules.end()) return CUDA_ERROR_INVALID_HANDLE;
        modules.erase(found);
        ++counts.modules_unloaded;
        return CUDA_SUCCESS;
    });
}

// Under lazy loading, which is the default, this is what loads a kernel.
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    return with_idle_device([&]() -> CUresult {
        auto found = find(modules, module);
        if (found == modules.end()) return CUDA_ERROR_INVALID_HANDLE;
        if (function == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
        for (CUfunc_st& known : found->functions)
            if (std::strcmp(known.kernel->name, name) == 0) {
                *function = &known;
                ++counts.functions_found;
                return make_ready(*known.kernel);
            }
        return CUDA_ERROR_NOT_FOUND;
    });
}

CUresult cuFuncGetAttribute(int* value, int attribute, CUfunction function) {
    return with_context([&] {
        const Kernel* kernel = kernel_of(function);
        if (kernel == nullptr) return CUDA_ERROR_INVALID_HANDLE;
        // CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK; registers and the like have no meaning here.
        if (value == nullptr || attribute != 0) return CUDA_ERROR_INVALID_VALUE;
        *value = int(kernel->block_threads_max);
        return CUDA_SUCCESS;
    });
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                        unsigned block_z, unsigned shared_bytes, CUstream stream, void** params, void** extra) {
    return launch(function, {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes}, stream, params, extra);
}

CUresult cuLaunchHostFunc(CUstream stream, void (*function)(void*), void* data) {
    const CUresult result = with_idle_stream(stream, [&] {
        if (!is_stream(stream)) return CUDA_ERROR_INVALID_HANDLE;
        return function == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    });
    // Outside of the lock: it belongs to the caller.
    if (result == CUDA_SUCCESS) function(data);
    return result;
}

}  // extern "C"
