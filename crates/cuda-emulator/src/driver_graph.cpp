// Driver functions: graphs. A stream that captures records its launches; a graph runs them again,
// in order, with the same arguments.

#include <list>
#include <map>

#include "driver.hpp"

struct CUgraph_st {
    std::vector<emulator::Enqueued> launches;
};

struct CUgraphExec_st {
    std::vector<emulator::Enqueued> launches;
};

namespace emulator {
namespace {

std::list<CUgraph_st> graphs;
std::list<CUgraphExec_st> executables;
std::map<CUstream, std::vector<Enqueued>> recordings;

template <class T>
typename std::list<T>::iterator find(std::list<T>& list, const T* handle) {
    auto at = list.begin();
    while (at != list.end() && &*at != handle) ++at;
    return at;
}

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

bool is_capturing(CUstream stream) { return recordings.count(stream) != 0; }

void record(CUstream stream, const Enqueued& launch) { recordings[stream].push_back(launch); }

void release_graphs() {
    graphs.clear();
    executables.clear();
    recordings.clear();
}

}  // namespace emulator

using namespace emulator;

extern "C" {

CUresult cuStreamBeginCapture_v2(CUstream stream, int mode) {
    return with_context([&] {
        if (!is_stream(stream)) return CUDA_ERROR_INVALID_HANDLE;
        // The default stream cannot capture, nor can one that does already.
        if (mode < 0 || mode > 2 || stream == nullptr || is_capturing(stream)) return CUDA_ERROR_INVALID_VALUE;
        recordings[stream];
        return CUDA_SUCCESS;
    });
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
    return with_context([&] {
        if (graph == nullptr || !is_capturing(stream)) return CUDA_ERROR_INVALID_VALUE;
        graphs.push_back({recordings[stream]});
        recordings.erase(stream);
        *graph = &graphs.back();
        return CUDA_SUCCESS;
    });
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec* executable, CUgraph graph, unsigned long long) {
    return with_context([&] {
        auto found = find(graphs, graph);
        if (executable == nullptr || found == graphs.end()) return CUDA_ERROR_INVALID_VALUE;
        executables.push_back({found->launches});
        *executable = &executables.back();
        return CUDA_SUCCESS;
    });
}

CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream) {
    return with_idle_stream(stream, [&] {
        auto found = find(executables, executable);
        if (found == executables.end() || !is_stream(stream)) return CUDA_ERROR_INVALID_HANDLE;
        if (is_capturing(stream)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        for (const Enqueued& launch : found->launches) {
            sticky = run_kernel(*launch.kernel, launch.shape, launch.arguments.get());
            if (sticky != CUDA_SUCCESS) break;
        }
        return CUDA_SUCCESS;
    });
}

CUresult cuGraphExecDestroy(CUgraphExec executable) { return destroy(executables, executable); }

CUresult cuGraphDestroy(CUgraph graph) { return destroy(graphs, graph); }

}  // extern "C"
