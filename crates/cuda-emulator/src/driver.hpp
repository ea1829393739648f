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

// Whether the context is the retained primary one, or another that was created.
bool is_live(CUcontext context);

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
        if (!is_live(current)) return CUDA_ERROR_INVALID_CONTEXT;
        return sticky != CUDA_SUCCESS ? sticky : body();
    });
}

// Frees memory, modules, streams and events with their context.
void destroy_handles();
// Handles of cuda.h that stand for default streams.
inline const CUstream LEGACY_STREAM = reinterpret_cast<CUstream>(1);
inline const CUstream PER_THREAD_STREAM = reinterpret_cast<CUstream>(2);
// Whether the stream is a default one or has been created.
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
// The stream that a capture began with which this one takes part in; nullptr for none.
CUstream capture_of(CUstream stream);
// Lets `stream` go on behind what `from` had enqueued in a capture: it joins that capture, or if
// the capture began with it, `from` is joined again.
void follow(CUstream stream, CUstream from, CUstream capture);
// Forgets all graphs and recordings.
void release_graphs();

}  // namespace emulator
