// Driver functions: streams and events, and who waits for a stream that something occupies.
//
// The driver does its own work at once, so nobody waits for that. Another library, such as a
// stand-in for NCCL, may occupy a stream (`emulatorOccupy`) with an operation that goes on until
// its peers have come, as a kernel of NCCL's does. Then
//
// - what is enqueued on that stream waits for it; a device would return and do it later;
// - a query of it, or of an event recorded since, says that it is not ready;
// - making and freeing memory, page-locked memory of the host's among it, loading and unloading
//   modules and looking functions up wait for all streams of their device, as does
//   cuCtxSynchronize.
//
// A real driver waits so in cuMemFree, and may in the others: the CUDA C++ Programming Guide names
// allocations under "Implicit Synchronization", and says under "Lazy Loading" that loading a
// kernel, which cuModuleGetFunction does there, might require context synchronization. A program
// that is well here is well whatever a driver makes of that.

#include <chrono>

#include "driver.hpp"

struct CUstream_st {
    int priority;
    unsigned flags;
    CUcontext context;
    // Operations of others that were put into it, and that have ended.
    unsigned long long occupied, vacated;
};

struct CUevent_st {
    bool recorded;
    std::chrono::steady_clock::time_point at;
    // Where it was recorded last, and the capture that stream took part in then.
    CUstream stream, capture;
    // Operations of others that lie before it in its stream.
    unsigned long long behind;
};

namespace emulator {

Counts counts{};

namespace {

// CU_STREAM_NON_BLOCKING: not ordered with the default stream.
constexpr unsigned NON_BLOCKING = 1;

std::list<CUstream_st> streams;
std::list<CUevent_st> events;
// A stream was vacated or is gone.
std::condition_variable changed;

bool is_occupied(const CUstream_st& stream) { return stream.occupied != stream.vacated; }

bool is_device_occupied(CUcontext context) {
    for (const CUstream_st& stream : streams)
        if (stream.context == context && is_occupied(stream)) return true;
    return false;
}

// Of the default stream, whether it waits for one that is ordered with it.
bool is_stream_occupied(CUcontext context, CUstream stream) {
    const bool is_legacy = stream == nullptr || stream == LEGACY_STREAM;
    for (const CUstream_st& other : streams) {
        const bool is_asked = is_legacy ? other.context == context && (other.flags & NON_BLOCKING) == 0 : &other == stream;
        if (is_asked && is_occupied(other)) return true;
    }
    return false;
}

bool has_come(const CUevent_st& event) {
    const auto stream = find(streams, event.stream);
    return stream == streams.end() || stream->vacated >= event.behind;
}

// Waits for an event that has not been destroyed.
auto after(CUevent event) {
    return [event](std::unique_lock<std::mutex>& lock) {
        changed.wait(lock, [&] { return find(events, event) == events.end() || has_come(*event); });
    };
}

}  // namespace

void wait_for_device(std::unique_lock<std::mutex>& lock) {
    const CUcontext context = current;
    if (!is_device_occupied(context)) return;
    ++counts.waits_for_a_device;
    changed.wait(lock, [&] { return !is_device_occupied(context); });
}

void wait_for_stream(std::unique_lock<std::mutex>& lock, CUstream stream) {
    const CUcontext context = current;
    changed.wait(lock, [&] { return !is_stream_occupied(context, stream); });
}

void destroy_streams() {
    streams.clear();
    events.clear();
    changed.notify_all();
}

bool is_stream(CUstream stream) {
    const bool is_default = stream == nullptr || stream == LEGACY_STREAM || stream == PER_THREAD_STREAM;
    return is_default || find(streams, stream) != streams.end();
}

}  // namespace emulator

using namespace emulator;

extern "C" {

// No function of a driver: an operation that somebody else carries out is the stream's from now on.
CUresult emulatorOccupy(CUstream stream) {
    return with_driver([&] {
        auto found = find(streams, stream);
        if (found == streams.end()) return CUDA_ERROR_INVALID_HANDLE;
        ++found->occupied;
        return CUDA_SUCCESS;
    });
}

// No function of a driver: the oldest such operation has ended.
CUresult emulatorVacate(CUstream stream) {
    return with_driver([&] {
        auto found = find(streams, stream);
        if (found == streams.end() || !is_occupied(*found)) return CUDA_ERROR_INVALID_HANDLE;
        ++found->vacated;
        changed.notify_all();
        return CUDA_SUCCESS;
    });
}

// No function of a driver: what was done so far, in the order of `Counts`.
void emulatorCounts(unsigned long long* into) {
    const std::lock_guard<std::mutex> lock(mutex);
    const unsigned long long all[] = {counts.allocations,      counts.frees,           counts.modules_loaded,
                                      counts.modules_unloaded, counts.functions_found, counts.waits_for_a_device};
    for (unsigned long long count : all) *into++ = count;
}

CUresult cuStreamCreate(CUstream* stream, unsigned flags) { return cuStreamCreateWithPriority(stream, flags, 0); }

CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int priority) {
    return with_context([&] {
        if (stream == nullptr) return CUDA_ERROR_INVALID_VALUE;
        streams.push_back({priority, flags, current, 0, 0});
        *stream = &streams.back();
        return CUDA_SUCCESS;
    });
}

CUresult cuStreamDestroy_v2(CUstream stream) {
    return with_context([&] {
        auto found = find(streams, stream);
        if (found == streams.end()) return CUDA_ERROR_INVALID_HANDLE;
        // Its events have come: another stream may get its place in memory.
        for (CUevent_st& event : events)
            if (event.stream == stream) event.stream = nullptr;
        streams.erase(found);
        changed.notify_all();
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
    return with_idle_stream(stream, [&] {
        if (is_capturing(stream) || spoils_a_capture()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        return is_stream(stream) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    });
}

CUresult cuStreamQuery(CUstream stream) {
    return with_context([&] {
        if (is_capturing(stream)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        if (!is_stream(stream)) return CUDA_ERROR_INVALID_HANDLE;
        return is_stream_occupied(current, stream) ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
    });
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
    return with_context_after(after(event), [&] {
        if (!is_stream(stream) || find(events, event) == events.end()) return CUDA_ERROR_INVALID_HANDLE;
        if (event->capture != nullptr) follow(stream, event->stream, event->capture);
        if (event->recorded && event->capture == nullptr && is_capturing(stream)) {
            // A graph cannot wait for what was enqueued outside of it.
            spoil(stream);
            return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
        }
        return CUDA_SUCCESS;
    });
}

CUresult cuEventCreate(CUevent* event, unsigned) {
    return with_context([&] {
        if (event == nullptr) return CUDA_ERROR_INVALID_VALUE;
        events.push_back({false, {}, nullptr, nullptr, 0});
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
        event->at = std::chrono::steady_clock::now();
        event->stream = stream;
        event->capture = capture_of(stream);
        const auto found = find(streams, stream);
        event->behind = found == streams.end() ? 0 : found->occupied;
        return CUDA_SUCCESS;
    });
}

CUresult cuEventQuery(CUevent event) {
    return with_context([&] {
        if (find(events, event) == events.end()) return CUDA_ERROR_INVALID_HANDLE;
        return has_come(*event) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    });
}

CUresult cuEventSynchronize(CUevent event) {
    return with_context_after(after(event), [&]() -> CUresult {
        if (spoils_a_capture()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        return find(events, event) != events.end() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    });
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
