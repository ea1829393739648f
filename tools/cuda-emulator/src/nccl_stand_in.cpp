// A libnccl that needs no GPU: the calls that fusestep-collective-nccl makes, between ranks that
// are threads of one process; with FUSESTEP_STAND_IN_PROCESSES, between processes of one machine.
//
// Device memory of the emulated driver is host memory, so operations are copies. Each communicator
// has a worker thread that carries out one group of operations after the other; until it has, the
// communicator says "in progress", and nothing blocks the caller. Reductions go from the highest
// rank down, an order that nobody may rely on.
//
// A group occupies its stream from its end until it is through or its communicator has ended, as
// NCCL's kernel does, which waits there for the other ranks. So the driver's calls that wait for
// all work of a device wait for it. Ending a communicator frees its memory, and waits likewise.
//
// On a stream that captures a group is recorded, and every launch of the graph puts it into that
// graph's stream.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "nccl_lines.hpp"
#include "nccl_stand_in.hpp"

#ifndef STAND_IN_VERSION
#define STAND_IN_VERSION 22703
#endif

namespace {

enum class Kind { Send, Receive, AllReduce, Reduce, Broadcast, AllGather };

struct Operation {
    Kind kind;
    const char* send;
    char* receive;
    std::size_t count;
    int dtype, op, peer;
    void* stream;
};

// A group: its operations, all on one stream.
struct Job {
    std::vector<Operation> operations;
    void* stream;
};

struct Message {
    const char* bytes;
    std::size_t len;
    int from, to;
    bool taken;
    // Of a message that came from another process.
    std::vector<char> own = {};
};

// All ranks that share a unique id.
struct World {
    std::mutex mutex;
    std::condition_variable changed;
    int ranks = 0, joined = 0;
    std::map<std::pair<int, int>, std::deque<Message*>> mail;
    // Of ranks that are processes, of which this one has a world of its own.
    std::unique_ptr<Lines> lines;
    std::set<int> left;

    ~World() {
        if (!lines) return;
        lines.reset();
        for (auto& [ends, box] : mail)
            for (Message* message : box) delete message;
    }

    void join_processes(const std::string& group, int rank, int count) {
        const auto taken = [this, rank](int from, std::vector<char>* bytes) {
            const std::lock_guard<std::mutex> lock(mutex);
            if (bytes == nullptr) {
                left.insert(from);
            } else {
                const std::size_t len = bytes->size();
                auto* message = new Message{nullptr, len, from, rank, false, std::move(*bytes)};
                message->bytes = message->own.data();
                mail[{from, rank}].push_back(message);
            }
            changed.notify_all();
        };
        lines = std::make_unique<Lines>(group, rank, count, taken);
    }
};

struct Fault {
    int kind, rank, job;
};
constexpr int STALL = 1, ASYNC_ERROR = 2;

// What the unique id of ranks that are processes begins with.
const std::string PROCESSES = "processes ";

std::mutex registry_mutex;
std::map<std::string, std::weak_ptr<World>> registry;
std::vector<Fault> faults;
std::atomic<int> live{0};

}  // namespace

struct ncclComm {
    std::shared_ptr<World> world;
    int rank = 0, ranks = 0, jobs_done = 0;
    std::atomic<int> state{IN_PROGRESS};
    // Of its device.
    void* context = nullptr;
    // Under the world's lock.
    bool ended = false;
    std::deque<Job> jobs;
    // Streams that groups occupy which are not through.
    std::deque<void*> occupied;
    std::thread worker;

    void work() {
        if (world->lines && !world->lines->connect_all()) {
            // Not of a group that is given up: nobody asks then.
            state = SYSTEM_ERROR;
            return;
        }
        std::unique_lock<std::mutex> lock(world->mutex);
        world->joined += world->lines ? ranks : 1;
        world->changed.notify_all();
        world->changed.wait(lock, [&] { return ended || world->joined >= ranks; });
        if (ended) return;
        if (jobs.empty()) state = SUCCESS;
        for (;;) {
            world->changed.wait(lock, [&] { return ended || !jobs.empty(); });
            if (ended) return;
            const Job job = std::move(jobs.front());
            jobs.pop_front();
            ++jobs_done;
            int result = misbehave(lock);
            if (result == SUCCESS && is_eager()) {
                if (jobs.empty()) state = SUCCESS;
                world->changed.wait_for(lock, std::chrono::milliseconds(1), [&] { return ended; });
                if (ended) return;
            }
            if (result == SUCCESS) result = run(job.operations, lock);
            if (ended) return;
            // What has failed stays on the device until its communicator ends.
            if (result == SUCCESS) {
                driver().vacate(occupied.front());
                occupied.pop_front();
            }
            if (result != SUCCESS) state = result;
            else if (jobs.empty()) state = SUCCESS;
        }
    }

    // Says that a group is enqueued before it is through, as NCCL does: whoever uses its memory
    // then without the event behind it is too early. Only if asked, since the emulated driver
    // carries out what follows on the stream on the caller's thread, which would wait there without
    // a deadline.
    static bool is_eager() {
        static const bool eager = std::getenv("FUSESTEP_STAND_IN_EAGER") != nullptr;
        return eager;
    }

    int misbehave(std::unique_lock<std::mutex>& lock) {
        int kind = 0;
        {
            const std::lock_guard<std::mutex> registry_lock(registry_mutex);
            for (const Fault& fault : faults)
                if (fault.rank == rank && fault.job == jobs_done) kind = fault.kind;
        }
        if (kind == STALL) world->changed.wait(lock, [&] { return ended; });
        return kind == ASYNC_ERROR ? REMOTE_ERROR : SUCCESS;
    }

    int run(const std::vector<Operation>& job, std::unique_lock<std::mutex>& lock) {
        std::deque<Message> sent;
        int result = SUCCESS;
        const auto post = [&](const char* bytes, std::size_t len, int to) {
            if (world->lines && to != rank) {
                // Others may wait for this rank to take in what they send.
                lock.unlock();
                if (!world->lines->send_to(to, bytes, len)) result = REMOTE_ERROR;
                lock.lock();
                return;
            }
            sent.push_back(Message{bytes, len, rank, to, false});
            world->mail[{rank, to}].push_back(&sent.back());
        };
        const auto to_others = [&](const char* bytes, std::size_t len) {
            for (int to = 0; to < ranks; ++to)
                if (to != rank) post(bytes, len, to);
        };
        for (std::size_t i = 0; i < job.size(); ++i) {
            const Operation& o = job[i];
            const std::size_t len = o.count * length_of(o.dtype);
            if (o.kind == Kind::Send) post(o.send, len, o.peer);
            if (o.kind == Kind::Broadcast && rank == o.peer) to_others(o.send, len);
            if (o.kind == Kind::AllGather || o.kind == Kind::AllReduce) to_others(o.send, len);
            if (o.kind == Kind::Reduce && rank != o.peer) post(o.send, len, o.peer);
        }
        world->changed.notify_all();
        std::vector<std::vector<std::vector<char>>> inputs(job.size());
        for (std::size_t i = 0; i < job.size() && result == SUCCESS; ++i) result = receive(job[i], inputs[i], lock);
        // What was sent may be read until it was taken; what failed takes its messages back.
        if (result == SUCCESS)
            world->changed.wait(lock, [&] {
                for (const Message& message : sent)
                    if (!message.taken) return ended;
                return true;
            });
        for (Message& message : sent) {
            auto& box = world->mail[{message.from, message.to}];
            for (auto at = box.begin(); at != box.end(); ++at)
                if (*at == &message) {
                    box.erase(at);
                    break;
                }
        }
        for (std::size_t i = 0; i < job.size() && result == SUCCESS && !ended; ++i)
            if (!inputs[i].empty() && !reduce(inputs[i], job[i].receive, job[i].count, job[i].dtype, job[i].op)) result = INVALID_ARGUMENT;
        return result;
    }

    int take(int from, char* into, std::size_t len, std::unique_lock<std::mutex>& lock) {
        auto& box = world->mail[{from, rank}];
        const auto may_go_on = [&] { return ended || !box.empty() || world->left.count(from) > 0; };
        world->changed.wait(lock, may_go_on);
        if (ended) return INTERNAL_ERROR;
        if (box.empty()) return REMOTE_ERROR;
        Message* message = box.front();
        if (message->len != len) return INVALID_USAGE;
        box.pop_front();
        std::memcpy(into, message->bytes, len);
        message->taken = true;
        if (world->lines && from != rank) delete message;
        world->changed.notify_all();
        return SUCCESS;
    }

    int receive(const Operation& o, std::vector<std::vector<char>>& inputs, std::unique_lock<std::mutex>& lock) {
        const std::size_t len = o.count * length_of(o.dtype);
        const bool reduces = o.kind == Kind::AllReduce || (o.kind == Kind::Reduce && rank == o.peer);
        if (o.kind == Kind::Receive) return take(o.peer, o.receive, len, lock);
        if (o.kind == Kind::Broadcast) {
            if (rank != o.peer) return take(o.peer, o.receive, len, lock);
            std::memmove(o.receive, o.send, len);
        }
        if (o.kind == Kind::AllGather || reduces) {
            if (reduces) inputs.assign(std::size_t(ranks), std::vector<char>(len));
            for (int from = 0; from < ranks; ++from) {
                char* into = reduces ? inputs[std::size_t(from)].data() : o.receive + std::size_t(from) * len;
                if (from == rank) std::memmove(into, o.send, len);
                else if (const int result = take(from, into, len, lock); result != SUCCESS) return result;
            }
        }
        return SUCCESS;
    }

    void end() {
        {
            const std::lock_guard<std::mutex> lock(world->mutex);
            ended = true;
            world->changed.notify_all();
            if (world->lines) world->lines->end();
        }
        if (worker.joinable()) worker.join();
        for (void* stream : occupied) driver().vacate(stream);
        // Its memory is freed, for which a device waits for all of its work.
        void* before = nullptr;
        driver().context(&before);
        driver().set_context(context);
        driver().synchronize();
        driver().set_context(before);
        --live;
        delete this;
    }
};

namespace {

thread_local int depth = 0;
thread_local std::vector<std::pair<ncclComm*, Operation>> grouped;

// A group that a graph starts.
struct Recorded {
    ncclComm* comm;
    Job job;
};

// Gives a group to its communicator's worker.
void put(ncclComm* comm, Job job) {
    driver().occupy(job.stream);
    comm->occupied.push_back(job.stream);
    comm->jobs.push_back(std::move(job));
    comm->world->changed.notify_all();
}

void start_recorded(void* operation, void* stream) {
    const Recorded& recorded = *static_cast<Recorded*>(operation);
    const std::lock_guard<std::mutex> lock(recorded.comm->world->mutex);
    put(recorded.comm, Job{recorded.job.operations, stream});
}

int start_grouped() {
    std::map<ncclComm*, Job> jobs;
    for (const auto& [comm, operation] : grouped) {
        jobs[comm].operations.push_back(operation);
        jobs[comm].stream = operation.stream;
    }
    grouped.clear();
    int result = SUCCESS;
    for (auto& [comm, job] : jobs) {
        if (driver().is_capturing(job.stream) != 0) {
            Recorded* const recorded = new Recorded{comm, job};
            const auto drop = [](void* operation) { delete static_cast<Recorded*>(operation); };
            if (driver().record(job.stream, start_recorded, recorded, drop) != 0) return INVALID_USAGE;
            continue;
        }
        const std::lock_guard<std::mutex> lock(comm->world->mutex);
        comm->state = IN_PROGRESS;
        put(comm, std::move(job));
        result = IN_PROGRESS;
    }
    return result;
}

int add(ncclComm* comm, const Operation& operation) {
    if (comm == nullptr || operation.peer < 0 || operation.peer >= comm->ranks) return INVALID_ARGUMENT;
    if (comm->state != SUCCESS) return comm->state == IN_PROGRESS ? int(INVALID_USAGE) : comm->state.load();
    grouped.emplace_back(comm, operation);
    return depth > 0 ? SUCCESS : start_grouped();
}

}  // namespace

extern "C" {

struct ncclUniqueId {
    char internal[128];
};

struct ncclConfig {
    std::size_t size;
    unsigned magic, version;
    int blocking;
};

// Has a rank misbehave at its job of this number, counted from 1 by each communicator; kind 0
// forgets all faults.
void standInFault(int kind, int rank, int job) {
    const std::lock_guard<std::mutex> lock(registry_mutex);
    if (kind == 0) faults.clear();
    else faults.push_back({kind, rank, job});
}

// Communicators that were neither destroyed nor aborted.
int standInLive() { return live; }

int ncclGetVersion(int* version) {
    *version = STAND_IN_VERSION;
    return SUCCESS;
}

const char* ncclGetErrorString(int result) {
    switch (result) {
        case SUCCESS: return "no error";
        case SYSTEM_ERROR: return "unhandled system error";
        case INTERNAL_ERROR: return "internal error";
        case INVALID_ARGUMENT: return "invalid argument";
        case INVALID_USAGE: return "invalid usage";
        case REMOTE_ERROR: return "remote process exited or there was a network error";
        case IN_PROGRESS: return "NCCL operation in progress";
        default: return "unknown result code";
    }
}

int ncclGetUniqueId(ncclUniqueId* id) {
    static std::atomic<unsigned long long> next{1};
    std::memset(id->internal, 0, sizeof id->internal);
    // Of processes it has the number of the first rank's, which no other group has.
    const bool apart = std::getenv("FUSESTEP_STAND_IN_PROCESSES") != nullptr;
    const std::string of = apart ? PROCESSES + std::to_string(getpid()) + " " : "fusestep ";
    const std::string text = of + std::to_string(next++);
    std::memcpy(id->internal, text.c_str(), text.size());
    return SUCCESS;
}

#ifndef STAND_IN_WITHOUT_CONFIG
int ncclCommInitRankConfig(ncclComm** comm, int ranks, ncclUniqueId id, int rank, ncclConfig* config) {
    if (comm == nullptr || ranks < 1 || rank < 0 || rank >= ranks) return INVALID_ARGUMENT;
    if (config == nullptr || config->magic != 0xcafebeef || config->size < 24 || config->blocking != 0) return INVALID_ARGUMENT;
    void* context = nullptr;
    if (driver().vacate == nullptr || driver().context(&context) != 0 || context == nullptr) return SYSTEM_ERROR;
    std::shared_ptr<World> world;
    {
        const std::lock_guard<std::mutex> lock(registry_mutex);
        std::weak_ptr<World>& known = registry[std::string(id.internal, sizeof id.internal)];
        world = known.lock();
        if (!world) known = world = std::make_shared<World>();
    }
    const bool apart = std::string(id.internal).rfind(PROCESSES, 0) == 0;
    if (apart) world->join_processes(id.internal, rank, ranks);
    ncclComm* made = new ncclComm;
    made->world = world;
    made->rank = rank;
    made->ranks = ranks;
    made->context = context;
    ++live;
    made->worker = std::thread([made] { made->work(); });
    *comm = made;
    return IN_PROGRESS;
}
#endif

int ncclCommGetAsyncError(ncclComm* comm, int* state) {
    *state = comm->state;
    return SUCCESS;
}

int ncclCommFinalize(ncclComm*) { return SUCCESS; }

int ncclCommDestroy(ncclComm* comm) {
    comm->end();
    return SUCCESS;
}

int ncclCommAbort(ncclComm* comm) {
    comm->end();
    return SUCCESS;
}

int ncclGroupStart() {
    ++depth;
    return SUCCESS;
}

int ncclGroupEnd() {
    if (depth == 0) return INVALID_USAGE;
    return --depth == 0 ? start_grouped() : SUCCESS;
}

int ncclSend(const void* send, std::size_t count, int dtype, int peer, ncclComm* comm, void* stream) {
    return add(comm, {Kind::Send, static_cast<const char*>(send), nullptr, count, dtype, 0, peer, stream});
}

int ncclRecv(void* receive, std::size_t count, int dtype, int peer, ncclComm* comm, void* stream) {
    return add(comm, {Kind::Receive, nullptr, static_cast<char*>(receive), count, dtype, 0, peer, stream});
}

int ncclAllReduce(const void* send, void* receive, std::size_t count, int dtype, int op, ncclComm* comm, void* stream) {
    return add(comm, {Kind::AllReduce, static_cast<const char*>(send), static_cast<char*>(receive), count, dtype, op, 0, stream});
}

int ncclReduce(const void* send, void* receive, std::size_t count, int dtype, int op, int root, ncclComm* comm, void* stream) {
    return add(comm, {Kind::Reduce, static_cast<const char*>(send), static_cast<char*>(receive), count, dtype, op, root, stream});
}

int ncclBroadcast(const void* send, void* receive, std::size_t count, int dtype, int root, ncclComm* comm, void* stream) {
    return add(comm, {Kind::Broadcast, static_cast<const char*>(send), static_cast<char*>(receive), count, dtype, 0, root, stream});
}

int ncclAllGather(const void* send, void* receive, std::size_t count, int dtype, ncclComm* comm, void* stream) {
    return add(comm, {Kind::AllGather, static_cast<const char*>(send), static_cast<char*>(receive), count, dtype, 0, 0, stream});
}

}  // extern "C"
