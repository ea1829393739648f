// What the driver's functions share: one lock, the context, and errors that stay.
#pragma once

#include <memory>
#include <mutex>

#include "machine.hpp"

struct CUctx_st {
    unsigned retained;
    unsigned flags;
};

namespace emulator {

extern std::mutex mutex;
extern bool initialised;
extern CUctx_st primary;
// The first fault of a launch. As on a device, every later call returns it until the process ends.
extern CUresult sticky;
extern thread_local CUcontext current;

// Runs `body` under the lock once the driver is initialised.
template <class Body>
CUresult with_driver(Body body) {
    const std::lock_guard<std::mutex> lock(mutex);
    return initialised ? body() : CUDA_ERROR_NOT_INITIALIZED;
}

// Runs `body` under the lock if the calling thread has a live context and no launch has failed.
template <class Body>
CUresult with_context(Body body) {
    return with_driver([&]() -> CUresult {
        if (current == nullptr || primary.retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
        return sticky != CUDA_SUCCESS ? sticky : body();
    });
}

// Frees memory, modules, streams and events with their context.
void destroy_handles();
// Whether the stream is the default one or has been created.
bool is_stream(CUstream stream);

// A launch with the copy of its arguments that every thread reads.
struct Enqueued {
    const Kernel* kernel;
    LaunchShape shape;
    std::shared_ptr<const std::max_align_t[]> arguments;
};

// Whether launches on the stream are recorded in place of being run. Nothing else can be enqueued
// there then.
bool is_capturing(CUstream stream);
void record(CUstream stream, const Enqueued& launch);
// Forgets all graphs and recordings.
void release_graphs();

}  // namespace emulator
