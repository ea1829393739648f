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

std::list<OtherContext>::iterator find_other(CUcontext context) {
    auto at = others.begin();
    while (at != others.end() && &*at != context) ++at;
    return at;
}

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
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {CUDA_ERROR_INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {CUDA_ERROR_UNSUPPORTED_PTX_VERSION, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
     "the provided PTX was compiled with an unsupported toolchain."},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {CUDA_ERROR_MISALIGNED_ADDRESS, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "too many blocks in cooperative launch"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "dependency created on uncaptured work in another stream"},
    {CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
     "capturing stream has unjoined work"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
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

bool is_context(CUcontext context) { return is_primary(context) || find_other(context) != others.end(); }

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
    {39, int(MULTIPROCESSOR_THREADS)},  // threads per multiprocessor
    {41, 1},                          // unified addressing
    {81, int(SHARED_BYTES_MAX)},      // shared memory per multiprocessor
    {95, 1},                          // cooperative launch
    {97, int(SHARED_BYTES_MAX)},      // shared memory per block, opt-in
    {106, int(MULTIPROCESSOR_BLOCKS)},  // blocks per multiprocessor
    {115, 0},                         // memory pools
};

const Attribute* find_attribute(int number, const Attribute* from, const Attribute* end) {
    while (from != end && from->number != number) ++from;
    return from == end ? nullptr : from;
}

}  // namespace

bool is_live(CUcontext context) {
    return is_primary(context) ? context->retained != 0 : find_other(context) != others.end();
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

CUresult cuDriverGetVersion(int* version) {
    if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *version = settings().driver_version;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult code, const char** name) {
    const ErrorText* error = find_error(code);
    if (name == nullptr || error == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *name = error->name;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult code, const char** text) {
    const ErrorText* error = find_error(code);
    if (text == nullptr || error == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *text = error->text;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
    return with_driver([&] {
        if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
        *count = settings().devices;
        return CUDA_SUCCESS;
    });
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    return with_driver([&] {
        if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
        if (!is_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
        *device = ordinal;
        return CUDA_SUCCESS;
    });
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
    return with_driver([&] {
        if (len_bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
        if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
        *len_bytes = settings().memory_bytes;
        return CUDA_SUCCESS;
    });
}

CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
    return with_driver([&] {
        if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
        const int capability = settings().compute_capability;
        const Attribute of_capability[] = {{75, capability / 10}, {76, capability % 10}};
        const Attribute* found = find_attribute(attribute, std::begin(of_capability), std::end(of_capability));
        if (found == nullptr) found = find_attribute(attribute, std::begin(ATTRIBUTES), std::end(ATTRIBUTES));
        if (value == nullptr || found == nullptr) return CUDA_ERROR_INVALID_VALUE;
        *value = found->value;
        return CUDA_SUCCESS;
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
        const auto found = find_other(context);
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
    return with_driver([&] {
        if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
        *context = current;
        return CUDA_SUCCESS;
    });
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
        if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
        *device = is_primary(current) ? CUdevice(current - primaries().data()) : find_other(current)->device;
        return CUDA_SUCCESS;
    });
}

CUresult cuCtxGetFlags(unsigned* flags) {
    return with_context([&] {
        if (flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
        *flags = current->flags;
        return CUDA_SUCCESS;
    });
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
