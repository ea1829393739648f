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

enum class State { Ready, AtBlockSync, AtShuffle, AtGridSync, Exited };

constexpr const char* STATE_NAMES[] = {"ready", "at block_sync", "at shuffle", "at grid_sync", "exited"};

struct Block;

}  // namespace

struct Thread {
    Position position;
    Block* block;
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

struct Block {
    std::vector<Thread> threads;
    std::vector<Exchange> warps;
    std::vector<Shared> shared;
    std::size_t shared_bytes;
};

// The launch that runs now.
struct Run {
    const Kernel* kernel;
    const void* arguments;
    LaunchShape shape;
    std::vector<Thread*> threads;  // of the blocks that are alive
    std::size_t started;
    std::size_t start_end;  // of the block that runs
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
    while (!run.faulted && run.started < run.start_end) {
        Thread& thread = *run.threads[run.started++];
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
bool release_if_all(Thread** first, std::size_t count, State state, std::vector<Thread*>* released) {
    for (std::size_t i = 0; i < count; ++i)
        if (first[i]->state != state) return false;
    for (std::size_t i = 0; i < count; ++i) {
        if (state == State::AtShuffle && first[i]->lane_mask != first[0]->lane_mask) return false;
        released->push_back(first[i]);
    }
    return true;
}

// Every barrier of a block at which all that belong to it have arrived.
std::vector<Thread*> release_barriers(Thread** first, std::size_t block_threads) {
    std::vector<Thread*> released;
    if (release_if_all(first, block_threads, State::AtBlockSync, &released)) return released;
    for (std::size_t lane = 0; lane < block_threads; lane += WARP_THREADS) {
        const std::size_t lanes = block_threads - lane < WARP_THREADS ? block_threads - lane : WARP_THREADS;
        const std::size_t before = released.size();
        if (!release_if_all(first + lane, lanes, State::AtShuffle, &released)) released.resize(before);
    }
    return released;
}

// Where the threads of the first block that cannot go on stand.
Fault divergence() {
    for (const Thread* thread : run.threads) {
        if (thread->state == State::Exited) continue;
        std::size_t counts[5] = {};
        for (const Thread& other : thread->block->threads) ++counts[int(other.state)];
        std::string text = "block " + text_of(thread->position.block) + " cannot go on: thread " + text_of(thread->position.thread) +
                           " waits " + STATE_NAMES[int(thread->state)] + "; of its block";
        for (int state = 1; state < 5; ++state)
            if (counts[state] != 0) text += " " + std::to_string(counts[state]) + " threads are " + STATE_NAMES[state] + ",";
        text.back() = ';';
        return {CUDA_ERROR_LAUNCH_FAILED, text + " all threads of a barrier must reach the same one, with the same lane mask"};
    }
    return {CUDA_ERROR_LAUNCH_FAILED, "no thread is left"};
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

// Lets a block run as far as it can without the others: to a wait for the grid, or to its end.
void run_block(std::size_t first, std::size_t block_threads) {
    Thread** const own = run.threads.data() + first;
    if (own[0]->fiber == nullptr) {
        run.started = first;
        run.start_end = first + block_threads;
        while (!run.faulted && run.started < run.start_end) idle_fiber().enter();
    } else {
        go_on(std::vector<Thread*>(own, own + block_threads));
    }
    while (!run.faulted) {
        const std::vector<Thread*> released = release_barriers(own, block_threads);
        if (released.empty()) break;
        go_on(released);
    }
}

// Blocks wait for each other only at the grid's barrier, and between two of these one block is
// always as far ahead of the rest as it can be: the first of them, then the last, in turn. Whatever
// a block may not read or write before the others are done, it touches too early in one of the two
// orders.
void run_alive_blocks() {
    const std::size_t block_threads = run.threads.front()->block->threads.size();
    const std::size_t blocks = run.threads.size() / block_threads;
    std::vector<Thread*> released;
    bool from_the_last = false;
    do {
        for (std::size_t i = 0; i < blocks && !run.faulted; ++i) {
            const std::size_t block = from_the_last ? blocks - 1 - i : i;
            run_block(block * block_threads, block_threads);
        }
        from_the_last = !from_the_last;
        released.clear();
    } while (!run.faulted && run.shape.blocks == Blocks::AllAtOnce &&
             release_if_all(run.threads.data(), run.threads.size(), State::AtGridSync, &released));
    for (const Thread* thread : run.threads)
        if (!run.faulted && thread->state != State::Exited) {
            run.fault = divergence();
            run.faulted = true;
            running = nullptr;  // no single thread is at fault
        }
}

void prepare(Block& block, unsigned long long index) {
    const Index3& grid = run.shape.grid;
    const Index3& size = run.shape.block;
    const Index3 at{unsigned(index % grid.x), unsigned(index / grid.x % grid.y), unsigned(index / grid.x / grid.y)};
    const unsigned count = size.x * size.y * size.z;
    block.threads.resize(count);
    block.warps.resize((count + WARP_THREADS - 1) / WARP_THREADS);
    block.shared.clear();
    block.shared_bytes = run.shape.dynamic_shared_bytes;
    for (unsigned rank = 0; rank < count; ++rank) {
        const Index3 thread{rank % size.x, rank / size.x % size.y, rank / size.x / size.y};
        block.threads[rank] = Thread{{thread, at, size, grid}, &block, rank, State::Ready, nullptr, 0, 0};
        run.threads.push_back(&block.threads[rank]);
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

unsigned blocks_per_multiprocessor(unsigned block_threads) {
    const unsigned by_threads = MULTIPROCESSOR_THREADS / block_threads;
    return by_threads < MULTIPROCESSOR_BLOCKS ? by_threads : MULTIPROCESSOR_BLOCKS;
}

CUresult run_kernel(const Kernel& kernel, const LaunchShape& shape, const void* arguments) {
    if (kernel.entry != nullptr) return ptx::run_entry(*kernel.entry, shape, arguments);
    const unsigned long long count = 1ull * shape.grid.x * shape.grid.y * shape.grid.z;
    const bool together = shape.blocks == Blocks::AllAtOnce;
    std::vector<Block> blocks(together ? count : 1);
    run.kernel = &kernel;
    run.arguments = arguments;
    run.shape = shape;
    run.faulted = false;
    running = nullptr;
    for (unsigned long long first = 0; first < count && !run.faulted; first += blocks.size()) {
        run.threads.clear();
        for (std::size_t i = 0; i < blocks.size(); ++i) prepare(blocks[i], first + i);
        run_alive_blocks();
    }
    if (!run.faulted) return CUDA_SUCCESS;
    report_fault();
    return run.fault.code;
}

void* shared_memory(const void* site, std::size_t len_bytes) {
    Block& block = *running->block;
    for (const Shared& shared : block.shared)
        if (shared.site == site) return shared.memory.get();
    block.shared_bytes += len_bytes;
    if (block.shared_bytes > SHARED_BYTES_MAX)
        throw Fault{CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "a block has " + std::to_string(SHARED_BYTES_MAX) + " bytes of shared memory and asks for " +
                                                            std::to_string(block.shared_bytes)};
    const std::size_t words = (len_bytes + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t);
    block.shared.push_back({site, std::unique_ptr<std::max_align_t[]>(new std::max_align_t[words]), len_bytes});
    // Not zeroed on a device either.
    std::memset(block.shared.back().memory.get(), 0xCB, len_bytes);
    return block.shared.back().memory.get();
}

void block_sync() { wait(State::AtBlockSync); }

void grid_sync() {
    if (run.shape.blocks != Blocks::AllAtOnce)
        throw Fault{CUDA_ERROR_LAUNCH_FAILED, "grid_sync needs a cooperative launch: blocks run one after the other"};
    wait(State::AtGridSync);
}

void shuffle(void* value, std::size_t len_bytes, int lane_mask) {
    Thread& thread = *running;
    Block& block = *thread.block;
    const unsigned lane = thread.rank % WARP_THREADS;
    const unsigned other = lane ^ unsigned(lane_mask);
    if (other >= WARP_THREADS || thread.rank - lane + other >= block.threads.size())
        throw Fault{CUDA_ERROR_LAUNCH_FAILED, "lane " + std::to_string(lane) + " asks lane " + std::to_string(other) + ", which does not exist"};
    Exchange& exchange = block.warps[thread.rank / WARP_THREADS];
    auto& slots = exchange.value[thread.shuffles++ % 2];
    std::memcpy(slots[lane], value, len_bytes);
    thread.lane_mask = lane_mask;
    wait(State::AtShuffle);
    std::memcpy(value, slots[other], len_bytes);
}

void complain(const std::string& text) { std::fprintf(stderr, "cuda emulator: %s\n", text.c_str()); }

std::string text_of(const Index3& index) {
    return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) + ")";
}

}  // namespace emulator
