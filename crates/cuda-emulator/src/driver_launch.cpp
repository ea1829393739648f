// Driver functions: modules, launches, streams and events. Everything enqueued is done at once, in
// the order of the calls.

#include <chrono>
#include <cstring>
#include <list>
#include <memory>

#include "driver.hpp"

struct CUfunc_st {
    const emulator::Kernel* kernel;
};

struct CUmod_st {
    std::list<CUfunc_st> functions;
};

struct CUstream_st {
    int priority;
    CUcontext context;
};

struct CUevent_st {
    bool recorded;
    // Where it was recorded last, and the capture that stream took part in then.
    CUstream stream, capture;
    std::chrono::steady_clock::time_point at;
};

namespace emulator {
namespace {

// Handles are nodes of these lists: their addresses stay.
std::list<CUmod_st> modules;
std::list<CUstream_st> streams;
std::list<CUevent_st> events;

template <class T>
typename std::list<T>::iterator find(std::list<T>& list, const T* handle) {
    auto at = list.begin();
    while (at != list.end() && &*at != handle) ++at;
    return at;
}

const Kernel* kernel_of(CUfunction function) {
    for (CUmod_st& module : modules)
        for (CUfunc_st& known : module.functions)
            if (&known == function) return known.kernel;
    return nullptr;
}

CUresult load(CUmodule* module, const void* image) {
    return with_context([&]() -> CUresult {
        if (module == nullptr || image == nullptr) return CUDA_ERROR_INVALID_VALUE;
        std::vector<const Kernel*> found;
        const CUresult refused = is_machine_code(image) ? find_kernels_of_machine_code(image, &found)
                                                        : find_kernels(static_cast<const char*>(image), &found);
        if (refused != CUDA_SUCCESS) return refused;
        modules.emplace_back();
        for (const Kernel* kernel : found) modules.back().functions.push_back({kernel});
        *module = &modules.back();
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
    if (shape.dynamic_shared_bytes > SHARED_BYTES_MAX) return CUDA_ERROR_INVALID_VALUE;
    const unsigned long long blocks = 1ull * grid.x * grid.y * grid.z;
    if (shape.blocks == Blocks::AllAtOnce && blocks > 1ull * MULTIPROCESSORS * blocks_per_multiprocessor(unsigned(threads)))
        return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
    return CUDA_SUCCESS;
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
    return with_context([&]() -> CUresult {
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
        if (is_capturing(stream)) {
            record(stream, {kernel, shape, copy});
            return CUDA_SUCCESS;
        }
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
    streams.clear();
    events.clear();
}

bool is_stream(CUstream stream) {
    const bool is_default = stream == nullptr || stream == LEGACY_STREAM || stream == PER_THREAD_STREAM;
    return is_default || find(streams, stream) != streams.end();
}

}  // namespace emulator

using namespace emulator;

extern "C" {

CUresult cuModuleLoadData(CUmodule* module, const void* image) { return load(module, image); }

CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, int*, void**) { return load(module, image); }

CUresult cuModuleUnload(CUmodule module) {
    return with_context([&] {
        auto found = find(modules, module);
        if (found == modules.end()) return CUDA_ERROR_INVALID_HANDLE;
        modules.erase(found);
        return CUDA_SUCCESS;
    });
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    return with_context([&]() -> CUresult {
        auto found = find(modules, module);
        if (found == modules.end()) return CUDA_ERROR_INVALID_HANDLE;
        if (function == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
        for (CUfunc_st& known : found->functions)
            if (std::strcmp(known.kernel->name, name) == 0) {
                *function = &known;
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

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction function, int block_threads, size_t shared_bytes) {
    return with_context([&] {
        const Kernel* kernel = kernel_of(function);
        if (kernel == nullptr) return CUDA_ERROR_INVALID_HANDLE;
        if (blocks == nullptr || block_threads <= 0) return CUDA_ERROR_INVALID_VALUE;
        const bool fits = unsigned(block_threads) <= kernel->block_threads_max && shared_bytes <= SHARED_BYTES_MAX;
        *blocks = fits ? int(blocks_per_multiprocessor(unsigned(block_threads))) : 0;
        return CUDA_SUCCESS;
    });
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                        unsigned block_z, unsigned shared_bytes, CUstream stream, void** params, void** extra) {
    const LaunchShape shape{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, Blocks::OneAfterTheOther};
    return launch(function, shape, stream, params, extra);
}

CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                                   unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void** params) {
    const LaunchShape shape{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, Blocks::AllAtOnce};
    return launch(function, shape, stream, params, nullptr);
}

CUresult cuLaunchHostFunc(CUstream stream, void (*function)(void*), void* data) {
    const CUresult result = with_context([&] {
        if (!is_stream(stream)) return CUDA_ERROR_INVALID_HANDLE;
        return function == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    });
    // Outside of the lock: it belongs to the caller.
    if (result == CUDA_SUCCESS) function(data);
    return result;
}

CUresult cuStreamCreate(CUstream* stream, unsigned flags) { return cuStreamCreateWithPriority(stream, flags, 0); }

CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned, int priority) {
    return with_context([&] {
        if (stream == nullptr) return CUDA_ERROR_INVALID_VALUE;
        streams.push_back({priority, current});
        *stream = &streams.back();
        return CUDA_SUCCESS;
    });
}

CUresult cuStreamDestroy_v2(CUstream stream) {
    return with_context([&] {
        auto found = find(streams, stream);
        if (found == streams.end()) return CUDA_ERROR_INVALID_HANDLE;
        streams.erase(found);
        return CUDA_SUCCESS;
    });
}

CUresult cuStreamGetCtx(CUstream stream, CUcontext* context) {
    return with_context([&] {
        if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
        if (!is_stream(stream)) return CUDA_ERROR_INVALID_HANDLE;
        const auto found = find(streams, stream);
        *context = found == streams.end() ? current : found->context;
        return CUDA_SUCCESS;
    });
}

CUresult cuStreamSynchronize(CUstream stream) {
    return with_context([&] {
        if (is_capturing(stream)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        return is_stream(stream) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    });
}

CUresult cuStreamQuery(CUstream stream) { return cuStreamSynchronize(stream); }

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
    return with_context([&] {
        if (!is_stream(stream) || find(events, event) == events.end()) return CUDA_ERROR_INVALID_HANDLE;
        if (event->capture != nullptr) follow(stream, event->stream, event->capture);
        return CUDA_SUCCESS;
    });
}

CUresult cuEventCreate(CUevent* event, unsigned) {
    return with_context([&] {
        if (event == nullptr) return CUDA_ERROR_INVALID_VALUE;
        events.push_back({false, nullptr, nullptr, {}});
        *event = &events.back();
        return CUDA_SUCCESS;
    });
}

CUresult cuEventDestroy_v2(CUevent event) {
    return with_context([&] {
        auto found = find(events, event);
        if (found == events.end()) return CUDA_ERROR_INVALID_HANDLE;
        events.erase(found);
        return CUDA_SUCCESS;
    });
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    return with_context([&] {
        if (find(events, event) == events.end() || !is_stream(stream)) return CUDA_ERROR_INVALID_HANDLE;
        event->recorded = true;
        event->stream = stream;
        event->capture = capture_of(stream);
        event->at = std::chrono::steady_clock::now();
        return CUDA_SUCCESS;
    });
}

CUresult cuEventQuery(CUevent event) { return cuEventSynchronize(event); }

CUresult cuEventSynchronize(CUevent event) {
    return with_context([&] { return find(events, event) != events.end() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE; });
}

CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
    return with_context([&] {
        if (find(events, start) == events.end() || find(events, end) == events.end()) return CUDA_ERROR_INVALID_HANDLE;
        if (milliseconds == nullptr || !start->recorded || !end->recorded) return CUDA_ERROR_INVALID_VALUE;
        *milliseconds = std::chrono::duration<float, std::milli>(end->at - start->at).count();
        return CUDA_SUCCESS;
    });
}

}  // extern "C"
