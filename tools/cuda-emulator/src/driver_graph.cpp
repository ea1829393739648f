// Driver functions: graphs. A stream that captures records what is enqueued on it; a graph does it
// again, in order, with the same arguments.
//
// Another library, such as a stand-in for NCCL, records what it would have put into the stream
// (`emulatorRecord`): the graph starts it on the stream that it is launched on.

#include <map>
#include <thread>

#include "driver.hpp"

struct CUgraph_st {
    std::vector<emulator::Node> nodes;
};

struct CUgraphExec_st {
    std::vector<emulator::Node> nodes;
};

namespace emulator {
namespace {

std::list<CUgraph_st> graphs;
std::list<CUgraphExec_st> executables;

// Modes of a capture, and of a thread's calls beside captures.
enum : int { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };

// What a stream has recorded since its capture began, and whether a call has spoiled it.
struct Recording {
    std::vector<Node> nodes;
    bool is_spoiled = false;
    int mode = RELAXED;
    std::thread::id thread;
};

thread_local int mode_of_thread = GLOBAL;

std::map<CUstream, Recording> recordings;

// A stream that has joined the capture of another, and whether that must wait for it still.
struct Fork {
    CUstream capture;
    bool is_pending;
};

std::map<CUstream, Fork> forks;

template <class T>
CUresult destroy(std::list<T>& list, const T* handle) {
    return with_context([&] {
        auto found = find(list, handle);
        if (found == list.end()) return CUDA_ERROR_INVALID_HANDLE;
        list.erase(found);
        return CUDA_SUCCESS;
    });
}

}  // namespace

CUstream capture_of(CUstream stream) {
    const auto fork = forks.find(stream);
    if (fork != forks.end()) return fork->second.capture;
    return recordings.count(stream) != 0 ? stream : nullptr;
}

bool is_capturing(CUstream stream) { return capture_of(stream) != nullptr; }

CUresult record(CUstream stream, const Node& node) {
    Recording& recording = recordings[capture_of(stream)];
    if (recording.is_spoiled) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    recording.nodes.push_back(node);
    const auto fork = forks.find(stream);
    if (fork != forks.end()) fork->second.is_pending = true;
    return CUDA_SUCCESS;
}

void spoil(CUstream stream) { recordings[capture_of(stream)].is_spoiled = true; }

bool spoils_a_capture() {
    if (mode_of_thread == RELAXED) return false;
    bool is_refused = false;
    for (auto& [stream, recording] : recordings) {
        const bool is_own = recording.thread == std::this_thread::get_id();
        const bool minds = recording.mode == GLOBAL ? is_own || mode_of_thread == GLOBAL : recording.mode == THREAD_LOCAL && is_own;
        recording.is_spoiled = recording.is_spoiled || minds;
        is_refused = is_refused || minds;
    }
    return is_refused;
}

void follow(CUstream stream, CUstream from, CUstream capture) {
    if (recordings.count(capture) == 0) return;
    if (!is_capturing(stream)) forks[stream] = {capture, false};
    const auto fork = forks.find(from);
    if (stream == capture && fork != forks.end()) fork->second.is_pending = false;
}

void release_graphs() {
    graphs.clear();
    executables.clear();
    recordings.clear();
    forks.clear();
}

}  // namespace emulator

using namespace emulator;

extern "C" {

CUresult cuStreamBeginCapture_v2(CUstream stream, int mode) {
    return with_context([&] {
        if (!is_stream(stream)) return CUDA_ERROR_INVALID_HANDLE;
        // The default stream cannot capture, nor can one that does already.
        if (mode < 0 || mode > 2 || stream == nullptr || stream == LEGACY_STREAM || is_capturing(stream)) return CUDA_ERROR_INVALID_VALUE;
        Recording& recording = recordings[stream];
        recording.mode = mode;
        recording.thread = std::this_thread::get_id();
        return CUDA_SUCCESS;
    });
}

CUresult cuThreadExchangeStreamCaptureMode(int* mode) {
    if (mode == nullptr || *mode < GLOBAL || *mode > RELAXED) return CUDA_ERROR_INVALID_VALUE;
    std::swap(*mode, mode_of_thread);
    return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
    return with_context([&] {
        if (graph == nullptr || recordings.count(stream) == 0) return CUDA_ERROR_INVALID_VALUE;
        bool is_joined = true;
        for (auto fork = forks.begin(); fork != forks.end();) {
            if (fork->second.capture != stream) {
                ++fork;
                continue;
            }
            is_joined = is_joined && !fork->second.is_pending;
            fork = forks.erase(fork);
        }
        const Recording recording = std::move(recordings[stream]);
        recordings.erase(stream);
        *graph = nullptr;
        if (recording.is_spoiled) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        if (!is_joined) return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
        graphs.push_back({recording.nodes});
        *graph = &graphs.back();
        return CUDA_SUCCESS;
    });
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec* executable, CUgraph graph, unsigned long long) {
    return with_context([&] {
        auto found = find(graphs, graph);
        if (executable == nullptr || found == graphs.end()) return CUDA_ERROR_INVALID_VALUE;
        executables.push_back({found->nodes});
        *executable = &executables.back();
        return CUDA_SUCCESS;
    });
}

CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream) {
    std::vector<Node> nodes;
    const CUresult refused = with_idle_stream(stream, [&] {
        auto found = find(executables, executable);
        if (found == executables.end() || !is_stream(stream)) return CUDA_ERROR_INVALID_HANDLE;
        if (is_capturing(stream)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        nodes = found->nodes;
        return CUDA_SUCCESS;
    });
    if (refused != CUDA_SUCCESS) return refused;
    for (const Node& node : nodes) {
        if (node.start) {
            node.start(stream);
            continue;
        }
        // A graph is asynchronous: a fault of it shows in the next call.
        const bool goes_on = with_idle_stream(stream, [&] {
            sticky = node.work();
            return sticky;
        }) == CUDA_SUCCESS;
        if (!goes_on) break;
    }
    return CUDA_SUCCESS;
}

// No function of a driver: whether what is enqueued on the stream is recorded.
int emulatorIsCapturing(CUstream stream) {
    const std::lock_guard<std::mutex> lock(mutex);
    return is_capturing(stream) ? 1 : 0;
}

// No function of a driver: records what another library does on the stream. `start` is given
// `operation`, which `drop` ends, and the stream of each launch of the graph.
CUresult emulatorRecord(CUstream stream, void (*start)(void*, CUstream), void* operation, void (*drop)(void*)) {
    const std::shared_ptr<void> kept(operation, drop);
    return with_driver([&]() -> CUresult {
        if (!is_capturing(stream)) return CUDA_ERROR_INVALID_VALUE;
        return record(stream, {nullptr, [start, kept](CUstream launched_on) { start(kept.get(), launched_on); }});
    });
}

CUresult cuGraphExecDestroy(CUgraphExec executable) { return destroy(executables, executable); }

CUresult cuGraphDestroy(CUgraph graph) { return destroy(graphs, graph); }

}  // extern "C"
