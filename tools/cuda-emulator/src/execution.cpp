// How a launch runs: threads one after the other on one stack, and on a stack of their own from
// their first wait on.

#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>

#include "fiber.hpp"
#include "machine.hpp"
#include "ptx_program.hpp"

namespace emulator {

namespace {

enum class State { Ready, AtBlockSync, AtShuffle, Exited };

constexpr const char* STATE_NAMES[] = {"ready", "at block_sync", "at shuffle", "exited"};

}  // namespace

struct Thread {
    Position position;
    unsigned rank;  // within the block
    State state;
    Fiber* fiber;
    unsigned shuffles;
    int lane_mask;
};

namespace {

// Two sets in turn: nobody writes a set again before all lanes have met once more, and so have read
// it.
struct Exchange {
    alignas(16) unsigned char value[2][WARP_THREADS][16];
};

struct Shared {
    const void* site;
    std::unique_ptr<std::max_align_t[]> memory;
    std::size_t len_bytes;
};

// The launch that runs now, and its block that does: blocks run one after the other.
struct Run {
    const Kernel* kernel;
    const void* arguments;
    LaunchShape shape;
    std::vector<Thread> threads;
    std::size_t started;
    std::vector<Exchange> warps;
    std::vector<Shared> shared;
    std::size_t shared_bytes;
    bool faulted;
    Fault fault;
};

Run run;
Thread* running = nullptr;
// A deque keeps its elements in place. Fibers outlive launches: a stack is mapped once.
std::deque<Fiber> fibers;
std::vector<Fiber*> idle;

void start_thread(Thread& thread) {
    running = &thread;
    position = &thread.position;
}

// Runs threads of a block that have not started until one waits or none is left. A thread that
// waits takes the stack with it.
void run_threads(Fiber& fiber) {
    while (!run.faulted && run.started < run.threads.size()) {
        Thread& thread = run.threads[run.started++];
        thread.fiber = &fiber;
        start_thread(thread);
        try {
            run.kernel->run(run.arguments);
        } catch (const Fault& fault) {
            run.faulted = true;
            run.fault = fault;
        }
        // `running` is this thread again, also if it waited: whoever enters a fiber sets it.
        running->state = State::Exited;
    }
    idle.push_back(&fiber);
}

void wait(State state) {
    Thread& thread = *running;
    thread.state = state;
    thread.fiber->leave();
}

Fiber& idle_fiber() {
    if (idle.empty()) {
        fibers.emplace_back(run_threads);
        return fibers.back();
    }
    Fiber* fiber = idle.back();
    idle.pop_back();
    return *fiber;
}

// Lets `count` threads from `first` on go if all of them wait in `state`.
bool release_if_all(Thread* first, std::size_t count, State state, std::vector<Thread*>* released) {
    for (std::size_t i = 0; i < count; ++i)
        if (first[i].state != state) return false;
    for (std::size_t i = 0; i < count; ++i) {
        if (state == State::AtShuffle && first[i].lane_mask != first[0].lane_mask) return false;
        released->push_back(&first[i]);
    }
    return true;
}

// Every barrier at which all that belong to it have arrived.
std::vector<Thread*> release_barriers() {
    std::vector<Thread*> released;
    Thread* const first = run.threads.data();
    const std::size_t block_threads = run.threads.size();
    if (release_if_all(first, block_threads, State::AtBlockSync, &released)) return released;
    for (std::size_t lane = 0; lane < block_threads; lane += WARP_THREADS) {
        const std::size_t lanes = block_threads - lane < WARP_THREADS ? block_threads - lane : WARP_THREADS;
        const std::size_t before = released.size();
        if (!release_if_all(first + lane, lanes, State::AtShuffle, &released)) released.resize(before);
    }
    return released;
}

// Where the threads of a block stand of which `thread` cannot go on.
Fault divergence(const Thread& thread) {
    std::size_t counts[4] = {};
    for (const Thread& other : run.threads) ++counts[int(other.state)];
    std::string text = "block " + text_of(thread.position.block) + " cannot go on: thread " + text_of(thread.position.thread) + " waits " +
                       STATE_NAMES[int(thread.state)] + "; of its block";
    for (int state = 1; state < 4; ++state)
        if (counts[state] != 0) text += " " + std::to_string(counts[state]) + " threads are " + STATE_NAMES[state] + ",";
    text.back() = ';';
    return {CUDA_ERROR_LAUNCH_FAILED, text + " all threads of a barrier must reach the same one, with the same lane mask"};
}

// Lets the threads of `released` go on, one after the other, each to its next wait.
void go_on(const std::vector<Thread*>& released) {
    for (Thread* thread : released) thread->state = State::Ready;
    for (Thread* thread : released) {
        start_thread(*thread);
        thread->fiber->enter();
        if (run.faulted) return;
    }
}

// Runs the block to its end, or to a wait that not all reach.
void run_block() {
    while (!run.faulted && run.started < run.threads.size()) idle_fiber().enter();
    while (!run.faulted) {
        const std::vector<Thread*> released = release_barriers();
        if (released.empty()) break;
        go_on(released);
    }
    for (const Thread& thread : run.threads)
        if (!run.faulted && thread.state != State::Exited) {
            run.fault = divergence(thread);
            run.faulted = true;
            running = nullptr;  // no single thread is at fault
        }
}

void prepare_block(unsigned long long index) {
    const Index3& grid = run.shape.grid;
    const Index3& size = run.shape.block;
    const Index3 at{unsigned(index % grid.x), unsigned(index / grid.x % grid.y), unsigned(index / grid.x / grid.y)};
    const unsigned count = size.x * size.y * size.z;
    run.threads.resize(count);
    run.started = 0;
    run.warps.resize((count + WARP_THREADS - 1) / WARP_THREADS);
    run.shared.clear();
    run.shared_bytes = run.shape.dynamic_shared_bytes;
    for (unsigned rank = 0; rank < count; ++rank) {
        const Index3 thread{rank % size.x, rank / size.x % size.y, rank / size.x / size.y};
        run.threads[rank] = Thread{{thread, at, size, grid}, rank, State::Ready, nullptr, 0, 0};
    }
}

void report_fault() {
    std::string where;
    if (running != nullptr)
        where = " block " + text_of(running->position.block) + " thread " + text_of(running->position.thread);
    complain(std::string(run.kernel->name) + where + ": " + run.fault.text);
    // Whoever waited will never go on; the stacks serve the next launch.
    idle.clear();
    for (Fiber& fiber : fibers) {
        fiber.reset();
        idle.push_back(&fiber);
    }
}

}  // namespace

const Position* position = nullptr;

CUresult run_kernel(const Kernel& kernel, const LaunchShape& shape, const void* arguments) {
    if (kernel.entry != nullptr) return ptx::run_entry(*kernel.entry, shape, arguments);
    const unsigned long long count = 1ull * shape.grid.x * shape.grid.y * shape.grid.z;
    run.kernel = &kernel;
    run.arguments = arguments;
    run.shape = shape;
    run.faulted = false;
    running = nullptr;
    for (unsigned long long index = 0; index < count && !run.faulted; ++index) {
        prepare_block(index);
        run_block();
    }
    if (!run.faulted) return CUDA_SUCCESS;
    report_fault();
    return run.fault.code;
}

void* shared_memory(const void* site, std::size_t len_bytes) {
    for (const Shared& shared : run.shared)
        if (shared.site == site) return shared.memory.get();
    run.shared_bytes += len_bytes;
    if (run.shared_bytes > SHARED_BYTES_MAX)
        throw Fault{CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "a block has " + std::to_string(SHARED_BYTES_MAX) + " bytes of shared memory and asks for " +
                                                            std::to_string(run.shared_bytes)};
    const std::size_t words = (len_bytes + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t);
    run.shared.push_back({site, std::unique_ptr<std::max_align_t[]>(new std::max_align_t[words]), len_bytes});
    // Not zeroed on a device either.
    std::memset(run.shared.back().memory.get(), 0xCB, len_bytes);
    return run.shared.back().memory.get();
}

void block_sync() { wait(State::AtBlockSync); }

namespace {

// Gives `value` to others and takes that of lane `other`. All lanes arrive with one `lane_mask`.
void exchange(void* value, std::size_t len_bytes, unsigned other, int lane_mask) {
    Thread& thread = *running;
    const unsigned lane = thread.rank % WARP_THREADS;
    if (other >= WARP_THREADS || thread.rank - lane + other >= run.threads.size())
        throw Fault{CUDA_ERROR_LAUNCH_FAILED, "lane " + std::to_string(lane) + " asks lane " + std::to_string(other) + ", which does not exist"};
    Exchange& exchange = run.warps[thread.rank / WARP_THREADS];
    auto& slots = exchange.value[thread.shuffles++ % 2];
    std::memcpy(slots[lane], value, len_bytes);
    thread.lane_mask = lane_mask;
    wait(State::AtShuffle);
    std::memcpy(value, slots[other], len_bytes);
}

}  // namespace

void shuffle(void* value, std::size_t len_bytes, int lane_mask) {
    exchange(value, len_bytes, running->rank % WARP_THREADS ^ unsigned(lane_mask), lane_mask);
}

void shuffle_first(void* value, std::size_t len_bytes, int lanes) {
    // A number that no mask of bits is.
    exchange(value, len_bytes, running->rank % WARP_THREADS / unsigned(lanes) * unsigned(lanes), -lanes);
}

void complain(const std::string& text) { std::fprintf(stderr, "cuda emulator: %s\n", text.c_str()); }

std::string text_of(const Index3& index) {
    return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) + ")";
}

}  // namespace emulator
