// What the driver's functions share: one lock, the context, and errors that stay.
#pragma once

#include <condition_variable>
#include <functional>
#include <list>
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
// The primary context of each device. Devices share memory and handles, so that programs that use
// one each cannot tell; a context says whose streams a call waits for.
std::vector<CUctx_st>& primaries();
// The first fault of a launch. As on a device, every later call returns it until the process ends.
extern CUresult sticky;
extern thread_local CUcontext current;

// Whether the context is a retained primary one, or another that was created.
bool is_live(CUcontext context);

// Runs `body` under the lock once the driver is initialised.
template <class Body>
CUresult with_driver(Body body) {
    const std::lock_guard<std::mutex> lock(mutex);
    return initialised ? body() : CUDA_ERROR_NOT_INITIALIZED;
}

// Runs `body` under the lock if the calling thread has a live context and no launch has failed;
// `before` may wait.
template <class Before, class Body>
CUresult with_context_after(Before before, Body body) {
    std::unique_lock<std::mutex> lock(mutex);
    if (!initialised) return CUDA_ERROR_NOT_INITIALIZED;
    if (!is_live(current)) return CUDA_ERROR_INVALID_CONTEXT;
    before(lock);
    return sticky != CUDA_SUCCESS ? sticky : body();
}

template <class Body>
CUresult with_context(Body body) {
    return with_context_after([](std::unique_lock<std::mutex>&) {}, body);
}

// Wait, without the lock, until nothing occupies any stream of the thread's device, or this one.
void wait_for_device(std::unique_lock<std::mutex>& lock);
void wait_for_stream(std::unique_lock<std::mutex>& lock, CUstream stream);

// Whether a capture is under way beside which the thread must make no call that may wait for the
// device, as the modes of captures and threads say. Such a call spoils the capture.
bool spoils_a_capture();

// As with_context, for calls that wait for all work of their device (driver_streams.cpp).
template <class Body>
CUresult with_idle_device(Body body) {
    return with_context_after(wait_for_device, [&]() -> CUresult {
        if (spoils_a_capture()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        return body();
    });
}

// As with_context, for what is enqueued: it is done at once, when the stream's turn has come.
template <class Body>
CUresult with_idle_stream(CUstream stream, Body body) {
    return with_context_after([&](std::unique_lock<std::mutex>& lock) { wait_for_stream(lock, stream); }, body);
}

// Hands a caller what it asks for.
template <class T>
CUresult give(T* to, const T& value) {
    if (to == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *to = value;
    return CUDA_SUCCESS;
}

// Handles are nodes of lists: their addresses stay.
template <class T, class Handle>
typename std::list<T>::iterator find(std::list<T>& list, const Handle* handle) {
    auto at = list.begin();
    while (at != list.end() && &*at != handle) ++at;
    return at;
}

// What was done since the library was loaded, for tests that hold a program to it.
struct Counts {
    unsigned long long allocations, frees, modules_loaded, modules_unloaded, functions_found;
    // Calls that found their device occupied.
    unsigned long long waits_for_a_device;
};
extern Counts counts;

// Frees memory, modules, streams and events with their context.
void destroy_handles();
void destroy_streams();
// Handles of cuda.h that stand for default streams.
inline const CUstream LEGACY_STREAM = reinterpret_cast<CUstream>(1);
inline const CUstream PER_THREAD_STREAM = reinterpret_cast<CUstream>(2);
// Whether the stream is a default one or has been created.
bool is_stream(CUstream stream);

// What a graph does, one after the other.
struct Node {
    // A launch, a copy or a fill: done at once, under the lock.
    std::function<CUresult()> work;
    // Or what another library starts on the stream that the graph is launched on, without the lock.
    std::function<void(CUstream)> start;
};

// Whether launches, copies within the device and fills on the stream are recorded in place of being
// run. Nothing else can be enqueued there then.
bool is_capturing(CUstream stream);
// The error of a recording that a call has spoiled, which every further node and its end return.
CUresult record(CUstream stream, const Node& node);
// Spoils the recording that the stream takes part in.
void spoil(CUstream stream);
// The stream that a capture began with which this one takes part in; nullptr for none.
CUstream capture_of(CUstream stream);
// Lets `stream` go on behind what `from` had enqueued in a capture: it joins that capture, or if
// the capture began with it, `from` is joined again.
void follow(CUstream stream, CUstream from, CUstream capture);
// Forgets all graphs and recordings.
void release_graphs();

}  // namespace emulator
