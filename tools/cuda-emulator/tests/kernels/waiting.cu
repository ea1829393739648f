// Kernels whose threads wait for each other.
#include "dialect.cuh"

__device__ inline unsigned long long block_sum(unsigned long long value) {
    SHARED(unsigned long long, partial, 32);
    for (int mask = 16; mask != 0; mask /= 2) value += dialect::shuffle_xor(value, mask);
    dialect::block_sync();
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
    dialect::block_sync();
    unsigned long long sum = 0;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) sum += partial[warp];
    return sum;
}

__device__ inline unsigned long long first_of(const Task& t) {
    unsigned long long sum = 0;
    for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < t.count; i += gridDim.x * blockDim.x)
        sum += dialect::load(reinterpret_cast<const unsigned*>(t.in) + i);
    return sum;
}

// out[block] = sum of the block's share of in.
ENTRY(block_sums, (1024), Arguments<64>, {
    const Task& t = task(arguments);
    const unsigned long long sum = block_sum(first_of(t));
    if (threadIdx.x == 0) dialect::store(reinterpret_cast<unsigned long long*>(t.out) + blockIdx.x, sum);
})

// Half of the threads leave before the barrier.
ENTRY(half_leave, (1024), Arguments<64>, {
    if (threadIdx.x < blockDim.x / 2) return;
    dialect::block_sync();
    (void)arguments;
})

// One warp waits at the barrier, the others at a shuffle that one of their lanes misses.
ENTRY(two_barriers, (1024), Arguments<64>, {
    if (threadIdx.x % 32 == 5) dialect::block_sync();
    else (void)dialect::shuffle_xor(threadIdx.x, 1);
    (void)arguments;
})

ENTRY(two_masks, (1024), Arguments<64>, {
    (void)dialect::shuffle_xor(threadIdx.x, threadIdx.x % 32 < 8 ? 1 : 2);
    (void)arguments;
})

ENTRY(hungry, (1024), Arguments<64>, {
    SHARED(double, memory, 8192);
    memory[0] = 1.0;
    (void)arguments;
})

// The last thread faults while all others of its block wait: their stacks must serve the next
// launch.
ENTRY(last_faults, (1024), Arguments<64>, {
    const Task& t = task(arguments);
    if (threadIdx.x + 1 == blockDim.x) dialect::store(reinterpret_cast<float*>(t.out) + t.count, 1.0f);
    dialect::block_sync();
})
