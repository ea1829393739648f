// The test kernels run on the host only.
#pragma once
#include "device_language.hpp"

template <int BYTES>
struct alignas(8) Arguments {
    unsigned char bytes[BYTES];
};

// What every test kernel is told.
struct Task {
    unsigned long long in, out, count;
    unsigned long long option;
};

template <int BYTES>
inline const Task& task(const Arguments<BYTES>& arguments) {
    return *reinterpret_cast<const Task*>(arguments.bytes);
}
