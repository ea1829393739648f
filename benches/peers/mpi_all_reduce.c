/* MPI_Allreduce called directly, in place, on f32: the peer of `fusestep bench --collective all-reduce`.
 *
 *   mpicc -O2 mpi_all_reduce.c -o mpi_all_reduce
 *   mpirun -n 2 ./mpi_all_reduce sizes BYTES...      one line for each: bytes, median seconds, best seconds
 *   mpirun -n 2 ./mpi_all_reduce sizes-threaded BYTES...   the same on an MPI that several threads may call at once
 *   mpirun -n 2 ./mpi_all_reduce list BYTES...       one line for all of them one behind the other: total bytes, median, best
 *
 * `huge` before any of them: the buffer in pages of 2 MiB, as fusestep has buckets of that size and more.
 */
#define _DEFAULT_SOURCE
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* As fusestep's measure: at least 7 calls and 16 MiB, at most 10,000 calls. */
static int rounds_of(size_t bytes) {
    size_t rounds = ((size_t)16 << 20) / (bytes ? bytes : 1);
    return rounds < 7 ? 7 : rounds > 10000 ? 10000 : (int)rounds;
}

/* As there: at least 512 KiB between two looks at the clock, in at most 128 calls. */
static int calls_of(size_t bytes) {
    size_t calls = ((size_t)512 << 10) / (bytes ? bytes : 1);
    return calls < 1 ? 1 : calls > 128 ? 128 : (int)calls;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Times `count` buffers that lie one behind the other, of these lengths in bytes. */
static void measure(float *buffer, const size_t *bytes, int count, int rank) {
    size_t total = 0;
    for (int i = 0; i < count; i++) total += bytes[i];
    int calls = calls_of(total), rounds = rounds_of(total) / calls;
    double *seconds = malloc(rounds * sizeof *seconds);
    for (int round = -1; round < rounds; round++) {
        MPI_Barrier(MPI_COMM_WORLD);
        double start = MPI_Wtime();
        for (int call = 0; call < calls; call++) {
            float *at = buffer;
            for (int i = 0; i < count; i++) {
                MPI_Allreduce(MPI_IN_PLACE, at, (int)(bytes[i] / 4), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
                at += bytes[i] / 4;
            }
        }
        if (round >= 0) seconds[round] = (MPI_Wtime() - start) / calls;
    }
    qsort(seconds, rounds, sizeof *seconds, ascending);
    if (rank == 0) printf("%zu %.9f %.9f\n", total, seconds[rounds / 2], seconds[0]);
    free(seconds);
}

/* Memory of the allocator, or in huge pages. */
static float *buffer_of(size_t bytes, int huge) {
    const size_t page = (size_t)2 << 20;
    if (!huge) return malloc(bytes ? bytes : 4);
    size_t whole = (bytes + page) / page * page;
    void *buffer = aligned_alloc(page, whole);
    if (buffer) madvise(buffer, whole, MADV_HUGEPAGE);
    return buffer;
}

int main(int argc, char **argv) {
    int huge = argc > 1 && strcmp(argv[1], "huge") == 0;
    argc -= huge, argv += huge;
    int rank, level, count = argc - 2;
    int threaded = argc > 1 && strcmp(argv[1], "sizes-threaded") == 0;
    MPI_Init_thread(&argc, &argv, threaded ? MPI_THREAD_MULTIPLE : MPI_THREAD_SINGLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (count < 1) {
        fprintf(stderr, "expected `[huge] sizes BYTES...`, `sizes-threaded` or `list`\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    size_t *bytes = malloc(count * sizeof *bytes), total = 0;
    for (int i = 0; i < count; i++) total += bytes[i] = strtoull(argv[i + 2], NULL, 10) / 4 * 4;
    float *buffer = buffer_of(total, huge);
    if (!buffer) {
        fprintf(stderr, "expected %zu bytes of memory, found less\n", total);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    for (size_t i = 0; i < total / 4; i++) buffer[i] = (float)(i % 64 + rank);
    if (strcmp(argv[1], "list") == 0) {
        measure(buffer, bytes, count, rank);
    } else {
        for (int i = 0; i < count; i++) measure(buffer, &bytes[i], 1, rank);
    }
    MPI_Finalize();
    return 0;
}
