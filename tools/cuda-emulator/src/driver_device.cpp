// Driver functions: start, errors, devices and contexts.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <list>

#include "driver.hpp"

namespace emulator {

std::mutex mutex;
bool initialised = false;
CUresult sticky = CUDA_SUCCESS;
thread_local CUcontext current = nullptr;

std::vector<CUctx_st>& primaries() {
    static std::vector<CUctx_st> all(std::size_t(settings().devices > 0 ? settings().devices : 0));
    return all;
}

namespace {

// Contexts beside the primary ones; they share their memory.
struct OtherContext : CUctx_st {
    CUdevice device;
};
std::list<OtherContext> others;

long long number_from_environment(const char* name, long long otherwise) {
    const char* text = std::getenv(name);
    return text == nullptr || *text == 0 ? otherwise : std::atoll(text);
}

Code code_from_environment() {
    const char* text = std::getenv("FUSESTEP_EMULATOR_CODE");
    return text != nullptr && std::strcmp(text, "ptx") == 0 ? Code::Ptx : Code::Sources;
}

struct ErrorText {
    CUresult code;
    const char *name, *text;
};

constexpr ErrorText ERRORS[] = {
#define X(name, number, text) {name, #name, text},
    EMULATOR_ERRORS(X)
#undef X
};

const ErrorText* find_error(CUresult code) {
    for (const ErrorText& error : ERRORS)
        if (error.code == code) return &error;
    return nullptr;
}

bool is_device(int device) { return device >= 0 && device < settings().devices; }

bool is_primary(CUcontext context) {
    for (CUctx_st& primary : primaries())
        if (&primary == context) return true;
    return false;
}

bool is_context(CUcontext context) { return is_primary(context) || find(others, context) != others.end(); }

bool any_retained() {
    for (const CUctx_st& primary : primaries())
        if (primary.retained != 0) return true;
    return false;
}

struct Attribute {
    int number, value;
};

// Numbers of cuda.h's CUdevice_attribute.
constexpr Attribute ATTRIBUTES[] = {
    {1, int(BLOCK_THREADS_MAX)},      // threads per block
    {2, int(BLOCK_THREADS_MAX)},      // block x
    {3, int(BLOCK_THREADS_MAX)},      // block y
    {4, 64},                          // block z
    {5, int(GRID_X_MAX)},             // grid x
    {6, int(GRID_YZ_MAX)},            // grid y
    {7, int(GRID_YZ_MAX)},            // grid z
    {8, int(SHARED_BYTES_MAX)},       // shared memory per block
    {10, int(WARP_THREADS)},          // warp size
    {12, 65536},                      // registers per block
    {16, MULTIPROCESSORS},            // multiprocessors
    {31, 1},                          // concurrent kernels
    {38, 4 << 20},                    // L2 cache
    {39, 2048},                       // threads per multiprocessor
    {41, 1},                          // unified addressing
    {81, int(SHARED_BYTES_MAX)},      // shared memory per multiprocessor
    {97, int(SHARED_BYTES_MAX)},      // shared memory per block, opt-in
    {106, 32},                        // blocks per multiprocessor
    {115, 0},                         // memory pools
};

const Attribute* find_attribute(int number, const Attribute* from, const Attribute* end) {
    while (from != end && from->number != number) ++from;
    return from == end ? nullptr : from;
}

}  // namespace

bool is_live(CUcontext context) {
    return is_primary(context) ? context->retained != 0 : find(others, context) != others.end();
}

const Settings& settings() {
    static const Settings read{
        int(number_from_environment("FUSESTEP_EMULATOR_DRIVER", 12040)),
        int(number_from_environment("FUSESTEP_EMULATOR_DEVICES", 1)),
        int(number_from_environment("FUSESTEP_EMULATOR_CAPABILITY", 90)),
        std::size_t(number_from_environment("FUSESTEP_EMULATOR_MEMORY_MIB", 4096)) << 20,
        code_from_environment(),
    };
    return read;
}

std::size_t argument_bytes_max() { return settings().driver_version >= 12010 ? ARGUMENT_BYTES_LARGE : ARGUMENT_BYTES_CLASSIC; }

}  // namespace emulator

using namespace emulator;

extern "C" {

CUresult cuInit(unsigned flags) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (settings().devices <= 0) return CUDA_ERROR_NO_DEVICE;
    initialised = true;
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* version) { return give(version, settings().driver_version); }

CUresult cuGetErrorName(CUresult code, const char** name) {
    const ErrorText* error = find_error(code);
    return error == nullptr ? CUDA_ERROR_INVALID_VALUE : give(name, error->name);
}

CUresult cuGetErrorString(CUresult code, const char** text) {
    const ErrorText* error = find_error(code);
    return error == nullptr ? CUDA_ERROR_INVALID_VALUE : give(text, error->text);
}

CUresult cuDeviceGetCount(int* count) {
    return with_driver([&] { return give(count, settings().devices); });
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    return with_driver([&] { return is_device(ordinal) ? give(device, ordinal) : CUDA_ERROR_INVALID_DEVICE; });
}

CUresult cuDeviceGetName(char* name, int len_bytes, CUdevice device) {
    return with_driver([&] {
        if (name == nullptr || len_bytes <= 0) return CUDA_ERROR_INVALID_VALUE;
        if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
        std::snprintf(name, std::size_t(len_bytes), "fusestep CUDA emulator");
        return CUDA_SUCCESS;
    });
}

CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
    return with_driver([&] {
        if (uuid == nullptr) return CUDA_ERROR_INVALID_VALUE;
        if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
        std::memcpy(uuid->bytes, "fusestep-emulate", sizeof uuid->bytes);
        uuid->bytes[15] = char(uuid->bytes[15] + device);
        return CUDA_SUCCESS;
    });
}

CUresult cuDeviceTotalMem_v2(size_t* len_bytes, CUdevice device) {
    return with_driver([&] { return is_device(device) ? give(len_bytes, settings().memory_bytes) : CUDA_ERROR_INVALID_DEVICE; });
}

CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
    return with_driver([&]() -> CUresult {
        if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
        const int capability = settings().compute_capability;
        const Attribute of_capability[] = {{75, capability / 10}, {76, capability % 10}};
        const Attribute* found = find_attribute(attribute, std::begin(of_capability), std::end(of_capability));
        if (found == nullptr) found = find_attribute(attribute, std::begin(ATTRIBUTES), std::end(ATTRIBUTES));
        return found == nullptr ? CUDA_ERROR_INVALID_VALUE : give(value, found->value);
    });
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    return with_driver([&]() -> CUresult {
        if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
        if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
        if (sticky != CUDA_SUCCESS) return sticky;
        *context = &primaries()[std::size_t(device)];
        ++(*context)->retained;
        return CUDA_SUCCESS;
    });
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    return with_driver([&] {
        if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
        CUctx_st& primary = primaries()[std::size_t(device)];
        if (primary.retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
        --primary.retained;
        if (!any_retained()) destroy_handles();
        return CUDA_SUCCESS;
    });
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    return with_driver([&] {
        if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
        destroy_handles();
        return CUDA_SUCCESS;
    });
}

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags) {
    return with_driver([&] {
        if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
        primaries()[std::size_t(device)].flags = flags;
        return CUDA_SUCCESS;
    });
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
    return with_driver([&] {
        if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
        if (flags == nullptr || active == nullptr) return CUDA_ERROR_INVALID_VALUE;
        *flags = primaries()[std::size_t(device)].flags;
        *active = primaries()[std::size_t(device)].retained != 0;
        return CUDA_SUCCESS;
    });
}

CUresult cuCtxCreate_v2(CUcontext* context, unsigned flags, CUdevice device) {
    return with_driver([&]() -> CUresult {
        if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
        if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
        if (sticky != CUDA_SUCCESS) return sticky;
        others.push_back({{1, flags}, device});
        *context = current = &others.back();
        return CUDA_SUCCESS;
    });
}

CUresult cuCtxDestroy_v2(CUcontext context) {
    return with_driver([&] {
        const auto found = find(others, context);
        if (found == others.end()) return CUDA_ERROR_INVALID_CONTEXT;
        if (current == context) current = nullptr;
        others.erase(found);
        return CUDA_SUCCESS;
    });
}

CUresult cuCtxSetCurrent(CUcontext context) {
    return with_driver([&] {
        if (context != nullptr && !is_context(context)) return CUDA_ERROR_INVALID_CONTEXT;
        current = context;
        return CUDA_SUCCESS;
    });
}

CUresult cuCtxGetCurrent(CUcontext* context) {
    return with_driver([&] { return give(context, current); });
}

CUresult cuCtxPushCurrent_v2(CUcontext context) { return cuCtxSetCurrent(context); }

CUresult cuCtxPopCurrent_v2(CUcontext* context) {
    return with_driver([&] {
        if (context != nullptr) *context = current;
        current = nullptr;
        return CUDA_SUCCESS;
    });
}

CUresult cuCtxGetDevice(CUdevice* device) {
    return with_context([&] {
        return give(device, is_primary(current) ? CUdevice(current - primaries().data()) : find(others, current)->device);
    });
}

CUresult cuCtxGetFlags(unsigned* flags) {
    return with_context([&] { return give(flags, current->flags); });
}

CUresult cuCtxGetApiVersion(CUcontext context, unsigned* version) {
    return with_driver([&] {
        if (!is_context(context) || version == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
        *version = 3020;
        return CUDA_SUCCESS;
    });
}

CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    return with_context([&] {
        if (least != nullptr) *least = 0;
        if (greatest != nullptr) *greatest = 0;
        return CUDA_SUCCESS;
    });
}

CUresult cuCtxSynchronize(void) {
    return with_idle_device([] { return CUDA_SUCCESS; });
}

}  // extern "C"
