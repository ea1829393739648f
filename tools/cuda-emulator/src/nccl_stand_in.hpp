// What the stand-in for NCCL needs beside its communicators: the driver that is loaded, and
// arithmetic.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

enum Result { SUCCESS = 0, SYSTEM_ERROR = 2, INTERNAL_ERROR = 3, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6, IN_PROGRESS = 7 };
enum DataType { INT32 = 2, INT64 = 4, FLOAT32 = 7, FLOAT64 = 8, UINT8 = 1 };
enum ReduceOp { SUM, PROD, MAX, MIN, AVG };

// The driver that the process has loaded, as NCCL finds it: by the name of every driver's library.
struct Driver {
    int (*context)(void**) = nullptr;
    int (*set_context)(void*) = nullptr;
    int (*synchronize)() = nullptr;
    int (*occupy)(void*) = nullptr;
    int (*vacate)(void*) = nullptr;
    int (*is_capturing)(void*) = nullptr;
    int (*record)(void*, void (*)(void*, void*), void*, void (*)(void*)) = nullptr;

    Driver() {
        void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
        const auto find = [&](auto& function, const char* name) {
            void* found = library == nullptr ? nullptr : dlsym(library, name);
            std::memcpy(&function, &found, sizeof found);
        };
        find(context, "cuCtxGetCurrent");
        find(set_context, "cuCtxSetCurrent");
        find(synchronize, "cuCtxSynchronize");
        find(occupy, "emulatorOccupy");
        find(vacate, "emulatorVacate");
        find(is_capturing, "emulatorIsCapturing");
        find(record, "emulatorRecord");
    }
};

// Null functions, and so an error at the first communicator, without an emulated driver.
const Driver& driver() {
    static const Driver found;
    return found;
}

std::size_t length_of(int dtype) {
    switch (dtype) {
        case 0: case 1: return 1;
        case 6: case 9: return 2;
        case 2: case 3: case 7: return 4;
        default: return 8;
    }
}

template <class T>
T combined(T a, T b, int op) {
    switch (op) {
        case PROD: return T(a * b);
        case MAX: return a > b ? a : b;
        case MIN: return a < b ? a : b;
        default: return T(a + b);
    }
}

template <class T>
void reduce_as(const std::vector<std::vector<char>>& inputs, char* out, std::size_t count, int op) {
    for (std::size_t i = 0; i < count; ++i) {
        T result{};
        for (std::size_t back = 0; back < inputs.size(); ++back) {
            T value;
            std::memcpy(&value, inputs[inputs.size() - 1 - back].data() + i * sizeof(T), sizeof(T));
            result = back == 0 ? value : combined(result, value, op);
        }
        if (op == AVG) result = T(result / T(inputs.size()));
        std::memcpy(out + i * sizeof(T), &result, sizeof(T));
    }
}

bool reduce(const std::vector<std::vector<char>>& inputs, char* out, std::size_t count, int dtype, int op) {
    switch (dtype) {
        case FLOAT32: reduce_as<float>(inputs, out, count, op); return true;
        case FLOAT64: reduce_as<double>(inputs, out, count, op); return true;
        case INT32: reduce_as<std::uint32_t>(inputs, out, count, op); return true;
        case INT64: reduce_as<std::uint64_t>(inputs, out, count, op); return true;
        case UINT8: reduce_as<std::uint8_t>(inputs, out, count, op); return true;
        default: return false;
    }
}

}  // namespace
