// Driver functions: memory. Copies are done when they return; a device may do the asynchronous ones
// later. What makes or frees memory waits for its device, as driver_streams.cpp says.

#include <cstdlib>
#include <cstring>
#include <map>

#include "driver.hpp"

using namespace emulator;

namespace {

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

// Page-locked memory of the host: first addresses and lengths.
std::map<const char*, std::size_t> locked;

bool is_locked(const void* address, std::size_t len_bytes) {
    const char* from = static_cast<const char*>(address);
    auto after = locked.upper_bound(from);
    if (after == locked.begin()) return false;
    const auto& [begin, length] = *--after;
    return len_bytes <= length && from <= begin + length - len_bytes;
}

CUresult copy(void* to, const void* from, size_t len_bytes, const void* device_range, const void* other_device_range, CUstream stream) {
    return with_idle_stream(stream, [&]() -> CUresult {
        if (!is_stream(stream)) return CUDA_ERROR_INVALID_HANDLE;
        // A graph reads the host's memory, or writes it, later.
        const void* of_host = to == device_range ? from : to;
        if (is_capturing(stream) && other_device_range == nullptr && !is_locked(of_host, len_bytes))
            return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        if (len_bytes == 0) return CUDA_SUCCESS;
        if (to == nullptr || from == nullptr || !is_allocated(device_range, len_bytes)) return CUDA_ERROR_INVALID_VALUE;
        if (other_device_range != nullptr && !is_allocated(other_device_range, len_bytes)) return CUDA_ERROR_INVALID_VALUE;
        const auto work = [=] {
            std::memmove(to, from, len_bytes);
            return CUDA_SUCCESS;
        };
        return is_capturing(stream) ? record(stream, {work, nullptr}) : work();
    });
}

template <class T>
CUresult fill(CUdeviceptr to, T value, size_t count, CUstream stream) {
    return with_idle_stream(stream, [&]() -> CUresult {
        if (!is_stream(stream)) return CUDA_ERROR_INVALID_HANDLE;
        if (count == 0) return CUDA_SUCCESS;
        if (count > SIZE_MAX / sizeof(T) || to % sizeof(T) != 0 || !is_allocated(pointer(to), count * sizeof(T)))
            return CUDA_ERROR_INVALID_VALUE;
        const auto work = [=] {
            T* values = static_cast<T*>(pointer(to));
            for (size_t i = 0; i < count; ++i) values[i] = value;
            return CUDA_SUCCESS;
        };
        return is_capturing(stream) ? record(stream, {work, nullptr}) : work();
    });
}

}  // namespace

extern "C" {

CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t len_bytes) {
    return with_idle_device([&] {
        void* memory = nullptr;
        if (address == nullptr) return CUresult(CUDA_ERROR_INVALID_VALUE);
        const CUresult result = allocate(len_bytes, &memory);
        if (result != CUDA_SUCCESS) return result;
        *address = reinterpret_cast<CUdeviceptr>(memory);
        ++counts.allocations;
        return result;
    });
}

CUresult cuMemFree_v2(CUdeviceptr address) {
    return with_idle_device([&] {
        const CUresult result = address == 0 ? CUresult(CUDA_SUCCESS) : release(pointer(address));
        if (result == CUDA_SUCCESS) ++counts.frees;
        return result;
    });
}

CUresult cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
    return with_context([&] {
        if (free_bytes == nullptr || total_bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
        *total_bytes = settings().memory_bytes;
        *free_bytes = *total_bytes - allocated_bytes();
        return CUDA_SUCCESS;
    });
}

CUresult cuMemAllocHost_v2(void** address, size_t len_bytes) {
    return with_idle_device([&] {
        if (address == nullptr || len_bytes == 0) return CUDA_ERROR_INVALID_VALUE;
        *address = std::malloc(len_bytes);
        if (*address == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
        locked[static_cast<const char*>(*address)] = len_bytes;
        return CUDA_SUCCESS;
    });
}

CUresult cuMemFreeHost(void* address) {
    return with_idle_device([&] {
        locked.erase(static_cast<const char*>(address));
        std::free(address);
        return CUDA_SUCCESS;
    });
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t len_bytes, CUstream stream) {
    return copy(pointer(to), from, len_bytes, pointer(to), nullptr, stream);
}

CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t len_bytes, CUstream stream) {
    return copy(to, pointer(from), len_bytes, pointer(from), nullptr, stream);
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t len_bytes, CUstream stream) {
    return copy(pointer(to), pointer(from), len_bytes, pointer(to), pointer(from), stream);
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t len_bytes) { return cuMemcpyHtoDAsync_v2(to, from, len_bytes, nullptr); }
CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t len_bytes) { return cuMemcpyDtoHAsync_v2(to, from, len_bytes, nullptr); }
CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t len_bytes) { return cuMemcpyDtoDAsync_v2(to, from, len_bytes, nullptr); }

CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count) { return fill(to, value, count, nullptr); }
CUresult cuMemsetD16_v2(CUdeviceptr to, unsigned short value, size_t count) { return fill(to, value, count, nullptr); }
CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t count) { return fill(to, value, count, nullptr); }

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
    return fill(to, value, count, stream);
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) { return fill(to, value, count, stream); }

}  // extern "C"
